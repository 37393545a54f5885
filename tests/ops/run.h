/* run.h - runs one case of cases.txt in one context and dtype, and keeps all results. */
#ifndef TESTS_OPS_RUN_H
#define TESTS_OPS_RUN_H

#include "tests/ops/cases.h"

/* The numbers of the blocks that go into a run and come out of it. */
enum { IN, DY = IN + LT_MAX_IN, GIVEN = DY + LT_MAX_OUT };
enum { OUT, GRAD = OUT + LT_MAX_OUT, AFTER = GRAD + LT_MAX_IN, FOUND = AFTER + LT_MAX_IN };

typedef struct values {
    block part[GIVEN];
    bool same_input; /* inputs 0 and 1 are one tensor */
    /* float inputs are results of ops, so a kernel may write their gradients over those of the
     * output */
    bool made;
} values;

typedef struct result {
    block part[FOUND]; /* at is NULL if there is no such part */
} result;

static int faults; /* found so far in the current op */

/* Counts a fault and prints it if it is one of the first 20. The test continues with its next
 * check. */
__attribute__((format(printf, 2, 3))) static void fault(const op_case *c, const char *fmt, ...)
{
    char text[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (++faults <= 20)
        printf("%s:%d: %s [%s]: %s\n", CASES_PATH, c->line, c->op, c->options, text);
}

static inline void free_values(values *v)
{
    for (int i = 0; i < GIVEN; i++)
        block_free(&v->part[i]);
}

static void free_result(result *r)
{
    for (int i = 0; i < FOUND; i++)
        block_free(&r->part[i]);
}

/* Writes the name of a part, such as "grad.x", to name. The fixture and messages use it. */
static inline const char *part_name(const op_case *c, int part, char name[32])
{
    if (part < GRAD)
        snprintf(name, 32, "out.%d", part - OUT);
    else if (part < AFTER)
        snprintf(name, 32, "grad.%s", c->in[part - GRAD].name);
    else
        snprintf(name, 32, "after.%s", c->in[part - AFTER].name);
    return name;
}

static inline bool exists(const op_case *c, int part) /* false if the case has fewer inputs */
{
    return part < GRAD || (part - GRAD) % LT_MAX_IN < c->n_in;
}

/* ==== Upstream gradients ====================================================================== */

static inline bool has_gradients(const lt_op *op, const op_case *c, const values *v)
{
    bool any = false;
    for (int i = 0; i < c->n_in; i++)
        any |= v->part[IN + i].dtype == LT_F64;
    return any && (op->bwd || op->fast_bwd || op->same_grad) && !has_note(c, "forward");
}

/* Makes random upstream gradients for the float outputs. */
static inline void make_dy(const op_case *c, const result *own, values *v)
{
    for (int k = 0; k < LT_MAX_OUT; k++) {
        const block *out = &own->part[OUT + k];
        char name[16];
        snprintf(name, sizeof name, "dy %d", k);
        if (!out->at || !lt__is_float(out->dtype))
            continue;
        v->part[DY + k] = block_copy(out);
        v->part[DY + k].dtype = LT_F64;
        for (int64_t i = 0; i < out->count; i++)
            v->part[DY + k].at[i] = normal(seed_of(c, name), (uint64_t)i);
        block_round(&v->part[DY + k], out->dtype);
        v->part[DY + k].dtype = LT_F64;
    }
}

/* ==== One run of a case ======================================================================= */

/* Runs backward from every output that has an upstream gradient, with that gradient times
 * factor. */
static lt_status go_back(const values *v, lt_tensor **out, double factor)
{
    lt_status status = LT_OK;
    for (int k = 0; k < LT_MAX_OUT && status == LT_OK; k++) {
        if (!v->part[DY + k].at)
            continue;
        block scaled = block_copy(&v->part[DY + k]);
        for (int64_t i = 0; i < scaled.count; i++)
            scaled.at[i] *= factor;
        lt_tensor *dy = block_tensor(lt_tensor_ctx(out[k]), &scaled, lt_tensor_dtype(out[k]));
        status = lt_backward(out[k], dy);
        lt_release(dy);
        block_free(&scaled);
    }
    return status;
}

/* Runs forward, backward and the update of statistics. Stores the outputs in r, if r is not
 * NULL. */
static lt_status run_pass(lt_ctx *ctx, const op_case *c, const values *v, lt_tensor **leaf,
                          const lt_opt *opts, double factor, result *r)
{
    lt_tensor *in[LT_MAX_IN] = {NULL}, *out[LT_MAX_OUT] = {NULL};
    for (int i = 0; i < c->n_in; i++)
        in[i] = v->made && lt__is_float(lt_tensor_dtype(leaf[i])) ? made_of(leaf[i])
                                                                  : lt_retain(leaf[i]);
    lt_status status = lt_apply(ctx, lt_op_find(ctx, c->op), in, c->n_in, opts, out);
    for (int i = 0; i < c->n_in; i++)
        lt_release(in[i]);
    for (int k = 0; r && k < LT_MAX_OUT; k++)
        if (out[k])
            r->part[OUT + k] = block_of(out[k]);
    if (status == LT_OK)
        status = go_back(v, out, factor);
    if (status == LT_OK)
        status = lt_bn_stats_commit(ctx);
    for (int k = 0; k < LT_MAX_OUT; k++)
        lt_release(out[k]);
    return status;
}

/* Runs the case in dtype. With upstream gradients, it runs a second time with these doubled: the
 * first gradients are written and the second are added, so the results are three times the
 * gradients. It runs only once if the inputs are made. On failure, reports a fault and returns
 * false. The caller frees r in either case. */
static bool run_case(lt_ctx *ctx, const op_case *c, const values *v, lt_dtype dtype, result *r)
{
    const lt_def *def = lt_op_find(ctx, c->op);
    lt_opt opts[LT_MAX_OPT];
    lt_tensor *in[LT_MAX_IN] = {NULL};
    bool back = false;
    memset(r, 0, sizeof *r);
    for (int k = 0; k < LT_MAX_OUT; k++)
        back |= v->part[DY + k].at != NULL;
    lt_status status = lt_opts_parse(&def->schema, c->options, opts);
    for (int i = 0; i < c->n_in; i++) {
        const block *b = &v->part[IN + i];
        bool is_float = b->dtype == LT_F64;
        if (v->same_input && i == 1)
            in[i] = lt_retain(in[0]);
        else
            in[i] = block_tensor(ctx, b, is_float ? dtype : b->dtype);
        if (status == LT_OK && back && is_float)
            status = lt_set_requires_grad(in[i], true);
    }
    if (status == LT_OK)
        status = run_pass(ctx, c, v, in, opts, 1, r);
    for (int i = 0; i < c->n_in; i++)
        r->part[AFTER + i] = block_of(in[i]);
    if (status == LT_OK && back && !v->made)
        status = run_pass(ctx, c, v, in, opts, 2, NULL);
    for (int i = 0; i < c->n_in; i++) {
        if (lt_grad(in[i]))
            r->part[GRAD + i] = block_of(lt_grad(in[i]));
        lt_release(in[i]);
    }
    if (status != LT_OK)
        fault(c, "in %s: %s", lt_dtype_name(dtype), lt_errmsg());
    return status == LT_OK;
}

#endif
