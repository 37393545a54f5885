/* image.h - the values, buffers and optimizer slots of a net, packed in one block of memory: what
 * the server sends to workers, keeps as a snapshot and saves. Private to dist.
 *
 * A worker's net and its replica on the server have parameters of the same dtypes and shapes, in
 * the same order, but maybe in different arenas.
 */
#ifndef LT_DIST_ASYNC_IMAGE_H
#define LT_DIST_ASYNC_IMAGE_H

#include "autograd/autograd.h"

typedef struct lt_image { /* all zeros: not open */
    lt_ctx *ctx;          /* borrowed, like optim */
    lt_optim *optim;
    int n, n_buffers, n_slots; /* parameters; buffers of the net; slots of each parameter */
    int n_groups;              /* groups of the optimizer in use */
    lt_optim_range *param;     /* (n) the range of each parameter */
    lt_tensor **tensor; /* parameters (n), buffers (n_buffers), slots (n, n_slots). All are kept */
    size_t bytes;       /* size of the packed values: parameters and buffers */
    size_t slot_bytes;  /* size of the packed slots and counts of steps, which follow the values */
} lt_image;

/* Opens an image. LT_ENOMEM. */
LT_NODISCARD lt_status lt__image_open(lt_image *image, lt_ctx *ctx, lt_optim *optim,
                                      lt_tensor *const *buffers, int n_buffers);
void lt__image_close(lt_image *image); /* does nothing if image is not open */

/* Writes the values to memory (image->bytes); with_slots: also the optimizer's slots and counts of
 * steps (image->slot_bytes). The device's error. */
LT_NODISCARD lt_status lt__image_pack(const lt_image *image, bool with_slots, char *to);
/* Sets the values, and maybe slots and counts of steps, from memory. The device's error. */
LT_NODISCARD lt_status lt__image_unpack(const lt_image *image, bool with_slots, const char *from);
/* Copies values, buffers, slots and counts of steps of one net to another. The device's error. */
LT_NODISCARD lt_status lt__image_copy(const lt_image *to, const lt_image *from);
/* A digest of the values and buffers. LT_ENOMEM, or the device's error. */
LT_NODISCARD lt_status lt__image_digest(const lt_image *image, int64_t *digest);

/* A copy of a net in another context, for the server. */
typedef struct lt_replica { /* all zeros: not open */
    lt_params *params;
    lt_optim *optim;
    lt_image image; /* an image of optim and its buffers */
} lt_replica;

/* Opens a replica of a net in ctx, which is borrowed and must have the same ops. It has the same
 * values and optimizer slots. LT_ENOMEM, or the device's error. */
LT_NODISCARD lt_status lt__replica_open(lt_replica *replica, lt_ctx *ctx, const lt_image *of);
void lt__replica_close(lt_replica *replica); /* does nothing if replica is not open */

#endif
