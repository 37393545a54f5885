/* layer_norm.h - the formulas of layer_norm and group_norm, for the CPU (their .c files) and CUDA
 * (their .cu files). */
#ifndef LT_OPS_LAYER_NORM_H
#define LT_OPS_LAYER_NORM_H

#include "ops/kernel.h"

enum { X, SCALE, SHIFT }; /* inputs */

/* The first is h, the normalised x; the second is y. r: 1 / sqrt(var + eps). */
#define LT_LAYER_H(x, mean, r) (((x) - (mean)) * (r))
#define LT_LAYER_NORM(x, mean, r, scale, shift) (LT_LAYER_H(x, mean, r) * (scale) + (shift))
/* dx. g: dy * scale. mean_g and mean_gh: the means of g and of g h over the row or group. */
#define LT_LAYER_NORM_BACK(g, h, r, mean_g, mean_gh) ((r) * ((g) - (mean_g) - (h) * (mean_gh)))

#endif
