/* cuda_conv.h - the sizes of a convolution, for the .cu files that compute one. */
#ifndef LT_OPS_CUDA_CONV_H
#define LT_OPS_CUDA_CONV_H

#include "ops/cuda.h"
#include "ops/window.h"

typedef struct lt_cuda_conv {
    lt_window w;
    int64_t n, in, out, groups; /* images; channels of x and of y */
    int64_t in_each, out_each;  /* of a group */
} lt_cuda_conv;

#endif
