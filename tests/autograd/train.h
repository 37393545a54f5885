/* train.h - parameters and optimizer steps, for tests that train. */
#ifndef TESTS_AUTOGRAD_TRAIN_H
#define TESTS_AUTOGRAD_TRAIN_H

#include "ops/ops.h"
#include "tests/lt_test.h"

#define TEST_OPEN(title)                                                                           \
    TEST_WITH(title, lt_ctx *ctx, lt_open(&(lt_config){.poison = true}), lt_ctx_free)

/* A tree of n parameters with memory, named "a", "b" and so on. New. */
static inline lt_params *placed(lt_ctx *ctx, lt_tensor *const *params, int n)
{
    lt_params *p = lt_params_new(ctx);
    for (int i = 0; i < n; i++)
        CHECK_OK(lt_params_add(p, (char[]){(char)('a' + i), '\0'}, params[i]));
    CHECK_OK(lt_params_place(p));
    return p;
}

/* A step with the options of group 0 as text. status may be NULL. */
static inline lt_status step_with(lt_optim *optim, const char *options, lt_step_status *status)
{
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&lt_optim_def(optim)->schema, options, opts));
    return lt_optim_step(optim, (const lt_opt *const[]){opts}, 1, status);
}

#endif
