/* conv.h - the implementations of convolution on the CPU, all with one interface. conv2d.c lists
 * them and runs each task with the first one that accepts it.
 *
 * All tensors are dense: images (n, h, w, c), weights (out, kh, kw, in/groups). Sums are in f32, or
 * in f64 for f64.
 */
#ifndef LT_OPS_CPU_CONV_H
#define LT_OPS_CPU_CONV_H

#include "ops/cpu/product.h"
#include "ops/window.h"

/* A task computes one result from the other operands. data is NULL for operands that are not used:
 *   LT_PRODUCT       y = x w + bias; bias only for a batch of one
 *   LT_CONV          y = x * w + bias
 *   LT_CONV_DATA     the gradient of x, written to x; from w and the gradient of y, in y
 *   LT_CONV_WEIGHTS  the gradient of w, written to w; from x and the gradient of y, in y
 * add: add to the existing result instead of overwriting it; bias.data is NULL then. */
typedef enum lt_conv_task_kind {
    LT_PRODUCT,
    LT_CONV,
    LT_CONV_DATA,
    LT_CONV_WEIGHTS
} lt_conv_task_kind;
typedef struct lt_conv_task {
    lt_conv_task_kind kind;
    const lt_product *product; /* sizes of a product */
    const lt_conv *conv;       /* sizes of a convolution */
    lt_operand x, w, bias, y;
    bool add;
} lt_conv_task;

/* One implementation of some of the convolution tasks. */
typedef struct lt_conv_impl {
    const char *name;
    /* LT_OK if run() supports the task and is faster on this machine than the implementations that
     * follow in the list; LT_EUNSUPPORTED if not. Any other error fails the call. */
    lt_status (*accepts)(const lt_call *c, const lt_conv_task *task);
    /* Bytes of c->scratch that run() needs for the tasks of a call whose x and y have this dtype.
     * Returns 0 for a convolution that is not supported. NULL if run() never needs scratch. */
    size_t (*scratch)(const lt_call *c, const lt_conv *v, lt_dtype dtype, bool backward);
    /* Returns LT_EUNSUPPORTED only before anything is written. */
    lt_status (*run)(const lt_call *c, const lt_conv_task *task);
} lt_conv_impl;

/* Depthwise 3x3 convolutions, for which oneDNN reaches only a fraction of the memory bandwidth.
 * Each channel is its own group. Stride is 1 or 2, pad is 0 or 1, both the same along both axes,
 * without dilation. x, w and y are all f32 or all bf16, but the gradient of w may be f32 with bf16
 * inputs. In bf16 with stride 1 and fewer than 32 channels, only the gradient of w is accepted. */
extern const lt_conv_impl lt__depthwise;

/* 3x3 convolutions of stride 1, without groups or dilation, with less than half the
 * multiplications: Winograd's minimal filtering F(2x2, 3x3). x, w and y are all f32 or all bf16,
 * but the gradient of w may be f32 with bf16 inputs. Channel counts are multiples of 16, and pad is
 * at most 2. */
extern const lt_conv_impl lt__winograd;
/* Whether lt__winograd.run() supports the task, even if it is not the fastest. */
bool lt__winograd_can(const lt_conv_task *task);

/* f32 convolutions of images with few channels, as in the first layer of a network, and the
 * gradients of their weights. */
extern const lt_conv_impl lt__conv_thin;

/* The gradient of the weights of convolutions with few channels and many pixels, for which oneDNN
 * is slow. Images are f32 or bf16; the gradient is f32. */
extern const lt_conv_impl lt__conv_weights;

/* *impl = the implementation that runs the task. LT_EUNSUPPORTED if none accepts it, which happens
 * only for halves. In conv2d.c. */
lt_status lt__conv_choose(const lt_call *c, const lt_conv_task *task, const lt_conv_impl **impl);

#endif
