/* flat.h - tensors in the layout of an optimizer's arenas: copies of weights and gradients, and
 * state per parameter. Private to dist.
 */
#ifndef LT_DIST_ASYNC_FLAT_H
#define LT_DIST_ASYNC_FLAT_H

#include "autograd/autograd.h"

typedef struct lt_flat_buffers { /* all zeros: not open */
    int n;                       /* arenas */
    lt_tensor **arena;           /* (n), each with all elements of an arena */
} lt_flat_buffers;

/* Opens a flat over the values, the gradients or a slot of the optimizer; part as for
 * lt_optim_arena(), or LT_FLAT_NEW for new memory with zeros. LT_ENOMEM; *flat is not open then. */
enum { LT_FLAT_NEW = -1 };
LT_NODISCARD lt_status lt__flat_open(lt_optim *optim, int part, lt_flat_buffers *flat);
void lt__flat_buffers_free(lt_flat_buffers *flat); /* does nothing if flat is not open */
/* Copies all elements. The flats must be of the same optimizer, or of optimizers with equal
 * parameters. The device's error. */
LT_NODISCARD lt_status lt__flat_buffers_copy(const lt_flat_buffers *to,
                                             const lt_flat_buffers *from);
/* The elements of a range. New. NULL with LT_ENOMEM. */
lt_tensor *lt__flat_buffers_range(const lt_flat_buffers *flat, const lt_optim_range *range);
/* The same for the values, the gradients or a slot of the optimizer; part as for
 * lt_optim_arena(). */
lt_tensor *lt__optim_range(lt_optim *optim, int part, const lt_optim_range *range);
/* The bytes of all elements. */
size_t lt__flat_buffers_bytes(const lt_flat_buffers *flat);

#endif
