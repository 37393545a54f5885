/* flat.h - tensors in the layout of an optimizer's arenas: copies of weights and gradients, and
 * state per parameter. Private to dist.
 */
#ifndef LT_DIST_ASYNC_FLAT_H
#define LT_DIST_ASYNC_FLAT_H

#include "autograd/autograd.h"

typedef struct lt_flat { /* all zeros: not open */
    int n;               /* arenas */
    lt_tensor **arena;   /* (n), each with all elements of an arena */
} lt_flat;

/* Opens a flat over the values, the gradients or a slot of the optimizer; part as for
 * lt_optim_arena(), or LT_FLAT_NEW for new memory with zeros. LT_ENOMEM; *flat is not open then. */
enum { LT_FLAT_NEW = -1 };
LT_MUST lt_status lt__flat_open(lt_optim *optim, int part, lt_flat *flat);
void lt__flat_free(lt_flat *flat); /* does nothing if flat is not open */
/* Copies all elements. The flats must be of the same optimizer, or of optimizers with equal
 * parameters. The device's error. */
LT_MUST lt_status lt__flat_copy(const lt_flat *to, const lt_flat *from);
/* The elements of a range. New. NULL with LT_ENOMEM. */
lt_tensor *lt__flat_range(const lt_flat *flat, const lt_optim_range *range);
/* The same for the values, the gradients or a slot of the optimizer; part as for
 * lt_optim_arena(). */
lt_tensor *lt__optim_range(lt_optim *optim, int part, const lt_optim_range *range);
/* The bytes of all elements. */
size_t lt__flat_bytes(const lt_flat *flat);

#endif
