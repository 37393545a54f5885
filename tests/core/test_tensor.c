/* test_tensor.c - tensors, scopes, the memory pool and injected faults. */
#include <pthread.h>
#include <signal.h>

#include "core/tensor.h"
#include "tests/lt_test.h"

static const int64_t dims23[] = {2, 3};

static lt_tensor *counting(lt_ctx *ctx, int ndim, const int64_t *dims)
{
    lt_tensor *x = lt_tensor_new(ctx, LT_F32, ndim, dims);
    for (int64_t i = 0; i < lt_count(x); i++)
        ((float *)lt_data(x))[i] = (float)i;
    return x;
}

TEST_CTX(shapes)
{
    char text[64];
    lt_tensor *x = lt_tensor_full(ctx, LT_F16, 2, dims23, 1.5);
    CHECK_STR(lt_describe(x, text, sizeof text), "2x3 f16");
    CHECK_EQ(lt_dim(x, -1), 3);
    lt_tensor *s = lt_tensor_full(ctx, LT_I64, 0, NULL, 7);
    CHECK_EQ(lt_count(s), 1);
    CHECK_STR(lt_describe(s, text, sizeof text), "scalar i64");
    double v;
    CHECK_OK(lt_item(x, 5, &v));
    CHECK_NEAR(v, 1.5, 0);
    CHECK_FAILS(lt_item(x, 6, &v), LT_EINVAL, "element 6 is out of range for a tensor of 6");
    CHECK_NULL(lt_tensor_new(ctx, LT_F32, 9, dims23), LT_EINVAL, "at most 8 axes");
    CHECK_NULL(lt_tensor_new(ctx, LT_F32, 2, (int64_t[]){2, -1}), LT_EINVAL,
               "dim 2 is -1, but dims cannot be negative");
    CHECK_NULL(lt_tensor_new(ctx, LT_U8, 3, (int64_t[]){(int64_t)1 << 40, 0, (int64_t)1 << 40}),
               LT_EINVAL, "too large");
    CHECK(!lt_tensor_new(ctx, LT_F32, 1, (int64_t[]){(int64_t)1 << 50}));
    CHECK_EQ(lt_errcode(), LT_ENOMEM);
    RELEASE(x, s);
}

TEST_CTX(an_integer_fills_exactly_or_is_refused)
{
    const int64_t values[] = {INT64_MAX, INT64_MIN, ((int64_t)1 << 53) + 1, -5};
    lt_tensor *x = lt_tensor_new(ctx, LT_I64, 1, (int64_t[]){10000});
    lt_tensor *small = lt_tensor_new(ctx, LT_U8, 1, (int64_t[]){3});
    lt_tensor *f = lt_tensor_new(ctx, LT_F32, 1, (int64_t[]){3});
    double number;
    for (int i = 0; i < 4; i++) {
        CHECK_OK(lt_fill_integer(x, values[i]));
        for (int64_t j = 0; j < 10000; j++)
            CHECK_EQ(((int64_t *)lt_data(x))[j], values[i]);
    }
    CHECK_OK(lt_fill_integer(small, 255));
    CHECK_EQ(((uint8_t *)lt_data(small))[2], 255);
    CHECK_OK(lt_fill_integer(f, ((int64_t)1 << 62) + 1)); /* rounded, as floats are */
    CHECK_OK(lt_item(f, 2, &number));
    CHECK(number == 0x1p62);
    CHECK_FAILS(lt_fill_integer(small, 256), LT_EINVAL, "256 does not fit into u8");
    CHECK_FAILS(lt_fill_integer(small, -1), LT_EINVAL, "-1 does not fit into u8");
    CHECK_FAILS(lt_fill(small, 0.5), LT_EINVAL, "0.5 does not fit into u8");
    CHECK_FAILS(lt_fill(x, 0x1p63), LT_EINVAL, "9.22337e+18 does not fit into i64");
    CHECK_FAILS(lt_fill(x, NAN), LT_EINVAL, "nan does not fit into i64");
    CHECK_NULL(lt_tensor_full(ctx, LT_I32, 0, NULL, 1e300), LT_EINVAL,
               "1e+300 does not fit into i32");
    CHECK_OK(lt_fill(x, -0x1p63));
    CHECK_EQ(((int64_t *)lt_data(x))[9999], INT64_MIN);
    RELEASE(x, small, f);
}

TEST_CTX(views_share_memory)
{
    lt_tensor *x = counting(ctx, 2, (int64_t[]){4, 3});
    lt_tensor *rows = lt_rows(x, 1, 2), *flat = lt_view(rows, 1, (int64_t[]){6});
    lt_release(rows);
    double v;
    CHECK_OK(lt_item(flat, 0, &v));
    CHECK_NEAR(v, 3, 0);
    CHECK_OK(lt_fill(flat, -1));
    CHECK_OK(lt_item(x, 8, &v));
    CHECK_NEAR(v, -1, 0);
    CHECK_OK(lt_item(x, 9, &v));
    CHECK_NEAR(v, 9, 0);
    CHECK_NULL(lt_rows(x, 3, 2), LT_EINVAL,
               "2 rows from row 3 (counted from 0) are outside 4x3 f32");
    CHECK_NULL(lt_view(x, 1, (int64_t[]){11}), LT_EINVAL,
               "has 12 elements, but the dims require 11");
    lt_release(x);
    CHECK_OK(lt_item(flat, 5, &v)); /* the view holds the memory */
    lt_release(flat);
}

TEST_CTX(copies_convert)
{
    lt_tensor *x = counting(ctx, 2, dims23), *y = lt_tensor_new(ctx, LT_I32, 1, (int64_t[]){6});
    CHECK_OK(lt_copy(y, x));
    CHECK_EQ(((int32_t *)lt_data(y))[5], 5);
    lt_tensor *z = lt_tensor_new(ctx, LT_I32, 1, (int64_t[]){5});
    CHECK_FAILS(lt_copy(z, x), LT_EINVAL,
                "copy requires the same number of elements: 2x3 f32 and 5 i32 differ");
    RELEASE(x, y, z);
}

/* Copies large enough to bypass the cache, at aligned and unaligned addresses. Source and
 * destination within a tensor may overlap. */
TEST_CTX(large_copies)
{
    enum { N = (9 << 20) + 77, PART = (4 << 20) + 1 };
    lt_tensor *x = lt_tensor_new(ctx, LT_U8, 1, (int64_t[]){N});
    uint8_t *at = lt_data(x);
    for (int from = 0; from < 20; from += 3) {
        int to = from % 2 ? N - PART - from / 2 : 11;
        lt_tensor *part = lt__tensor_view(x, 1, (int64_t[]){PART}, from, true);
        lt_tensor *copy = lt__tensor_view(x, 1, (int64_t[]){PART}, to, true);
        for (int i = 0; i < N; i++)
            at[i] = (uint8_t)((unsigned)i * 2654435761u >> 24);
        CHECK_OK(lt_copy(copy, part));
        int wrong = 0;
        for (int i = 0; i < N; i++) {
            int was = i >= to && i < to + PART ? i - to + from : i;
            wrong += at[i] != (uint8_t)((unsigned)was * 2654435761u >> 24);
        }
        CHECK_EQ(wrong, 0);
        RELEASE(part, copy);
    }
    lt_release(x);
}

TEST_CTX(scopes_end_tensors)
{
    lt_tensor *before = counting(ctx, 2, dims23);
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *temporary = counting(ctx, 2, dims23), *kept = counting(ctx, 2, dims23);
    lt_tensor *view = lt_view(before, 1, (int64_t[]){6});
    lt_keep(kept);
    size_t live = lt_memory_stats(ctx).live;
    lt_scope_pop(ctx);
    CHECK(lt_memory_stats(ctx).live < live);
    CHECK(lt_is_dead(temporary) && lt_is_dead(view) && !lt_is_dead(kept) && !lt_is_dead(before));
    CHECK_NULL(
        lt_data(temporary), LT_EINVAL,
        "belongs to a step that is over; keep it within the step, with x:keep() or lt_keep(x)");
    double v;
    CHECK_FAILS(lt_item(temporary, 0, &v), LT_EINVAL, "a step that is over");
    CHECK_OK(lt_item(before, 5, &v));
    CHECK_OK(lt_item(kept, 5, &v));
    RELEASE(temporary, view, kept, before);
}

TEST_CTX(results_move_to_the_outer_scope)
{
    CHECK_OK(lt_scope_push(ctx));
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *x = counting(ctx, 2, dims23);
    lt_keep_outer(x);
    lt_scope_pop(ctx);
    CHECK(!lt_is_dead(x));
    lt_scope_pop(ctx);
    CHECK(lt_is_dead(x));
    lt_release(x);
}

TEST(a_context_outlives_its_handle)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *x = counting(ctx, 2, dims23);
    lt_ctx_free(ctx); /* ends open scopes */
    CHECK(lt_is_dead(x));
    lt_release(x);
}

TEST_CTX(memory_is_reused)
{
    lt_release(counting(ctx, 1, (int64_t[]){1000}));
    lt_memory first = lt_memory_stats(ctx);
    CHECK_EQ(first.live, 0);
    CHECK(first.cached >= 4000);
    for (int i = 0; i < 100; i++)
        lt_release(counting(ctx, 1, (int64_t[]){1000 - i % 50}));
    CHECK_EQ(lt_memory_stats(ctx).cached, first.cached);
    CHECK_EQ(lt_memory_stats(ctx).peak, first.peak);
    lt_memory_trim(ctx);
    CHECK_EQ(lt_memory_stats(ctx).cached, 0);
}

TEST(blocks_of_every_size_are_usable_and_aligned)
{
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.poison = true});
    for (size_t bytes = 0; bytes < 300000; bytes += bytes < 600 ? 1 : 997) {
        unsigned char *p = lt__alloc(ctx, bytes);
        CHECK(p && (uintptr_t)p % 64 == 0);
        for (size_t i = 0; i < bytes; i++) /* ASan reports a size class that is too small */
            CHECK(p[i] == 0xff);
        lt__free(ctx, p, bytes);
    }
    lt_ctx_free(ctx);
}

TEST(faults)
{
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.fault = "alloc:n=4"});
    lt_tensor *x = counting(ctx, 2, dims23); /* allocates storage, memory and header */
    CHECK(x != NULL);
    CHECK_NULL(lt_tensor_new(ctx, LT_F32, 2, dims23), LT_ENOMEM, "out of memory on cpu");
    lt_release(x);
    CLOSE_CTX(ctx);
    static const char *const wrong[] = {"alloc:m=4",
                                        "alloc:n=0",
                                        "alloc:n=-4",
                                        "alloc:n=4x",
                                        "alloc:rank=1:n=4",
                                        "flood",
                                        "kill:rank=1",
                                        "kill:step=3:rank=1",
                                        "kill:rank=1:step=0",
                                        "kill:rank=1:step=3:ms=1",
                                        "kill:rank=1:ms=3",
                                        "leave:rank=:step=3",
                                        "hang:rank=1:step= 3",
                                        "delay:rank=1:step=3",
                                        "latency:rank=1:ms=3",
                                        "inf:rank=0:step=1",
                                        "inf:rank=0:step=0:param=w",
                                        "inf:rank=0:step=2:param="};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_NULL(lt_ctx_new(&(lt_config){.fault = wrong[i]}), LT_EUSAGE,
                   "the faults are alloc:n=5, kill:rank=1:step=3, leave:rank=1:step=3, "
                   "hang:rank=1:step=3, delay:rank=1:ms=100, latency:rank=1:us=500 and "
                   "inf:rank=0:step=7:param=conv1.w");
    }
    static const char *const right[] = {
        "kill:rank=1:step=3",  "leave:rank=12:step=345", "hang:rank=0:step=1",
        "delay:rank=1:ms=100", "latency:rank=1:us=500",  "inf:rank=3:step=1:param=1.body.w"};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        ctx = lt_ctx_new(&(lt_config){.fault = right[i]});
        CHECK(ctx != NULL);
        lt_ctx_free(ctx);
    }
    CHECK(!lt_ctx_new(&(lt_config){.device = "gpu"}));
    CHECK_EQ(lt_errcode(), LT_EUSAGE);
    CHECK(!lt_ctx_new(&(lt_config){.device = "cuda:0"}));
    CHECK_EQ(lt_errcode(), LT_EENV);
}

static void *release_many(void *arg)
{
    lt_tensor **x = arg;
    for (int i = 0; i < 1000; i++)
        lt_release(x[i]);
    return NULL;
}

TEST_CTX(tensors_may_be_released_in_another_thread)
{
    static lt_tensor *x[2][1000];
    CHECK_OK(lt_scope_push(ctx));
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < 1000; i++)
            x[t][i] = lt_tensor_new(ctx, LT_F32, 2, dims23);
    pthread_t thread[2];
    for (int t = 0; t < 2; t++)
        CHECK_EQ(pthread_create(&thread[t], NULL, release_many, x[t]), 0);
    lt_scope_pop(ctx);
    for (int t = 0; t < 2; t++)
        pthread_join(thread[t], NULL);
}

TEST(messages)
{
    CHECK_EQ(lt_fail(LT_EDATA, "%s is %d", "x", 3), LT_EDATA);
    CHECK_EQ(lt_fail_prefix("a.lua:%d", 9), LT_EDATA);
    CHECK_STR(lt_errmsg(), "a.lua:9: x is 3");
    CHECK_EQ(lt_exit_code(LT_EDATA), 4);
    CHECK_EQ(lt_exit_code(LT_EDONE), 0);
    CHECK_EQ(lt_exit_code(LT_ESTOPPED), 75);
    CHECK_STR(lt_status_text(LT_ESTOPPED), "stopped by a signal");
    lt_fail(LT_EINVAL, "%s again", lt_errmsg()); /* its own message as an argument */
    CHECK_STR(lt_errmsg(), "a.lua:9: x is 3 again");
    static const char *const names[] = {"stride", "pad", "dilation"};
    CHECK_EQ(lt_nearest("strides", names, 3), 0);
    CHECK_EQ(lt_nearest("dilaton", names, 3), 2);
    CHECK_EQ(lt_nearest("kernel", names, 3), -1);

    const char *const words[] = {"--lr", "--weight-decay", "--label-smoothing", "decay_bias"};
    CHECK_EQ(lt_nearest("--decay", words, 4), 1);
    CHECK_EQ(lt_nearest("smoothing", words, 4), 2);
    CHECK_EQ(lt_nearest("bias", words, 4), 3);
    CHECK_EQ(lt_nearest("oothing", words, 4), -1);
    CHECK_EQ(lt_nearest("--", words, 4), -1);
    CHECK_EQ(lt_nearest("", words, 4), -1);
}

static lt_ctx *listening;
static volatile sig_atomic_t heard;

static void stop_at(int signal) { heard = lt_stop(listening, signal); }

TEST(a_stop_request_is_accepted_only_while_listening)
{
    listening = lt_ctx_new(NULL);
    CHECK(signal(SIGUSR1, stop_at) != SIG_ERR);
    CHECK_EQ(raise(SIGUSR1), 0);
    CHECK(!heard);
    CHECK_EQ(lt_stop_reason(listening), 0);
    lt_stop_listen(listening, true);
    lt_stop_listen(listening, true);
    CHECK_EQ(raise(SIGUSR1), 0);
    CHECK(heard);
    CHECK_EQ(lt_stop_reason(listening), SIGUSR1);
    lt_stop_listen(listening, false);
    CHECK_EQ(lt_stop_reason(listening), SIGUSR1);
    lt_stop_listen(listening, false);
    CHECK_EQ(lt_stop_reason(listening), SIGUSR1); /* kept for the next listener */
    CHECK(!lt_stop(listening, SIGTERM));
    CHECK_EQ(lt_stop_reason(listening), SIGUSR1);
    lt_stop_listen(listening, true);
    CHECK(lt_stop(listening, SIGTERM));
    CHECK_EQ(lt_stop_reason(listening), SIGTERM);
    CHECK(!lt_stop(listening, 0));
    CHECK_EQ(lt_stop_reason(listening), 0);
    lt_stop_listen(listening, false);
    signal(SIGUSR1, SIG_DFL);
    lt_ctx_free(listening);
}
