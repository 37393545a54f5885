/* layout.h - the parameters of an optimizer and the buffers of its net, one after the other in a
 * message. Private to dist.
 *
 * A worker and the server have parameters of the same dtypes and shapes, in the same order, but
 * maybe in different arenas.
 */
#ifndef LT_DIST_ASYNC_LAYOUT_H
#define LT_DIST_ASYNC_LAYOUT_H

#include "dist/async/gradient.h"
#include "dist/mail/mail.h"

typedef struct lt_layout {
    lt_ctx *ctx;                /* borrowed */
    lt_optim *optim;            /* borrowed */
    int n, n_buffers, n_groups; /* parameters; buffers; groups in use */
    lt_optim_range *param;      /* (n) the range of each parameter */
    lt_tensor **buffer;         /* (n_buffers) such as running statistics; kept */
    size_t bytes;               /* of all values and buffers in a message */
    size_t slot_bytes;          /* of all optimizer slots and step counts */
} lt_layout;

/* Opens a layout. LT_ENOMEM. */
LT_MUST lt_status lt__layout_open(lt_layout *layout, lt_ctx *ctx, lt_optim *optim,
                                  lt_tensor *const *buffers, int n_buffers);
void lt__layout_close(lt_layout *layout); /* may be not open */

/* Writes the values and buffers to a message (layout->bytes), or reads them from it. The device's
 * error. */
LT_MUST lt_status lt__layout_pack(const lt_layout *layout, char *to);
LT_MUST lt_status lt__layout_unpack(const lt_layout *layout, const char *from);
/* The same for the optimizer's slots and numbers of steps (layout->slot_bytes). */
LT_MUST lt_status lt__layout_pack_slots(const lt_layout *layout, char *to);
LT_MUST lt_status lt__layout_unpack_slots(const lt_layout *layout, const char *from);
/* A digest of the values and buffers. LT_ENOMEM, or the device's error. */
LT_MUST lt_status lt__layout_digest(const lt_layout *layout, int64_t *digest);

/* A message with a gradient, for lt__gradient_unpack(); kind as for lt__message_new(). New. NULL
 * with LT_ENOMEM, LT_EUSAGE if a batch norm updates tensors that are not buffers of the layout, or
 * with the device's error. */
lt_message *lt__gradient_pack(const lt_gradient *gradient, const lt_layout *layout, int kind);
/* Reads a gradient from a message. LT_EDESYNC if the message does not fit the layout; LT_ENOMEM, or
 * the device's error. */
LT_MUST lt_status lt__gradient_unpack(lt_gradient *gradient, const lt_layout *layout,
                                      const lt_message *message);

#endif
