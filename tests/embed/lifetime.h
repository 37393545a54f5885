/* lifetime.h - for the tests of objects that outlive their context. */
#ifndef TESTS_EMBED_LIFETIME_H
#define TESTS_EMBED_LIFETIME_H

#include "autograd/autograd.h"
#include "tests/device/emu.h"

static inline lt_ctx *open_on(bool accelerator)
{
    use_emu();
    lt_ctx *ctx = accelerator ? open_device() : lt_open(&(lt_config){.threads = 2, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* Defines a test that runs twice: with ctx on the CPU and on an accelerator. */
#define TEST_BOTH(title)                                                                           \
    static void both_##title(lt_ctx *ctx);                                                         \
    TEST(title)                                                                                    \
    {                                                                                              \
        both_##title(open_on(false));                                                              \
        both_##title(open_on(true));                                                               \
    }                                                                                              \
    static void both_##title(lt_ctx *ctx)

static inline lt_tensor *leaf(lt_ctx *ctx, int64_t n, double value)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 1, &n, value);
    CHECK_OK(lt_set_requires_grad(x, true));
    return x;
}

static inline double sum_of(lt_tensor *x)
{
    double sum = 0, value;
    for (int64_t i = 0; i < lt_count(x); i++) {
        CHECK_OK(lt_item(x, i, &value));
        sum += value;
    }
    return sum;
}

#endif
