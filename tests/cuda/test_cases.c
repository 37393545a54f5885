/* test_cases.c - runs the cases of ops/cases.txt on the emulated CUDA device, through lt_open() and
 * lt_apply() as programs do. Each op runs with the stand-ins for NVIDIA's libraries; the ops that
 * use those run with our own kernels as well.
 *
 * The results must be those of the reference kernels on the CPU, except for the rounding of sums:
 * both sides sum in double, but in different orders. A gradient is added to once, so it has up to
 * two roundings, of its own size and of that of the larger value before. The ops listed in
 * near_for() compute in f32 what the reference computes in double. If the terms of a sum cancel,
 * their size is unknown, so the tolerance is relative to the largest element.
 */
#include "ops/kernel.h"
#include "ops/backend/plugin.h"
#include "ops/backend/state.h"
#include "tests/cuda/libs.h"
#include "tests/device/reference.h"

static double roundoff(lt_dtype t)
{
    return t == LT_F32 ? 0x1p-24 : t == LT_F16 ? 0x1p-11 : t == LT_BF16 ? 0x1p-8 : 0x1p-53;
}

/* slack: tolerance as a fraction of the largest element. */
static bool is_near(const block *a, const block *b, double slack)
{
    double largest = 0;
    if (!a->at || !b->at)
        return !a->at && !b->at;
    if (a->dtype != b->dtype || !same_dims(a, b))
        return false;
    for (int64_t i = 0; i < b->count; i++)
        if (isfinite(b->at[i]) && fabs(b->at[i]) > largest)
            largest = fabs(b->at[i]);
    for (int64_t i = 0; i < a->count; i++) {
        double x = a->at[i], y = b->at[i];
        double allowed = lt__is_float(a->dtype) ? roundoff(a->dtype) : 0;
        allowed = allowed * (4 * fabs(y) + largest * 0x1p-3) + slack * largest;
        if (x != y && !(isnan(x) && isnan(y)) && !(fabs(x - y) <= allowed))
            return false;
    }
    return true;
}

static bool near(const block *a, const block *b) { return is_near(a, b, 0); }

/* For products and windows, which are sums in f32 of up to 864 terms here, with one rounding per
 * term on either side. */
static bool near_in_f32(const block *a, const block *b) { return is_near(a, b, 0x1p-19); }

/* For ops that sum in double and continue in f32. */
static bool near_with_f32(const block *a, const block *b)
{
    return is_near(a, b, a->dtype == LT_F32 ? 0x1p-22 : 0);
}

static same_fn near_for(const char *op)
{
    static const struct {
        const char *op;
        same_fn is_near;
    } others[] = {{"matmul", near_in_f32},     {"linear", near_in_f32},
                  {"conv2d", near_in_f32},     {"max_pool2d", near_in_f32},
                  {"avg_pool2d", near_in_f32}, {"batch_norm", near_with_f32},
                  {"softmax", near_with_f32},  {"log_softmax", near_with_f32}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(op, others[i].op) == 0)
            return others[i].is_near;
    return near;
}

/* Whether the backend has all kernels of the op that the CPU has. */
static bool has_kernels(lt_ctx *ctx, const char *name)
{
    const lt_def *def = lt_op_find(ctx, name);
    const lt_kernels *k = &ctx->slots.ops->accelerator->op[def->id];
    bool back = k->bwd || !(def->op->bwd || def->op->fast_bwd);
    return (k->fwd && back) || !(def->op->fwd || def->op->fast_fwd);
}

static void walk_op(const char *op, bool libraries)
{
    lt_ctx *ctx[2] = {open_shim(libraries), open_reference()};
    if (has_kernels(ctx[0], op)) {
        walk_cases(op, ctx, near_for(op));
        return;
    }
    FAIL("the CUDA backend has no kernels for %s", op);
}

#define X(name)                                                                                    \
    TEST(name) { walk_op(#name, true); }
LT_OP_LIST(X)
#undef X

#define X(name)                                                                                    \
    TEST(own_##name) { walk_op(#name, false); }
X(matmul) X(linear) X(conv2d)
#undef X
