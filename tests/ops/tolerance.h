/* tolerance.h - measures how far the results of a case are from the expected ones, relative to what
 * arithmetic in the dtype explains. */
#ifndef TESTS_OPS_TOLERANCE_H
#define TESTS_OPS_TOLERANCE_H

#include "tests/ops/run.h"

/* ==== Comparing =============================================================================== */

static inline double roundoff(lt_dtype t)
{
    return t == LT_F32 ? 0x1p-24 : t == LT_F16 ? 0x1p-11 : t == LT_BF16 ? 0x1p-8 : 0x1p-53;
}

/* Absolute errors below this are ignored: the smallest normal number, or in f16 half of the
 * smallest subnormal one. */
static inline double underflow(lt_dtype t)
{
    return t == LT_F64 ? 0x1p-1022 : t == LT_F16 ? 0x1p-25 : 0x1p-126;
}

static inline double root_mean_square(const block *b)
{
    double sum = 0;
    for (int64_t i = 0; i < b->count; i++)
        sum += isfinite(b->at[i]) ? b->at[i] * b->at[i] : 0;
    return b->count ? sqrt(sum / (double)b->count) : 0;
}

/* The allowed error of an element: an absolute error plus fractions of the element, of the block's
 * root mean square and of the element's wobble, see find_wobble(). */
typedef struct margin {
    double absolute, relative, typical, wobbles;
    const block *wobble; /* or NULL */
} margin;

/* f64: tens of roundoffs from another order of summation, times 100 if x is 100 + noise. f32: eight
 * roundoffs for a kernel's chain of operations, and 32 wobbles, because a sequential sum of n terms
 * has an error of about sqrt(n) / 4 wobbles, plus four deviations for the worst of thousands of
 * elements. Convolutions also have errors of some roundoffs of a typical element: Winograd's where
 * a tile has large elements, and oneDNN's sums of hundreds of terms where three tries gave too
 * small a wobble. Halves: computed in f32 and rounded once, or twice for a gradient that is added
 * to. If backward reads an output, this was rounded: 1 - y y, for example, has an error of a
 * roundoff of 1, however small it is. */
static inline margin margin_for(const lt_op *op, const values *v, lt_dtype dtype, int part,
                                const block *wobble)
{
    margin m = {.relative = 1e-12, .typical = 1e-12};
    int typical = strncmp(op->sig, "conv2d(", 7) == 0 ? 64 : 2;
    if (dtype != LT_F64)
        m = (margin){.relative = 8 * roundoff(LT_F32),
                     .typical = typical * roundoff(LT_F32),
                     .wobbles = 32,
                     .wobble = wobble};
    if (lt__is_half(dtype))
        m.relative += 2 * roundoff(dtype);
    if (op->save >= LT_SAVE_OUT(0) && part >= GRAD && part < AFTER)
        m.absolute = 8 * roundoff(dtype) * root_mean_square(&v->part[DY]);
    return m;
}

typedef struct deviation {
    double worst;   /* the largest error relative to the allowed one; infinite if NaNs differ */
    int64_t at;     /* the element that has it, or -1 */
    double allowed; /* the absolute error allowed there */
} deviation;

/* got and want have the same dims. got is right if its `worst` is at most 1. */
static inline deviation deviation_of(const block *got, const block *want, margin m)
{
    deviation d = {.at = -1};
    double floor = m.absolute + m.typical * root_mean_square(want) + underflow(got->dtype);
    block stored = block_copy(want); /* the expected value, rounded; may be inf */
    block_round(&stored, got->dtype);
    for (int64_t i = 0; i < want->count; i++) {
        double x = got->at[i], y = want->at[i];
        double wobble = m.wobble ? m.wobbles * m.wobble->at[i] : 0;
        double allowed = m.relative * fabs(y) + floor + wobble;
        double error = fabs(x - y) / allowed;
        if (x == stored.at[i] || (isnan(x) && isnan(y)) || error <= d.worst)
            continue;
        d = (deviation){isnan(error) ? INFINITY : error, i, allowed};
    }
    block_free(&stored);
    return d;
}

/* Divides the gradients of a run, which are three times those of one backward, by 3. */
static inline void third_of_grads(result *r)
{
    for (int part = GRAD; part < AFTER; part++)
        for (int64_t i = 0; r->part[part].at && i < r->part[part].count; i++)
            r->part[part].at[i] /= 3;
}

/* ==== Conditioning =========================================================================== */

/* Returns v with all floats rounded to dtype. New. */
static inline values rounded(const values *v, lt_dtype dtype)
{
    values r = {.same_input = false};
    for (int i = 0; i < GIVEN; i++) {
        if (!v->part[i].at)
            continue;
        r.part[i] = block_copy(&v->part[i]);
        if (v->part[i].dtype == LT_F64)
            block_round(&r.part[i], dtype);
        r.part[i].dtype = v->part[i].dtype;
    }
    return r;
}

/* Returns v with each float of part `only`, or of all parts if it is -1, moved up or down by one
 * f32 roundoff. New. */
static inline values shaken(const values *v, int try, int only)
{
    values moved = {.same_input = false};
    for (int i = 0; i < GIVEN; i++) {
        uint64_t seed = (uint64_t)(try * GIVEN + i);
        block *b = &moved.part[i];
        if (v->part[i].at)
            *b = block_copy(&v->part[i]);
        bool moves = b->at && b->dtype == LT_F64 && (only == -1 || only == i);
        for (int64_t k = 0; moves && k < b->count; k++)
            b->at[k] *= 1 + copysign(0x1p-24, uniform(seed, (uint64_t)k) - 0.5);
    }
    return moved;
}

/* The wobble of each element of truth: how far it moves, at most in three tries, if part `only` of
 * the inputs and upstream gradients, or all for -1, change by one f32 roundoff. It measures how
 * much the case amplifies errors that no f32 kernel can avoid. */
static inline bool find_wobble(lt_ctx *ctx, const op_case *c, const values *v, const result *truth,
                               int only, result *wobble)
{
    bool ok = true;
    memset(wobble, 0, sizeof *wobble);
    for (int try = 0; try < 3 && ok; try++) {
        values moved = shaken(v, try, only);
        result there;
        ok = run_case(ctx, c, &moved, LT_F64, &there);
        third_of_grads(&there);
        for (int part = 0; part < FOUND && ok; part++) {
            const block *t = &truth->part[part];
            block *w = &wobble->part[part];
            for (int64_t k = 0; t->at && k < t->count; k++) {
                if (!w->at)
                    *w = block_new(LT_F64, t->ndim, t->dims);
                double way = fabs(there.part[part].at[k] - t->at[k]);
                w->at[k] = fmax(try == 0 ? 0 : w->at[k], way); /* a NaN counts as 0 */
            }
        }
        free_result(&there);
        free_values(&moved);
    }
    return ok;
}

#endif
