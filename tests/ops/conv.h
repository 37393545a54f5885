/* conv.h - for tests of the implementations of convolution on the CPU (ops/cpu/conv.h): sizes,
 * random operands, and runs of a task in poisoned scratch. */
#ifndef TESTS_OPS_CONV_H
#define TESTS_OPS_CONV_H

#include <sys/mman.h>

#include "ops/cpu/conv.h"
#include "ops/cpu/panel.h"
#include "tests/ops/cases.h"

/* Pairs are (height, width). */
static inline lt_conv conv_with(int64_t n, const int64_t size[2], int64_t in, int64_t out,
                                int64_t groups, int64_t kernel, int64_t stride,
                                const int64_t pad[2])
{
    lt_conv v = {.n = n, .in = in, .out = out, .groups = groups};
    for (int i = 0; i < 2; i++) {
        v.window.in[i] = size[i];
        v.window.kernel[i] = kernel;
        v.window.stride[i] = stride;
        v.window.pad[i] = pad[i];
        v.window.dilation[i] = 1;
        v.window.out[i] = (size[i] + 2 * pad[i] - kernel) / stride + 1;
    }
    return v;
}

/* Square images, with a pad of half the kernel. */
static inline lt_conv conv_of(int64_t n, int64_t side, int64_t in, int64_t out, int64_t kernel,
                              int64_t stride)
{
    return conv_with(n, (int64_t[]){side, side}, in, out, 1, kernel, stride,
                     (int64_t[]){kernel / 2, kernel / 2});
}

/* Whether the implementation accepts a task with x and y of this dtype, and w of of_w. */
static inline bool takes(const lt_conv_impl *impl, lt_conv_task_kind kind, const lt_conv *v,
                         lt_dtype dtype, lt_dtype of_w, int threads)
{
    lt_operand of = {NULL, dtype};
    lt_conv_task task = {.kind = kind, .conv = v, .x = of, .w = {NULL, of_w}, .y = of};
    return impl->accepts(&(lt_call){.threads = threads}, &task) == LT_OK;
}

/* Changes each of n sizes of v by `by`. The implementation must then not accept the gradient of w
 * in f32, and need no scratch for it. */
static inline void check_declined(const lt_conv_impl *impl, lt_conv *v, int64_t *const *sizes,
                                  int n, int64_t by)
{
    for (int i = 0; i < n; i++) {
        *sizes[i] += by;
        CHECK(!takes(impl, LT_CONV_WEIGHTS, v, LT_F32, LT_F32, 1));
        CHECK_EQ(impl->scratch(&(lt_call){.threads = 1}, v, LT_F32, true), 0);
        *sizes[i] -= by;
    }
}

/* Random numbers. New. */
static inline lt_operand random_operand(lt_dtype dtype, int64_t count, uint64_t seed)
{
    block b = block_new(LT_F64, 1, &count);
    lt_operand x = {malloc((size_t)count * lt_dtype_bytes(dtype) + 1), dtype};
    if (!x.data)
        FAIL("out of memory");
    for (int64_t i = 0; i < count; i++)
        b.at[i] = normal(seed, (uint64_t)i);
    lt_convert(x.data, dtype, b.at, LT_F64, (size_t)count);
    block_free(&b);
    return x;
}

/* Runs the task with scratch full of `poison`, which ends at an inaccessible page. */
static inline void run_task(const lt_conv_impl *impl, const lt_conv_task *task, int threads,
                            int poison)
{
    enum { PAGE = 4096 };
    lt_call call = {.threads = threads};
    size_t bytes = impl->scratch(&call, task->conv, task->x.dtype, task->kind != LT_CONV);
    size_t own = (bytes + 63) / 64 * 64, capacity = (own + PAGE - 1) / PAGE * PAGE;
    char *all =
        mmap(NULL, capacity + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + capacity, PAGE, PROT_NONE) != 0)
        FAIL("out of memory");
    call.scratch = memset(all + capacity - own, poison, own);
    CHECK_OK(impl->run(&call, task));
    munmap(all, capacity + PAGE);
}

#endif
