/* sum.c - sums over ranks; see sum.h. They are computed in blocks that fit in the cache, so each
 * element is read once from every rank and written once to every rank. Sums of two ranks in f32,
 * the most common case, need no block.
 */
#include <string.h>

#include "core/simd.h"
#include "dist/sum.h"

/* BLOCK: elements. LEVELS: of a tree over LT_MAX_SUMMANDS ranks, and one to spare. */
enum { BLOCK = 512, LEVELS = 10 };

/* The elements of a block, in the type in which they are added. */
typedef union block {
    float f32[BLOCK];
    double f64[BLOCK];
    int64_t i64[BLOCK];
} block;

typedef struct work {
    const lt_summand *share;
    lt_dtype dtype, wire;
    int64_t at; /* first element of the block */
    int n;      /* number of its elements */
} work;

bool lt__sum_supports(lt_dtype dtype) { return dtype <= LT_BF16 || dtype == LT_I64; }

LT_SIMD static void scale_f32(float *x, int n, float scale)
{
    for (int i = 0; i < n; i++)
        x[i] *= scale;
}

LT_SIMD static void add_f32(float *restrict to, const float *restrict x, int n)
{
    for (int i = 0; i < n; i++)
        to[i] += x[i];
}

LT_SIMD static void add_two_f32(float *restrict to, const float *x, float x_scale, const float *y,
                                float y_scale, int n)
{
    for (int i = 0; i < n; i++)
        to[i] = x[i] * x_scale + y[i] * y_scale;
}

/* As add_two_f32(), in place: both arrays get the sum. */
LT_SIMD static void sum_two_f32(float *restrict x, float x_scale, float *restrict y, float y_scale,
                                int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = x[i] * x_scale + y[i] * y_scale;
        x[i] = sum;
        y[i] = sum;
    }
}

static void add(const work *j, block *to, const block *x)
{
    if (j->dtype == LT_F64)
        for (int i = 0; i < j->n; i++)
            to->f64[i] += x->f64[i];
    else if (j->dtype == LT_I64) /* unsigned: an overflow wraps around */
        for (int i = 0; i < j->n; i++)
            to->i64[i] = (int64_t)((uint64_t)to->i64[i] + (uint64_t)x->i64[i]);
    else
        add_f32(to->f32, x->f32, j->n);
}

/* Rounds f32 values to the wire dtype. */
static void round_to_wire(const work *j, block *x)
{
    uint16_t half[BLOCK];
    if (j->dtype != LT_F32 || j->wire == LT_F32)
        return;
    lt_convert(half, j->wire, x->f32, LT_F32, (size_t)j->n);
    lt_convert(x->f32, LT_F32, half, j->wire, (size_t)j->n);
}

static void *place(const work *j, int rank)
{
    return (char *)j->share[rank].data + (size_t)j->at * lt_dtype_bytes(j->dtype);
}

/* Loads the block of a rank, scaled and rounded to the wire. */
static void take(const work *j, int rank, block *to)
{
    double scale = j->share[rank].scale;
    if (j->dtype == LT_F64 || j->dtype == LT_I64)
        memcpy(to, place(j, rank), (size_t)j->n * sizeof(double));
    else
        lt_convert(to->f32, LT_F32, place(j, rank), j->dtype, (size_t)j->n);
    if (j->dtype == LT_F64)
        for (int i = 0; i < j->n; i++)
            to->f64[i] *= scale;
    else if (j->dtype != LT_I64 && scale != 1)
        scale_f32(to->f32, j->n, (float)scale);
    round_to_wire(j, to);
}

/* to[0] = the sum over ranks [first, first + n). Overwrites the following blocks of `to`. */
static void add_up(const work *j, int first, int n, block *to)
{
    int left = 1;
    if (n == 1) {
        take(j, first, to);
        return;
    }
    if (n == 2 && j->dtype == LT_F32 && j->wire == LT_F32) {
        const lt_summand *s = &j->share[first];
        add_two_f32(to->f32, place(j, first), (float)s[0].scale, place(j, first + 1),
                    (float)s[1].scale, j->n);
        return;
    }
    while (2 * left < n)
        left *= 2;
    add_up(j, first, left, to);
    add_up(j, first + left, n - left, to + 1);
    add(j, to, to + 1);
}

/* Rounds the block to the wire and stores it in all n shares. */
static void give(const work *j, int n, block *x)
{
    round_to_wire(j, x);
    for (int rank = 0; rank < n; rank++)
        if (j->dtype == LT_F64 || j->dtype == LT_I64)
            memcpy(place(j, rank), x, (size_t)j->n * sizeof(double));
        else
            lt_convert(place(j, rank), j->dtype, x->f32, LT_F32, (size_t)j->n);
}

static work work_at(const lt_summand *share, lt_dtype dtype, lt_dtype wire, int64_t at, int64_t end)
{
    return (work){share, dtype, wire, at, end - at < BLOCK ? (int)(end - at) : BLOCK};
}

void lt__sum_arrays(const lt_summand *share, int n, lt_dtype dtype, lt_dtype wire, int64_t first,
                    int64_t count)
{
    block level[LEVELS];
    if (n == 2 && dtype == LT_F32 && wire == LT_F32) {
        sum_two_f32((float *)share[0].data + first, (float)share[0].scale,
                    (float *)share[1].data + first, (float)share[1].scale, count);
        return;
    }
    for (int64_t at = first; at < first + count; at += BLOCK) {
        work j = work_at(share, dtype, wire, at, first + count);
        add_up(&j, 0, n, level);
        give(&j, n, level);
    }
}

void lt__sum_add(void *to, lt_dtype dtype, const void *from, lt_dtype wire, int64_t count)
{
    block own, other;
    lt_summand share = {to, 1};
    for (int64_t at = 0; at < count; at += BLOCK) {
        work j = work_at(&share, dtype, wire, at, count);
        const char *come = (const char *)from + (size_t)at * lt_dtype_bytes(wire);
        take(&j, 0, &own);
        if (dtype == LT_F64 || dtype == LT_I64)
            memcpy(&other, come, (size_t)j.n * sizeof(double));
        else
            lt_convert(other.f32, LT_F32, come, wire, (size_t)j.n);
        add(&j, &own, &other);
        give(&j, 1, &own);
    }
}
