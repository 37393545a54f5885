/* rescale.h - statistics of gradients, shared by rescale.c and grad_table.c. */
#ifndef LT_OPS_CPU_RESCALE_H
#define LT_OPS_CPU_RESCALE_H

#include <math.h>

#include "ops/ops.h"

/* The statistics of both sets of elements together. */
static inline lt_grad_stats lt__grad_stats_join(lt_grad_stats a, lt_grad_stats b)
{
    return (lt_grad_stats){fmax(a.largest, b.largest), a.not_finite + b.not_finite};
}

#endif
