/* rng.c - Philox4x32-10, random fills and the shuffle. All of it is stateless: the numbers of a
 * fill depend only on (seed, purpose, stream, index) and a shuffle only on (seed, epoch), whatever
 * the number of threads or pieces.
 *
 * A block (one counter value) yields two 64-bit words. Elements with index 2j and 2j + 1 share
 * block j. A uniform number has 53 random bits. A pair of normal numbers is computed from two
 * uniform numbers with the Box-Muller transform (A note on the generation of random normal
 * deviates, Ann. Math. Stat. 29(2), 1958); no result is more than 8.6 standard deviations from the
 * mean.
 */
#include <math.h>

#include "core/tensor.h"

void lt_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    lt__philox(counter, key, out);
}

void lt_random(uint64_t seed, lt_purpose purpose, uint64_t stream, uint64_t index, uint32_t out[4])
{
    uint32_t key[2], counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream,
                                   (uint32_t)(stream >> 32)};
    lt__random_key(seed, purpose, key);
    lt__philox(counter, key, out);
}

static void random_pair(uint64_t seed, lt_purpose purpose, uint64_t stream, uint64_t index,
                        uint64_t pair[2])
{
    uint32_t out[4];
    lt_random(seed, purpose, stream, index, out);
    pair[0] = (uint64_t)out[1] << 32 | out[0];
    pair[1] = (uint64_t)out[3] << 32 | out[2];
}

/* ==== Fills ================================================================================= */

typedef struct fill {
    lt_tensor *x;
    lt_purpose purpose;
    uint64_t stream, first;
    bool normal;
    double base, factor; /* low and high - low, or mean and deviation */
    double top;          /* uniform only: the largest number of the dtype below high */
} fill;

static void fill_pair(const fill *f, const uint64_t bits[2], double value[2])
{
    double u = (double)(bits[0] >> 11) * 0x1p-53; /* in [0, 1) */
    double v = (double)(bits[1] >> 11) * 0x1p-53;
    if (f->normal) {
        double radius = sqrt(-2 * log(1 - u)), angle = 6.283185307179586 * v;
        u = radius * cos(angle);
        v = radius * sin(angle);
    }
    value[0] = f->base + f->factor * u;
    value[1] = f->base + f->factor * v;
    if (!f->normal) { /* the sum, or its rounding to the dtype, may reach high */
        value[0] = fmin(value[0], f->top);
        value[1] = fmin(value[1], f->top);
    }
}

enum { PIECE = 1024 };

/* Fills elements [start, start + n) of x; n <= PIECE. */
static void fill_piece(const fill *f, uint64_t start, size_t n)
{
    double value[PIECE + 2];
    uint64_t seed = lt_seed(f->x->ctx), index = f->first + start, odd = index & 1;
    for (size_t i = 0; i < odd + n; i += 2) { /* starts at the first block */
        uint64_t bits[2];
        random_pair(seed, f->purpose, f->stream, (index + i) / 2, bits);
        fill_pair(f, bits, value + i);
    }
    lt_dtype dtype = (lt_dtype)f->x->dtype;
    lt_convert((char *)f->x->data + start * lt_dtype_bytes(dtype), dtype, value + odd, LT_F64, n);
}

static void fill_on_host(const fill *f)
{
    uint64_t n = (uint64_t)f->x->count;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(f->x->ctx->threads) if (n > 8 * PIECE)
#endif
    for (uint64_t i = 0; i < n; i += PIECE)
        fill_piece(f, i, n - i < PIECE ? n - i : PIECE);
}

/* Numbers for another device are generated on the CPU, so they are the same on every device. */
static lt_status run_fill(const fill *f)
{
    lt_tensor *x = f->x;
    lt__bump_version(x);
    if (x->storage->device->is_host) {
        fill_on_host(f);
        return LT_OK;
    }
    fill here = *f;
    here.x = lt__tensor_like(x, x->ctx->devices[0], (lt_dtype)x->dtype);
    if (!here.x)
        return lt_errcode();
    fill_on_host(&here);
    lt_status status = lt_copy(x, here.x);
    lt_release(here.x);
    return status;
}

static lt_status check_fill(lt_tensor *x)
{
    LT_TRY(lt__check_alive(x));
    if (!lt__is_float((lt_dtype)x->dtype))
        return lt_fail(LT_EINVAL, "random numbers require a float tensor, but this one is %s",
                       lt_dtype_name((lt_dtype)x->dtype));
    return LT_OK;
}

static double rounded(double value, lt_dtype dtype)
{
    uint64_t bits;
    lt_convert(&bits, dtype, &value, LT_F64, 1);
    lt_convert(&value, LT_F64, &bits, dtype, 1);
    return value;
}

/* The largest number of dtype below value, which must be finite and exact in dtype. */
static double below(double value, lt_dtype dtype)
{
    uint64_t bits = 0, sign = (uint64_t)1 << (8 * lt_dtype_bytes(dtype) - 1);
    lt_convert(&bits, dtype, &value, LT_F64, 1);
    bits = value > 0 ? bits - 1 : value < 0 ? bits + 1 : (sign | 1);
    lt_convert(&value, LT_F64, &bits, dtype, 1);
    return value;
}

lt_status lt_fill_uniform(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                          double low, double high)
{
    LT_TRY(check_fill(x));
    lt_dtype dtype = (lt_dtype)x->dtype;
    double from = rounded(low, dtype), to = rounded(high, dtype);
    if (!isfinite(to - from) || low > high)
        return lt_fail(LT_EINVAL,
                       "uniform numbers require low <= high, both finite in %s; low is %g, high "
                       "is %g",
                       lt_dtype_name(dtype), low, high);
    if (from == to)
        return lt_fill(x, from);
    return run_fill(&(fill){.x = x,
                            .purpose = purpose,
                            .stream = stream,
                            .first = first,
                            .base = from,
                            .factor = to - from,
                            .top = below(to, dtype)});
}

lt_status lt_fill_normal(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                         double mean, double deviation)
{
    LT_TRY(check_fill(x));
    if (!isfinite(mean) || !isfinite(deviation) || deviation < 0)
        return lt_fail(LT_EINVAL,
                       "normal numbers require a finite mean and a deviation of at least 0; mean "
                       "is %g, deviation is %g",
                       mean, deviation);
    return run_fill(&(fill){.x = x,
                            .purpose = purpose,
                            .stream = stream,
                            .first = first,
                            .normal = true,
                            .base = mean,
                            .factor = deviation});
}

/* ==== Shuffle =============================================================================== */

/* The Fisher-Yates shuffle, from the end. A random number below i + 1 is the upper half of (random
 * word) * (i + 1), after D. Lemire, Fast random integer generation in an interval, ACM TOMACS
 * 29(1), 2019. Words whose lower half is below 2^64 mod (i + 1) are rejected, which makes the
 * result exactly uniform. The words come from blocks 0, 1, 2, ... in order. */
void lt_shuffle(uint64_t seed, uint64_t epoch, int64_t *order, int64_t n)
{
    uint64_t pair[2], word = 0;
    for (int64_t i = 0; i < n; i++)
        order[i] = i;
    for (int64_t i = n - 1; i > 0;) {
        uint64_t range = (uint64_t)i + 1;
        if (word % 2 == 0)
            random_pair(seed, LT_RNG_SHUFFLE, epoch, word / 2, pair);
        unsigned __int128 product = (unsigned __int128)pair[word++ % 2] * range;
        if ((uint64_t)product < range && (uint64_t)product < -range % range)
            continue;
        int64_t other = (int64_t)(product >> 64), swapped = order[i];
        order[i--] = order[other];
        order[other] = swapped;
    }
}
