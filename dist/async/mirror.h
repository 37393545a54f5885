/* mirror.h - a copy of the parameters, the optimizer and the buffers of a worker in another
 * context, for the server. Private to dist. */
#ifndef LT_DIST_ASYNC_MIRROR_H
#define LT_DIST_ASYNC_MIRROR_H

#include "dist/async/layout.h"

typedef struct lt_mirror {
    lt_ctx *ctx; /* borrowed */
    lt_params *params;
    lt_optim *optim;
    lt_layout layout; /* of optim and its buffers */
} lt_mirror;

/* Opens a mirror of a layout in ctx, with the same values and optimizer slots. ctx must have the
 * same ops; only its thread may use the mirror. LT_ENOMEM, or the device's error. */
LT_MUST lt_status lt__mirror_open(lt_mirror *mirror, lt_ctx *ctx, const lt_layout *of);
void lt__mirror_close(lt_mirror *mirror); /* may be not open */
/* Copies values, buffers and slots from one layout to another one, which mirrors it. */
LT_MUST lt_status lt__mirror_copy(const lt_layout *to, const lt_layout *from);

#endif
