/* batch_norm_pass.c - the inner loops of batch norm in f32 and bf16.
 *
 * The loops run over wide rows (see batch_norm_simd.c), with coefficients and sums for each lane.
 * Sums of rows of LANES lanes stay in registers, and memory is read in order. Other rows are
 * processed four at a time, so that each lane's sums are loaded and stored once per four rows.
 * Hardware prefetchers cannot follow this access pattern, so the code prefetches far ahead, in
 * address order.
 *
 * Halves are processed in pairs if the number of channels is even: one instruction extracts either
 * of the two from their word, and they are stored without a shuffle. A row then has two sides, the
 * lanes of the even channels followed by those of the odd ones.
 *
 * A large f32 result is written with streaming stores. Otherwise it would evict x, whose end is
 * still in the cache after the sums. In bf16 the arithmetic takes longer than the memory accesses,
 * so streaming stores would gain nothing.
 */
#include "ops/batch_norm.h"
#include "ops/cpu/simd.h"

enum { BAND = 4, STRIP = 64 }; /* wide rows that are summed together; units per strip of them */
enum { AHEAD = 3072 };         /* units between the next read and the prefetch */
enum { VECTORS = LANES / LT_LANES };
enum { PIECE = 2048 }; /* bytes per streaming write */

#define UNROLL(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)
#define SIDES(side, form) for (int side = 0; side < ((form) == PAIRS ? 2 : 1); side++)

LT_INLINE float float_of(uint32_t u)
{
    union {
        uint32_t u;
        float f;
    } v = {u};
    return v.f;
}

/* Rounds to nearest, ties to even; the bf16 is in the upper half. A NaN from bf16, coefficients or
 * arithmetic has 16 trailing zeros and stays a NaN. */
LT_INLINE uint32_t rounded(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    return v.u + 0x7fff + (v.u >> 16 & 1);
}

/* Returns one side of unit i. */
LT_INLINE float get(const void *from, int64_t i, int form, int side)
{
    uint32_t pair;
    if (form == FLOATS)
        return ((const float *)from)[i];
    if (form == HALVES)
        return lt__bf16_to_f32(((const uint16_t *)from)[i]);
    memcpy(&pair, (const char *)from + 4 * i, sizeof pair);
    return float_of(side == 0 ? pair << 16 : pair & 0xffff0000);
}

/* Stores v as unit i, or adds it. */
LT_INLINE void put(void *to, int64_t i, int form, bool add, float v[2])
{
    SIDES(side, form)
    if (add)
        v[side] += get(to, i, form, side);
    if (form == FLOATS)
        ((float *)to)[i] = v[0];
    if (form == HALVES)
        ((uint16_t *)to)[i] = (uint16_t)(rounded(v[0]) >> 16);
    if (form == PAIRS) {
        uint32_t pair = rounded(v[0]) >> 16 | (rounded(v[1]) & 0xffff0000);
        memcpy((char *)to + 4 * i, &pair, sizeof pair);
    }
}

/* Loads 16 units as a vector. */
LT_INLINE lt_vec get_vec(const void *from, int64_t i, int form, int side)
{
    lt_vec_u32 v;
    memcpy(&v, (const char *)from + 4 * i, sizeof v);
    if (form == PAIRS)
        v = side == 0 ? v << 16 : v & 0xffff0000;
    return (lt_vec)v;
}

LT_INLINE lt_vec passed_vec(lt_bounds act, lt_vec y, lt_vec dy)
{
    LT_EACH_LANE(k)
        dy[k] = lt__act_grad(act, y[k], dy[k]);
    return dy;
}

/* Prefetches n units of an array, starting at unit i. */
LT_INLINE void prefetch(const void *array, int64_t i, int64_t n, int form)
{
    int64_t bytes = form == HALVES ? 2 : 4;
    uintptr_t at = (uintptr_t)array + (uintptr_t)(i * bytes);
    for (int64_t b = 0; b < n * bytes; b += 64)
        __builtin_prefetch((const void *)(at + (uintptr_t)b), 0, 2);
}

/* Whether all rows are whole and have LANES lanes, so that a few registers hold one. */
LT_INLINE bool has_lanes(const lt_pass *p, int form)
{
    return form != HALVES && p->units == (form == PAIRS ? LANES / 2 : LANES) &&
           p->n % p->units == 0;
}

/* Writes act((x - mean) factor + shift + residual) to `to`, for n units starting at unit i. The
 * first unit has the coefficients of unit k of a row. */
LT_INLINE void forward_units(const lt_pass *p, int form, bool residual, int64_t i, int64_t k,
                             int64_t n, void *to)
{
    const float *restrict mean = p->coefs + AT_MEAN * p->pitch + k;
    const float *restrict factor = p->coefs + AT_FACTOR * p->pitch + k;
    const float *restrict shift = p->coefs + AT_SHIFT * p->pitch + k;
    const void *x = p->x, *more = p->residual;
    lt_bounds act = p->act;
    int64_t units = p->units;
    LT_IVDEP
    for (int64_t j = 0; j < n; j++) {
        float v[2];
        SIDES(side, form)
        {
            int64_t lane = j + side * units;
            v[side] =
                LT_NORMALISED(get(x, i + j, form, side), mean[lane], factor[lane], shift[lane]);
            if (residual)
                v[side] += get(more, i + j, form, side);
            v[side] = lt__act(act, v[side]);
        }
        put(to, j, form, false, v);
    }
}

LT_INLINE lt_vec clamp_vec(lt_bounds act, lt_vec v)
{
    LT_EACH_LANE(k)
        v[k] = lt__act(act, v[k]);
    return v;
}

/* The same for whole rows of LANES lanes, with the coefficients in registers. */
LT_INLINE void forward_lanes(const lt_pass *p, int form, bool residual, int64_t i, int64_t n,
                             void *to)
{
    int sides = form == PAIRS ? 2 : 1, of_side = VECTORS / sides;
    lt_vec mean[VECTORS], factor[VECTORS], shift[VECTORS];
    UNROLL(v, VECTORS) {
        mean[v] = lt__load_f32(p->coefs + AT_MEAN * p->pitch + v * LT_LANES);
        factor[v] = lt__load_f32(p->coefs + AT_FACTOR * p->pitch + v * LT_LANES);
        shift[v] = lt__load_f32(p->coefs + AT_SHIFT * p->pitch + v * LT_LANES);
    }
    for (int64_t j = 0; j < n; j += of_side * LT_LANES) {
        UNROLL(u, of_side) {
            int64_t at = j + u * LT_LANES;
            lt_vec v[2];
            UNROLL(side, sides) {
                int lane = side * of_side + u;
                v[side] = LT_NORMALISED(get_vec(p->x, i + at, form, side), mean[lane], factor[lane],
                                        shift[lane]);
                if (residual)
                    v[side] += get_vec(p->residual, i + at, form, side);
                v[side] = clamp_vec(p->act, v[side]);
            }
            if (form == PAIRS)
                lt__store_pairs((uint16_t *)to + 2 * at, v);
            else
                lt__store_f32((float *)to + at, v[0]);
        }
    }
}

LT_INLINE void forward_rows(const lt_pass *p, int form, bool residual)
{
    int64_t units = p->units, bytes = form == HALVES ? 2 : 4;
    if (has_lanes(p, form))
        forward_lanes(p, form, residual, 0, p->n, p->out);
    else
        for (int64_t i = 0; i < p->n; i += units)
            forward_units(p, form, residual, i, 0, lt__min(units, p->n - i),
                          (char *)p->out + i * bytes);
}

/* The same with streaming stores, in pieces that need not be whole rows. */
LT_INLINE void stream_rows(const lt_pass *p, int form, bool residual)
{
    _Alignas(64) char piece[PIECE];
    int64_t units = p->units, bytes = form == HALVES ? 2 : 4, size = PIECE / bytes, k = 0;
    bool lanes = has_lanes(p, form);
    for (int64_t i = 0; i < p->n; i += size) {
        int64_t end = lt__min(size, p->n - i), m;
        prefetch(p->x, i + AHEAD, end, form);
        if (residual)
            prefetch(p->residual, i + AHEAD, end, form);
        if (lanes)
            forward_lanes(p, form, residual, i, end, piece);
        for (int64_t j = 0; j < end && !lanes; j += m) {
            m = lt__min(end - j, units - k);
            forward_units(p, form, residual, i + j, k, m, piece + j * bytes);
            k = k + m < units ? k + m : 0;
        }
        lt__copy_nontemporal((char *)p->out + i * bytes, piece, (size_t)(end * bytes));
    }
}

/* The gradient of the residual: g, which is dy where the activation passes the gradient, else 0. */
LT_INLINE void residual_rows(const lt_pass *p, int form, bool add)
{
    const void *y = p->y, *dy = p->dy;
    void *out = p->out;
    lt_bounds act = p->act;
    int64_t n = p->n;
    LT_IVDEP
    for (int64_t i = 0; i < n; i++) {
        float v[2];
        SIDES(side, form)
        v[side] = lt__act_grad(act, get(y, i, form, side), get(dy, i, form, side));
        put(out, i, form, add, v);
    }
}

/* Adds g and g (x - center) to the sums, over units [first, end) of `rows` rows. The first of these
 * rows begins at unit i. */
LT_INLINE void sum_strip(const lt_pass *p, int form, int mode, int rows, int64_t i, int64_t first,
                         int64_t end)
{
    const float *restrict center = p->center;
    const float *restrict factor = p->coefs + AT_FACTOR * p->pitch;
    const float *restrict shift = p->coefs + AT_SHIFT * p->pitch;
    float *restrict sum = p->lanes + AT_SUM * p->pitch;
    float *restrict product = p->lanes + AT_PRODUCT * p->pitch;
    const void *x = p->x, *y = p->y, *dy = p->dy;
    lt_bounds act = p->act;
    int64_t units = p->units;
    LT_IVDEP
    for (int64_t k = first; k < end; k++)
        SIDES(side, form)
        {
            int64_t lane = k + side * units;
            float s = sum[lane], q = product[lane];
            for (int r = 0; r < rows; r++) {
                int64_t at = i + r * units + k;
                float d = get(x, at, form, side) - center[lane];
                float g = mode == MOMENTS ? d : get(dy, at, form, side);
                if (mode == ACT_OF_Y)
                    g = lt__act_grad(act, get(y, at, form, side), g);
                if (mode == ACT_OF_X)
                    g = lt__act_grad(act, d * factor[lane] + shift[lane], g);
                s += g;
                q += g * d;
            }
            sum[lane] = s;
            product[lane] = q;
        }
}

/* Sums rows of any width. */
LT_INLINE void sum_rows(const lt_pass *p, int form, int mode)
{
    int64_t i = 0, units = p->units;
    for (; i + BAND * units <= p->n; i += BAND * units)
        for (int64_t k = 0; k < units; k += STRIP) {
            int64_t next = i + BAND * (units + k) + AHEAD;
            prefetch(p->x, next, BAND * STRIP, form);
            if (mode != MOMENTS)
                prefetch(p->dy, next, BAND * STRIP, form);
            if (mode == ACT_OF_Y)
                prefetch(p->y, next, BAND * STRIP, form);
            sum_strip(p, form, mode, BAND, i, k, lt__min(k + STRIP, units));
        }
    for (; i < p->n; i += units)
        sum_strip(p, form, mode, 1, i, 0, lt__min(units, p->n - i));
}

/* The same for rows of LANES lanes. The sums stay in registers and memory is read in order, which
 * suits the prefetchers. */
LT_INLINE void sum_lanes(const lt_pass *p, int form, int mode)
{
    const float *factor = p->coefs + AT_FACTOR * p->pitch, *shift = p->coefs + AT_SHIFT * p->pitch;
    float *sum = p->lanes + AT_SUM * p->pitch, *product = p->lanes + AT_PRODUCT * p->pitch;
    lt_bounds act = p->act;
    lt_vec s[VECTORS], q[VECTORS], center[VECTORS];
    UNROLL(v, VECTORS) {
        s[v] = lt__load_f32(sum + v * LT_LANES);
        q[v] = lt__load_f32(product + v * LT_LANES);
        center[v] = lt__load_f32(p->center + v * LT_LANES);
    }
    int of_side = form == PAIRS ? VECTORS / 2 : VECTORS;
    for (int64_t i = 0; i < p->n; i += of_side * LT_LANES) {
        UNROLL(v, VECTORS) {
            int side = v / of_side, lane = v * LT_LANES;
            int64_t at = i + v % of_side * LT_LANES;
            lt_vec d = get_vec(p->x, at, form, side) - center[v];
            lt_vec g = mode == MOMENTS ? d : get_vec(p->dy, at, form, side);
            if (mode == ACT_OF_Y)
                g = passed_vec(act, get_vec(p->y, at, form, side), g);
            if (mode == ACT_OF_X)
                g = passed_vec(act, d * lt__load_f32(factor + lane) + lt__load_f32(shift + lane),
                               g);
            s[v] += g;
            q[v] += g * d;
        }
    }
    UNROLL(v, VECTORS) {
        lt__store_f32(sum + v * LT_LANES, s[v]);
        lt__store_f32(product + v * LT_LANES, q[v]);
    }
}

/* dx (+)= factor g + slope (x - mean) + offset */
LT_INLINE void backward_rows(const lt_pass *p, int form, int mode, bool add)
{
    const float *restrict mean = p->coefs + AT_MEAN * p->pitch;
    const float *restrict factor = p->coefs + AT_FACTOR * p->pitch;
    const float *restrict shift = p->coefs + AT_SHIFT * p->pitch;
    const float *restrict slope = p->coefs + AT_SLOPE * p->pitch;
    const float *restrict offset = p->coefs + AT_OFFSET * p->pitch;
    const void *x = p->x, *y = p->y, *dy = p->dy;
    void *out = p->out;
    lt_bounds act = p->act;
    int64_t units = p->units;
    for (int64_t i = 0; i < p->n; i += units) {
        int64_t m = lt__min(units, p->n - i);
        LT_IVDEP
        for (int64_t k = 0; k < m; k++) {
            float v[2];
            SIDES(side, form)
            {
                int64_t lane = k + side * units;
                float d = get(x, i + k, form, side) - mean[lane], g = get(dy, i + k, form, side);
                if (mode == ACT_OF_Y)
                    g = lt__act_grad(act, get(y, i + k, form, side), g);
                if (mode == ACT_OF_X)
                    g = lt__act_grad(act, d * factor[lane] + shift[lane], g);
                v[side] = LT_NORMALISED_BACK(g, d, factor[lane], slope[lane], offset[lane]);
            }
            put(out, i + k, form, add, v);
        }
    }
}

/* Runs the body with name as a compile-time constant, so that its loops are compiled separately for
 * true and false. */
#define FIXED(name, flag, ...)                                                                     \
    do {                                                                                           \
        if (flag) {                                                                                \
            const bool name = true;                                                                \
            __VA_ARGS__                                                                            \
        } else {                                                                                   \
            const bool name = false;                                                               \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    } while (0)

/* The same for a value that is one of three. */
#define FIXED_OF(name, value, a, b, c, ...)                                                        \
    do {                                                                                           \
        switch (value) {                                                                           \
        case a: {                                                                                  \
            const int name = a;                                                                    \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        case b: {                                                                                  \
            const int name = b;                                                                    \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        case c: {                                                                                  \
            const int name = c;                                                                    \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        }                                                                                          \
    } while (0)
#define FIXED_FORM(...) FIXED_OF(form, p->form, FLOATS, HALVES, PAIRS, __VA_ARGS__)
#define FIXED_MODE(...) FIXED_OF(mode, p->mode, PLAIN, ACT_OF_Y, ACT_OF_X, __VA_ARGS__)

LT_SIMD static void forward_pass(const lt_pass *p)
{
    if (p->nontemporal)
        FIXED_FORM(FIXED(residual, p->residual, stream_rows(p, form, residual);););
    else
        FIXED_FORM(FIXED(residual, p->residual, forward_rows(p, form, residual);););
}

LT_SIMD static void residual_pass(const lt_pass *p)
{
    FIXED_FORM(FIXED(add, p->add, residual_rows(p, form, add);););
}

/* Sums with the fastest loop. */
LT_INLINE void sum_by(const lt_pass *p, int form, int mode)
{
    if (has_lanes(p, form))
        sum_lanes(p, form, mode);
    else
        sum_rows(p, form, mode);
}

LT_SIMD static void moment_pass(const lt_pass *p) { FIXED_FORM(sum_by(p, form, MOMENTS);); }

LT_SIMD static void product_pass(const lt_pass *p)
{
    FIXED_FORM(FIXED_MODE(sum_by(p, form, mode);););
}

LT_SIMD static void backward_pass(const lt_pass *p)
{
    FIXED_FORM(FIXED_MODE(FIXED(add, p->add, backward_rows(p, form, mode, add););););
}

void lt__forward_pass(const lt_pass *p) { forward_pass(p); }
void lt__residual_pass(const lt_pass *p) { residual_pass(p); }
void lt__sum_pass(const lt_pass *p) { p->mode == MOMENTS ? moment_pass(p) : product_pass(p); }
void lt__backward_pass(const lt_pass *p) { backward_pass(p); }
