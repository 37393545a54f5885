/* split.h - convolutions and linear layers, trained by whole and by split backwards. Both must
 * leave the same bits. */
#ifndef TESTS_AUTOGRAD_SPLIT_H
#define TESTS_AUTOGRAD_SPLIT_H

#include "amp/amp.h"
#include "tests/autograd/graph.h"

typedef struct layer { /* y = op(x, w, b) */
    const char *op, *options;
    int nx, nw; /* axes of x and w */
    int64_t x[4], w[4];
    bool bias;
} layer;

static const layer layers[] = {
    {"linear", NULL, 2, 2, {5, 19}, {7, 19}, true},
    {"linear", NULL, 3, 2, {2, 3, 64}, {32, 64}, false},
    {"conv2d", "pad=1", 4, 4, {2, 7, 6, 3}, {8, 3, 3, 3}, true},
    {"conv2d", "stride=2 pad=1", 4, 4, {2, 9, 9, 16}, {32, 3, 3, 16}, false},
    {"conv2d", "stride=2,1 dilation=1,2", 4, 4, {1, 8, 9, 4}, {6, 3, 2, 4}, true},
    {"conv2d", "pad=1 groups=2", 4, 4, {2, 6, 6, 8}, {12, 3, 3, 4}, true},
    {"conv2d", "pad=1 groups=32", 4, 4, {2, 9, 8, 32}, {32, 3, 3, 1}, true},
    {"conv2d", "pad=1 groups=5", 4, 4, {2, 5, 4, 5}, {5, 3, 3, 1}, false},
    {"conv2d", "pad=1", 4, 4, {3, 10, 11, 48}, {32, 3, 3, 48}, true},
    {"conv2d", NULL, 4, 4, {4, 16, 16, 32}, {16, 1, 1, 32}, true},
    {"conv2d", NULL, 4, 4, {8, 16, 16, 32}, {32, 1, 1, 32}, false},
    {"conv2d", "stride=2 pad=3", 4, 4, {1, 20, 20, 3}, {16, 7, 7, 3}, true},
    {"conv2d", "pad=1", 4, 4, {0, 5, 5, 3}, {4, 3, 3, 3}, true},
};
enum { LAYERS = sizeof layers / sizeof *layers, MICRO = 3, MOST_BYTES = 1 << 21 };

typedef struct bits { /* the gradients of x in each micro-batch, then of w and b */
    unsigned char at[MOST_BYTES];
    size_t n;
    int deferred; /* backwards after which w had no gradient, or an old one */
} bits;

static inline void put_bits(bits *to, lt_tensor *grad)
{
    lt_tensor *x = grad ? lt__on_host(grad) : NULL;
    if (!x)
        FAIL("no gradient");
    size_t bytes = (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype);
    CHECK(to->n + bytes <= MOST_BYTES);
    if (bytes > 0)
        memcpy(to->at + to->n, x->data, bytes);
    to->n += bytes;
    lt_release(x);
}

static inline lt_tensor *random_tensor(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                       uint64_t stream)
{
    lt_tensor *f = lt_tensor_new(ctx, LT_F32, ndim, dims);
    CHECK_OK(lt_fill_uniform(f, LT_RNG_USER, stream, 0, -1, 1));
    lt_tensor *x = lt__tensor_copy(f, dtype);
    lt_release(f);
    return x;
}

/* Forward and backward of one micro-batch: y = op(-x, w, b) from the gradient -y, so that x gets a
 * gradient through a node. */
static inline lt_deferred_wgrad *micro_batch(lt_ctx *ctx, const layer *l, lt_tensor *x,
                                             lt_tensor *w, lt_tensor *b, bool split)
{
    lt_deferred_wgrad *weights = NULL;
    lt_tensor *minus = lt_run(ctx, "neg", NULL, x, NULL);
    lt_tensor *y = lt_run(ctx, l->op, l->options, minus, w, b, NULL);
    if (!y)
        FAIL("%s", lt_errmsg());
    lt_grad_off(ctx);
    lt_tensor *dy = lt_run(ctx, "neg", NULL, y, NULL);
    lt_grad_on(ctx);
    CHECK_OK(lt_backward_from(ctx, &y, &dy, 1, split ? &weights : NULL));
    RELEASE(minus, y, dy);
    return weights;
}

/* Accumulates MICRO micro-batches in ctx, with parameters of dtype. half: the dtype of the half
 * copies through which they are read, or LT_F32. */
static inline void accumulate(lt_ctx *ctx, const layer *l, lt_dtype dtype, lt_dtype half,
                              bool split, bits *to)
{
    lt_deferred_wgrad *weights[MICRO];
    lt_tensor *x[MICRO];
    lt_init init = {LT_INIT_UNIFORM, -1, 1};
    lt_params *params = lt_params_new(ctx);
    lt_tensor *w = lt_param_new(ctx, dtype, l->nw, l->w, init);
    lt_tensor *b = l->bias ? lt_param_new(ctx, dtype, 1, l->w, init) : NULL;
    to->n = 0;
    to->deferred = 0;
    lt_set_autocast(ctx, half);
    CHECK_OK(lt_params_add(params, "w", w));
    if (b)
        CHECK_OK(lt_params_add(params, "b", b));
    CHECK_OK(lt_params_place(params));
    for (int i = 0; i < MICRO; i++) {
        x[i] = random_tensor(ctx, half == LT_F32 ? dtype : half, l->nx, l->x, 7 + (uint64_t)i);
        CHECK_OK(lt_set_requires_grad(x[i], true));
        weights[i] = micro_batch(ctx, l, x[i], w, b, split);
        put_bits(to, lt_grad(x[i]));
        to->deferred += w->leaf->deferred == i + 1;
    }
    for (int i = 0; i < MICRO && split; i++)
        CHECK_OK(lt_backward_weights(weights[i]));
    put_bits(to, lt_grad(w));
    if (b)
        put_bits(to, lt_grad(b));
    lt_set_autocast(ctx, LT_F32);
    for (int i = 0; i < MICRO; i++)
        lt_release(x[i]);
    lt_params_free(params);
    RELEASE(w, b);
}

/* Compares both kinds of backward for all layers, in contexts that open() makes. */
static inline void compare_all(lt_ctx *(*open)(void), lt_dtype dtype, lt_dtype half,
                               bool must_defer)
{
    static bits whole, split;
    for (int i = 0; i < LAYERS; i++) {
        for (int k = 0; k < 2; k++) { /* the same parameters in each context */
            lt_ctx *ctx = open();
            lt_scaler scaler = {.k = 5};
            lt_loss_scale *scale = half == LT_F16 ? lt_loss_scale_new(ctx, &scaler) : NULL;
            CHECK_OK(lt_use_loss_scale(ctx, scale));
            accumulate(ctx, &layers[i], dtype, half, k == 1, k == 1 ? &split : &whole);
            CHECK_OK(lt_use_loss_scale(ctx, NULL));
            lt_loss_scale_free(scale);
            finish(ctx);
        }
        CHECK_EQ(whole.deferred, 0);
        if (must_defer)
            CHECK_EQ(split.deferred, MICRO);
        if (split.deferred != MICRO)
            printf("%s %s: not split\n", layers[i].op, layers[i].options ? layers[i].options : "");
        CHECK_EQ(split.n, whole.n);
        if (memcmp(split.at, whole.at, whole.n) != 0)
            FAIL("layer %d differs in %s", i, lt_dtype_name(dtype));
    }
}

#endif
