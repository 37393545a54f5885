/* test_cases.c - the cases of ops/cases.txt on the CUDA device that the CPU plays, of all ops that
 * the backend has kernels for: through lt_open() and lt_apply(), as programs go.
 *
 * What comes out is that of the reference kernels on the CPU, but for sums: they are in double on
 * both sides, in another order, so that each may be rounded another way. A gradient is added to
 * once, and so may be off by two roundings of its own and of the larger number before.
 */
#include <libgen.h>
#include <unistd.h>

#include "ops/kernel.h"
#include "ops/plugin.h"
#include "tests/ops/run.h"

/* The folder of this test has the plugin. */
static lt_ctx *open_cuda(void)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    setenv("LUATRAIN_PLUGINS", dirname(path), 1);
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

static lt_ctx *open_twin(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .poison = true, .reference = true});
    CHECK(ctx != NULL);
    return ctx;
}

static double roundoff(lt_dtype t)
{
    return t == LT_F32 ? 0x1p-24 : t == LT_F16 ? 0x1p-11 : t == LT_BF16 ? 0x1p-8 : 0x1p-53;
}

static bool near(const block *a, const block *b)
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
        allowed *= 4 * fabs(y) + largest * 0x1p-3;
        if (x != y && !(isnan(x) && isnan(y)) && !(fabs(x - y) <= allowed))
            return false;
    }
    return true;
}

/* Upstream gradients of the float outputs. */
static void make_dy(const op_case *c, const result *r, values *v)
{
    for (int k = 0; k < LT_MAX_OUT; k++) {
        const block *out = &r->part[OUT + k];
        if (!out->at || !lt__is_float(out->dtype))
            continue;
        v->part[DY + k] = block_copy(out);
        v->part[DY + k].dtype = LT_F64;
        for (int64_t i = 0; i < out->count; i++)
            v->part[DY + k].at[i] = normal(seed_of(c, "dy"), (uint64_t)i);
    }
}

static void compare(const op_case *c, const values *v, lt_ctx *ctx[2], lt_dtype dtype)
{
    result r[2];
    bool ok[2];
    for (int i = 0; i < 2; i++)
        ok[i] = run_case(ctx[i], c, v, dtype, &r[i]);
    for (int part = 0; part < FOUND && ok[0] && ok[1]; part++) {
        char name[32];
        if (exists(c, part) && !near(&r[0].part[part], &r[1].part[part]))
            fault(c, "in %s: %s differs", lt_dtype_name(dtype), part_name(c, part, name));
    }
    for (int i = 0; i < 2; i++)
        free_result(&r[i]);
}

static void walk_case(const op_case *c, lt_ctx *ctx[2], lt_dtype dtype)
{
    values v = {.twins = false};
    result plain;
    bool floats = false;
    for (int i = 0; i < c->n_in; i++) {
        v.part[IN + i] = make_input(c, i);
        if (v.part[IN + i].dtype != LT_F64)
            continue;
        block_round(&v.part[IN + i], dtype);
        v.part[IN + i].dtype = LT_F64;
        floats = true;
    }
    compare(c, &v, ctx, dtype);
    if (!has_note(c, "forward") && floats && run_case(ctx[1], c, &v, dtype, &plain)) {
        make_dy(c, &plain, &v);
        compare(c, &v, ctx, dtype);
        v.made = true;
        compare(c, &v, ctx, dtype);
        free_result(&plain);
    }
    free_values(&v);
}

/* Whether there is all of it that the CPU has. */
static bool has_kernels(lt_ctx *ctx, const char *name)
{
    const lt_def *def = lt_op_find(ctx, name);
    const lt_kernels *k = &ctx->slots.ops->accelerator->op[def->id];
    bool back = k->bwd || !(def->op->bwd || def->op->fast_bwd);
    return (k->fwd && back) || !(def->op->fwd || def->op->fast_fwd);
}

static void walk_op(const char *op)
{
    static const lt_dtype dtypes[] = {LT_F32, LT_F16, LT_BF16};
    lt_ctx *ctx[2] = {open_cuda(), open_twin()};
    int n, seen = 0;
    const op_case *cases = all_cases(&n);
    bool there = has_kernels(ctx[0], op);
    faults = 0;
    for (int i = 0; i < n && there; i++) {
        const op_case *c = &cases[i];
        if (strcmp(c->op, op) != 0)
            continue;
        for (int k = 0; k < (has_note(c, "f32+f64") ? 1 : 3); k++)
            walk_case(c, ctx, dtypes[k]);
        seen++;
    }
    lt_ctx_free(ctx[0]);
    lt_ctx_free(ctx[1]);
    if (!there)
        SKIP("the CUDA backend has no %s yet", op);
    CHECK_EQ(faults, 0);
    CHECK(seen > 0);
}

#define X(name) TEST(name) { walk_op(#name); }
LT_OP_LIST(X)
#undef X

/* As long as it has no kernels for what networks are made of: delete this when it has. */
TEST(auto_does_not_take_half_a_backend)
{
    lt_ctx *ctx = open_cuda();
    lt_ctx *other = lt_open(&(lt_config){.device = "auto", .threads = 1});
    bool can_train = ((const lt_accelerator *)ctx->slots.ops->accelerator)->op[LT_OP_conv2d].bwd;
    CHECK(strcmp(lt_device_name(other), can_train ? "cuda:0" : "cpu") == 0);
    lt_ctx_free(other);
    lt_ctx_free(ctx);
}
