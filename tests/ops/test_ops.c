/* test_ops.c - runs every op of ops/list.h on its cases in cases.txt, with one test per op, so that
 * an op without a case fails by name.
 *
 * In f64, a case must give the outputs and gradients of PyTorch. A finite difference along a random
 * direction checks the same gradients without PyTorch. In f32, f16 and bf16, the inputs are rounded
 * to the dtype first and our own f64 results for the rounded inputs are the truth, so that only
 * arithmetic errors remain. Every case runs with reference and fast kernels, on one thread and on
 * two, in memory filled with NaNs. Gradients are written, added to and, if the op allows it,
 * written over the upstream gradient. Inputs must not change, except those that the case says are
 * written.
 */
#include "tests/ops/tolerance.h"

enum { CONFIGS = 4 };
static const struct {
    const char *name;
    bool reference;
    int threads;
} config_of[CONFIGS] = {{"reference", true, 1},
                        {"reference, 2 threads", true, 2},
                        {"fast", false, 1},
                        {"fast, 2 threads", false, 2}};

static void compare(const op_case *c, const char *where, const char *what, const block *got,
                    const block *want, margin m)
{
    if (!got->at || !same_dims(got, want)) {
        fault(c, "%s: %s %s", where, what, got->at ? "has the wrong dims" : "is missing");
        return;
    }
    deviation d = deviation_of(got, want, m);
    if (d.worst > 1)
        fault(c, "%s: %s[%lld] is %.17g, not %.17g (allowed %.2g)", where, what, (long long)d.at,
              got->at[d.at], want->at[d.at], d.allowed);
}

/* The gradient of a constant must be missing or zero. */
static void check_no_grad(const op_case *c, const char *where, const char *what, const block *grad)
{
    for (int64_t i = 0; grad->at && i < grad->count; i++)
        if (grad->at[i] != 0) {
            fault(c, "%s: %s is %g, but PyTorch has no such gradient", where, what, grad->at[i]);
            return;
        }
}

/* ==== The oracle ============================================================================== */

/* Computes the 16 weighted sums that make.py stores for a part with more than 512 elements, and the
 * sums of the absolute values of their terms. */
static void sum_terms(const block *b, double sums[16], double sizes[16])
{
    uint64_t seed = hash_text(HASH_START, "sums");
    for (int k = 0; k < 16; k++)
        sums[k] = sizes[k] = 0;
    for (int64_t i = 0; i < b->count; i++) {
        double term = b->at[i] * (2 * uniform(seed, (uint64_t)i) - 1);
        sums[i % 16] += term;
        sizes[i % 16] += fabs(term);
    }
}

/* For a part of which the oracle has only sums: checks the sums of our own f64 result of the
 * reference kernels, and uses that as the expected result. */
static void trust_own(const op_case *c, const char *name, const block *own, const block *oracle,
                      block *want)
{
    double sums[16], sizes[16];
    if (!own->at) {
        fault(c, "%s is missing", name);
        return;
    }
    sum_terms(own, sums, sizes);
    for (int k = 0; k < 16; k++)
        if (!(fabs(sums[k] - oracle->at[k]) <= 1e-12 * sizes[k]))
            fault(c, "weighted sum %d of %s is %.17g, not %.17g", k, name, sums[k], oracle->at[k]);
    *want = block_copy(own);
}

/* Reads the expected result. own: the result of the reference kernels in f64. False if the fixture
 * does not have the case. */
static bool read_oracle(lt_file *file, const op_case *c, const result *own, result *want)
{
    bool known = false;
    memset(want, 0, sizeof *want);
    for (int part = 0; part < FOUND; part++) {
        char name[32], sums[40];
        if (!exists(c, part))
            continue;
        want->part[part] = fixture_block(file, c, part_name(c, part, name));
        snprintf(sums, sizeof sums, "%s.sums", name);
        block oracle = fixture_block(file, c, sums);
        if (oracle.at)
            trust_own(c, name, &own->part[part], &oracle, &want->part[part]);
        known |= want->part[part].at || oracle.at;
        block_free(&oracle);
    }
    if (!known)
        fault(c, "the case is new or changed; run tests/oracle/make.py");
    return known;
}

/* ==== f64 ===================================================================================== */

static void check_f64(lt_ctx *ctx, const char *where, const op_case *c, const values *v,
                      const result *want)
{
    const lt_op *op = lt_op_find(ctx, c->op)->op;
    char name[32];
    result got;
    bool ok = run_case(ctx, c, v, LT_F64, &got);
    third_of_grads(&got);
    for (int part = 0; part < FOUND && ok; part++) {
        const block *g = &got.part[part], *w = &want->part[part];
        if (!exists(c, part))
            continue;
        part_name(c, part, name);
        if (part < GRAD && g->at && w->at && g->dtype != w->dtype)
            fault(c, "%s: %s is %s, not %s", where, name, lt_dtype_name(g->dtype),
                  lt_dtype_name(w->dtype));
        if (w->at)
            compare(c, where, name, g, w, margin_for(op, v, LT_F64, part, NULL));
        else if (part >= AFTER)
            compare(c, where, name, g, &v->part[IN + part - AFTER], (margin){0});
        else if (part >= GRAD)
            check_no_grad(c, where, name, g);
        else if (g->at)
            fault(c, "%s: %s is an unexpected output", where, name);
    }
    free_result(&got);
}

/* The gradient of f(x, x) is the sum of both gradients of f(x, y) at y = x: both contributions go
 * to one tensor. */
static void check_same_inputs(lt_ctx *ctx, const op_case *c, const values *v)
{
    const block *x = &v->part[IN], *y = &v->part[IN + 1];
    if (!v->part[DY].at || !y->at || x->dtype != LT_F64 || y->dtype != LT_F64 || !same_dims(x, y))
        return;
    values both = {.same_input = false};
    result apart, together = {.part = {{0}}};
    for (int i = 0; i < GIVEN; i++)
        if (v->part[i].at)
            both.part[i] = block_copy(&v->part[i == IN + 1 ? IN : i]);
    if (run_case(ctx, c, &both, LT_F64, &apart)) {
        block *dx = &apart.part[GRAD], *dy = &apart.part[GRAD + 1];
        for (int64_t i = 0; dx->at && dy->at && i < dx->count; i++) {
            double sum = dx->at[i] + dy->at[i];
            dy->at[i] = fabs(dx->at[i]) + fabs(dy->at[i]); /* the terms may cancel */
            dx->at[i] = sum;
        }
        both.same_input = true;
        if (dx->at && dy->at && run_case(ctx, c, &both, LT_F64, &together))
            compare(c, "both inputs one tensor", "grad", &together.part[GRAD], dx,
                    (margin){.wobbles = 1e-12, .wobble = dy});
    }
    free_result(&apart);
    free_result(&together);
    free_values(&both);
}

/* ==== Finite differences ====================================================================== */

/* *loss = the sum of out * dy, with the inputs moved by h along the direction. */
static bool moved_loss(lt_ctx *ctx, const op_case *c, const values *v, const block *direction,
                       double h, double *loss)
{
    values moved = {.same_input = false};
    result r;
    for (int i = 0; i < c->n_in; i++) {
        moved.part[IN + i] = block_copy(&v->part[IN + i]);
        for (int64_t k = 0; direction[i].at && k < direction[i].count; k++)
            moved.part[IN + i].at[k] += h * direction[i].at[k];
    }
    bool ok = run_case(ctx, c, &moved, LT_F64, &r);
    *loss = 0;
    for (int k = 0; k < LT_MAX_OUT; k++)
        for (int64_t i = 0; ok && v->part[DY + k].at && i < r.part[OUT + k].count; i++)
            *loss += r.part[OUT + k].at[i] * v->part[DY + k].at[i];
    free_result(&r);
    free_values(&moved);
    return ok;
}

/* The slope of that sum along a random direction must agree with the gradient. With h = 1e-5, the
 * error of a central difference is h^2 times a third derivative plus roundoff / h times the terms
 * of the sum, both far below 1e-6. */
static void check_slope(lt_ctx *ctx, const op_case *c, const values *v, const result *want)
{
    const double h = 1e-5;
    block direction[LT_MAX_IN] = {{0}};
    double slope = 0, size = 0, high, low;
    for (int i = 0; i < c->n_in; i++) {
        const block *grad = &want->part[GRAD + i];
        if (!grad->at)
            continue;
        direction[i] = block_copy(grad);
        for (int64_t k = 0; k < grad->count; k++) {
            direction[i].at[k] = normal(seed_of(c, "direction") + (uint64_t)i, (uint64_t)k);
            slope += direction[i].at[k] * grad->at[k];
            size += fabs(direction[i].at[k] * grad->at[k]);
        }
    }
    if (moved_loss(ctx, c, v, direction, h, &high) && moved_loss(ctx, c, v, direction, -h, &low)) {
        double found = (high - low) / (2 * h);
        if (!(fabs(found - slope) <= 1e-6 * (size + fabs(high))))
            fault(c, "the finite difference is %.12g, but the gradient gives %.12g", found, slope);
    }
    for (int i = 0; i < c->n_in; i++)
        block_free(&direction[i]);
}

/* ==== f32 and the halves ====================================================================== */

/* Checks gradients that may be written over the upstream gradient. */
static void check_in_place(lt_ctx *ctx, const char *where, const op_case *c, const values *v,
                           lt_dtype dtype, const result *truth, const result *wobble)
{
    const lt_op *op = lt_op_find(ctx, c->op)->op;
    values made = *v;
    char name[32], here[80];
    result got;
    made.made = true;
    snprintf(here, sizeof here, "%s, in place", where);
    bool ok = run_case(ctx, c, &made, dtype, &got);
    for (int part = GRAD; part < AFTER && ok; part++)
        if (truth->part[part].at)
            compare(c, here, part_name(c, part, name), &got.part[part], &truth->part[part],
                    margin_for(op, v, got.part[part].dtype, part, &wobble->part[part]));
    free_result(&got);
}

/* Compares a run in one config and dtype with the truth. Runs it again, which must give the same
 * bits and must not use more memory. */
static void check_low(lt_ctx *ctx, const char *config, const op_case *c, const values *v,
                      lt_dtype dtype, const result *truth, const result *wobble)
{
    const lt_op *op = lt_op_find(ctx, c->op)->op;
    char where[48], name[32];
    result got, again;
    snprintf(where, sizeof where, "%s, %s", lt_dtype_name(dtype), config);
    bool ok = run_case(ctx, c, v, dtype, &got);
    size_t live = lt_memory_stats(ctx).live;
    ok = run_case(ctx, c, v, dtype, &again) && ok;
    if (lt_memory_stats(ctx).live != live)
        fault(c, "%s: leaked %lld bytes", where,
              (long long)lt_memory_stats(ctx).live - (long long)live);
    for (int part = 0; part < FOUND && ok; part++)
        if (truth->part[part].at)
            compare(c, "a second time", part_name(c, part, name), &again.part[part],
                    &got.part[part], (margin){0});
    third_of_grads(&got);
    for (int part = 0; part < FOUND && ok; part++) {
        const block *t = &truth->part[part], *g = &got.part[part];
        bool chosen = strstr(c->options, "dtype=") != NULL; /* by the case */
        if (t->at && t->dtype == LT_F64 && g->dtype != dtype && !chosen)
            fault(c, "%s: %s is %s", where, part_name(c, part, name), lt_dtype_name(g->dtype));
        if (t->at)
            compare(c, where, part_name(c, part, name), g, t,
                    margin_for(op, v, g->dtype == LT_F64 ? LT_F32 : g->dtype, part,
                               &wobble->part[part]));
    }
    if (op->grad_in_place && v->part[DY].at)
        check_in_place(ctx, where, c, v, dtype, truth, wobble);
    free_result(&got);
    free_result(&again);
}

static void check_dtype(lt_ctx **ctx, const op_case *c, const values *v, lt_dtype dtype)
{
    values given = rounded(v, dtype);
    result truth, wobble;
    if (run_case(ctx[0], c, &given, LT_F64, &truth)) {
        third_of_grads(&truth);
        if (find_wobble(ctx[0], c, &given, &truth, -1, &wobble))
            for (int k = test_stride(2) - 1; k < CONFIGS; k += test_stride(2))
                check_low(ctx[k], config_of[k].name, c, &given, dtype, &truth, &wobble);
        free_result(&wobble);
    }
    free_result(&truth);
    free_values(&given);
}

/* ==== The cases =============================================================================== */

/* Most kernels get halves as f32 copies. Only those that compute in the half dtypes directly are
 * tested on large cases in them. */
static void check_all(lt_ctx **ctx, const op_case *c, const values *v, const result *want)
{
    const lt_op *op = lt_op_find(ctx[0], c->op)->op;
    bool large = is_large(c);
    for (int k = test_stride(2) - 1; k < CONFIGS; k += test_stride(2))
        check_f64(ctx[k], config_of[k].name, c, v, want);
    if (!large && v->part[DY].at && !has_note(c, "kinked"))
        check_slope(ctx[0], c, v, want);
    if (!large)
        check_same_inputs(ctx[0], c, v);
    check_dtype(ctx, c, v, LT_F32);
    if (has_note(c, "f32+f64"))
        return;
    if (!large || op->any_dtype)
        check_dtype(ctx, c, v, LT_F16);
    if (!large || op->any_dtype || op->fast_bf16)
        check_dtype(ctx, c, v, LT_BF16);
}

static void check_case(lt_ctx **ctx, lt_file *file, const op_case *c)
{
    values v = {.same_input = false};
    result own, want = {.part = {{0}}};
    for (int i = 0; i < c->n_in; i++)
        v.part[IN + i] = make_input(c, i);
    bool ok = run_case(ctx[0], c, &v, LT_F64, &own);
    if (ok && has_gradients(lt_op_find(ctx[0], c->op)->op, c, &v)) {
        make_dy(c, &own, &v);
        free_result(&own);
        ok = run_case(ctx[0], c, &v, LT_F64, &own);
        third_of_grads(&own);
    }
    if (ok && read_oracle(file, c, &own, &want))
        check_all(ctx, c, &v, &want);
    free_result(&own);
    free_result(&want);
    free_values(&v);
}

static void walk(const char *op)
{
    lt_ctx *ctx[CONFIGS];
    int n, seen = 0;
    const op_case *cases = all_cases(&n);
    faults = 0;
    for (int k = 0; k < CONFIGS; k++)
        ctx[k] = ctx_with((lt_config){
            .reference = config_of[k].reference, .threads = config_of[k].threads, .poison = true});
    lt_file *file = lt_file_open(ctx[0], FIXTURE_PATH);
    if (!file)
        FAIL("%s", lt_errmsg());
    const char *doc = lt_op_find(ctx[0], op)->op->doc;
    for (int i = 0; i < n; i++) {
        if (strcmp(cases[i].op, op) != 0)
            continue;
        check_case(ctx, file, &cases[i]);
        seen++;
    }
    lt_file_close(file);
    for (int k = 0; k < CONFIGS; k++)
        lt_ctx_free(ctx[k]);
    if (seen == 0)
        FAIL("%s has no case; add a line to %s and run tests/oracle/make.py", op, CASES_PATH);
    if (!doc || !*doc || doc[strlen(doc) - 1] != '.')
        FAIL("the doc of %s is missing or does not end in a period", op);
    if (faults > 0)
        FAIL("%d faults in %d cases of %s", faults, seen, op);
}

#define X(name)                                                                                    \
    TEST(name) { walk(#name); }
#include "ops/list.h"
LT_OP_LIST(X)
#undef X

TEST(every_case_names_an_op)
{
    static const char *const names[] = {
#define X(name) #name,
        LT_OP_LIST(X)
#undef X
    };
    int n;
    const op_case *cases = all_cases(&n);
    for (int i = 0; i < n; i++) {
        bool known = false;
        for (size_t k = 0; k < sizeof names / sizeof *names; k++)
            known |= strcmp(cases[i].op, names[k]) == 0;
        if (!known)
            FAIL("%s:%d: unknown op '%s'", CASES_PATH, cases[i].line, cases[i].op);
    }
    CHECK(n > 0);
}
