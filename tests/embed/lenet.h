/* lenet.h - LeNet and its training step from ops, in C: convolution 32 3x3, pool, convolution 64
 * 3x3, pool, linear 128, linear 10, ReLU between. For the programs of this folder, which
 * include the header of the library first.
 */
#ifndef TESTS_EMBED_LENET_H
#define TESTS_EMBED_LENET_H

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LENET_PARAMS = 8 };

typedef struct lenet {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w[LENET_PARAMS]; /* weight and bias of each layer */
    lt_optim *optim;
    lt_opt options[LT_MAX_OPT]; /* of the update op */
    char flat[32]; /* "shape=-1,2304": options of reshape before the first linear layer */
} lenet;

static const char *const lenet_names[LENET_PARAMS] = {
    "conv1.w", "conv1.b", "conv2.w", "conv2.b", "linear1.w", "linear1.b", "linear2.w", "linear2.b"};

static void lenet_close(lenet *net)
{
    lt_optim_free(net->optim);
    lt_params_free(net->params);
    for (int i = 0; i < LENET_PARAMS; i++)
        lt_release(net->w[i]);
    memset(net, 0, sizeof *net);
}

/* For images of side x side with one channel; side must be a multiple of 4. Call lenet_close()
 * even if this fails. */
static lt_status lenet_open(lenet *net, lt_ctx *ctx, int64_t side)
{
    int64_t pixels = side / 4 * (side / 4);
    const struct {
        int ndim;
        int64_t dims[4], fan_in;
    } shapes[LENET_PARAMS] = {
        {4, {32, 3, 3, 1}, 9},
        {1, {32}, 9},
        {4, {64, 3, 3, 32}, 9 * 32},
        {1, {64}, 9 * 32},
        {2, {128, 64 * pixels}, 64 * pixels},
        {1, {128}, 64 * pixels},
        {2, {10, 128}, 128},
        {1, {10}, 128},
    };
    *net = (lenet){.ctx = ctx, .params = lt_params_new(ctx)};
    if (!net->params)
        return lt_errcode();
    snprintf(net->flat, sizeof net->flat, "shape=-1,%lld", (long long)(64 * pixels));
    for (int i = 0; i < LENET_PARAMS; i++) {
        double bound = 1 / sqrt((double)shapes[i].fan_in);
        net->w[i] = lt_param_new(ctx, LT_F32, shapes[i].ndim, shapes[i].dims,
                                 (lt_init){LT_INIT_UNIFORM, -bound, bound});
        if (!net->w[i])
            return lt_errcode();
        LT_TRY(lt_params_add(net->params, lenet_names[i], net->w[i]));
    }
    LT_TRY(lt_params_place(net->params));
    net->optim = lt_optim_new(ctx, "momentum_step", net->w, LENET_PARAMS);
    if (!net->optim)
        return lt_errcode();
    return lt_opts_parse(&lt_optim_def(net->optim)->schema, "lr=0.05 momentum=0.9", net->options);
}

/* y = op(x, w, b); x is taken; it is NULL if the previous layer failed. New. */
static lt_tensor *lenet_layer(lenet *net, lt_tensor *x, const char *op, const char *options,
                              lt_tensor *w, lt_tensor *b)
{
    lt_tensor *y = x ? lt_run(net->ctx, op, options, x, w, b, NULL) : NULL;
    lt_release(x);
    return y;
}

/* Images (n, side, side, 1) to logits (n, 10). New. */
static lt_tensor *lenet_forward(lenet *net, lt_tensor *x)
{
    lt_tensor *y = lt_retain(x);
    for (int i = 0; i < 4; i += 2) {
        y = lenet_layer(net, y, "conv2d", "pad=1", net->w[i], net->w[i + 1]);
        y = lenet_layer(net, y, "relu", NULL, NULL, NULL);
        y = lenet_layer(net, y, "max_pool2d", "kernel=2", NULL, NULL);
    }
    y = lenet_layer(net, y, "reshape", net->flat, NULL, NULL);
    y = lenet_layer(net, y, "linear", NULL, net->w[4], net->w[5]);
    y = lenet_layer(net, y, "relu", NULL, NULL, NULL);
    return lenet_layer(net, y, "linear", NULL, net->w[6], net->w[7]);
}

/* Forward, backward, update. */
static lt_status lenet_learn(lenet *net, lt_tensor *x, lt_tensor *labels, double *loss)
{
    const lt_opt *groups[] = {net->options};
    lt_tensor *y = lenet_layer(net, lenet_forward(net, x), "cross_entropy", NULL, labels, NULL);
    lt_status status = lt_errcode();
    if (y && (status = lt_backward(y, NULL)) == LT_OK &&
        (status = lt_optim_step(net->optim, groups, 1, NULL)) == LT_OK)
        status = lt_item(y, 0, loss);
    lt_release(y);
    return status;
}

/* Like lenet_learn(), in a scope, which frees the temporaries of the step. */
static lt_status lenet_step(lenet *net, lt_tensor *x, lt_tensor *labels, double *loss)
{
    LT_TRY(lt_scope_push(net->ctx));
    lt_status status = lenet_learn(net, x, labels, loss);
    lt_scope_pop(net->ctx);
    return status;
}

/* n u8 images (side, side) that can be learned: noise with a bright row whose position is the
 * class. */
static lt_status lenet_synthetic(lt_ctx *ctx, int64_t n, int64_t side, lt_tensor **images,
                                 lt_tensor **labels)
{
    *images = lt_tensor_new(ctx, LT_U8, 3, (int64_t[]){n, side, side});
    *labels = lt_tensor_new(ctx, LT_U8, 1, &n);
    if (!*images || !*labels)
        return lt_errcode();
    uint8_t *pixel = lt_data(*images), *label = lt_data(*labels);
    for (int64_t i = 0; i < n * side * side; i++) {
        uint32_t word[4];
        int64_t image = i / (side * side), row = i / side % side;
        lt_random(lt_seed(ctx), LT_RNG_USER, 0, (uint64_t)i, word);
        label[image] = (uint8_t)(image % (side < 10 ? side : 10));
        pixel[i] = (uint8_t)(word[0] % 128 + (row == label[image] ? 127 : 0));
    }
    return LT_OK;
}

/* One pass over images in memory. New; NULL with a message. */
static inline lt_batches *lenet_batches(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels,
                                        int64_t batch)
{
    lt_source *source = lt_source_tensors(ctx, images, labels);
    lt_batch_options options = {.batch = batch, .shuffle = true};
    lt_batches *batches = source ? lt_batches_new(ctx, source, &options) : NULL;
    lt_source_release(source);
    return batches;
}

#endif
