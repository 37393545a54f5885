/* train.h - parameters and optimizer steps, for tests that train. */
#ifndef TESTS_AUTOGRAD_TRAIN_H
#define TESTS_AUTOGRAD_TRAIN_H

#include "ops/ops.h"
#include "tests/lt_test.h"

#define TEST_OPEN(title)                                                                           \
    TEST_WITH(title, lt_ctx *ctx, lt_open(&(lt_config){.poison = true}), lt_ctx_free)

/* n elements, all with this value. New. */
static inline lt_tensor *param(lt_ctx *ctx, lt_dtype dtype, int64_t n, double value)
{
    lt_tensor *x = lt_param_new(ctx, dtype, 1, &n, (lt_init){LT_INIT_CONSTANT, value, 0});
    CHECK(x != NULL);
    return x;
}

/* A parameter or buffer of a tree, which owns it: `side` elements, all a, or a square of random
 * numbers from -a to a. */
static inline lt_tensor *member(lt_params *params, lt_ctx *ctx, const char *name, bool buffer,
                                int ndim, int64_t side, double a)
{
    const int64_t dims[] = {side, side};
    lt_init init = {ndim == 2 ? LT_INIT_UNIFORM : LT_INIT_CONSTANT, ndim == 2 ? -a : a, a};
    lt_tensor *x = buffer ? lt_buffer_new(ctx, LT_F32, ndim, dims, init)
                          : lt_param_new(ctx, LT_F32, ndim, dims, init);
    CHECK(x != NULL);
    CHECK_OK(lt_params_add(params, name, x));
    lt_release(x);
    return x;
}

/* A tree of n parameters with memory, named "a", "b" and so on, which owns them. New. */
static inline lt_params *placed(lt_ctx *ctx, lt_tensor *const *params, int n)
{
    lt_params *p = lt_params_new(ctx);
    for (int i = 0; i < n; i++) {
        CHECK_OK(lt_params_add(p, (char[]){(char)('a' + i), '\0'}, params[i]));
        lt_release(params[i]);
    }
    CHECK_OK(lt_params_place(p));
    return p;
}

/* An f32 parameter of n elements, all 1, with an optimizer. */
typedef struct trained {
    lt_ctx *ctx;
    lt_tensor *w;
    lt_params *params;
    lt_optim *optim;
} trained;

static inline trained trained_new(lt_ctx *ctx, int64_t n, const char *update)
{
    trained t = {.ctx = ctx, .w = param(ctx, LT_F32, n, 1)};
    t.params = placed(ctx, &t.w, 1);
    t.optim = lt_optim_new(ctx, update, &t.w, 1);
    CHECK(t.optim != NULL);
    return t;
}

static inline void trained_free(trained *t)
{
    lt_optim_free(t->optim);
    lt_params_free(t->params);
}

/* A step with the options of group 0 as text. status may be NULL. */
static inline lt_status step_with(lt_optim *optim, const char *options, lt_step_status *status)
{
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&lt_optim_def(optim)->schema, options, opts));
    return lt_optim_step(optim, (const lt_opt *const[]){opts}, 1, status);
}

#endif
