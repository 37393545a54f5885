/* rescale.c - multiplies gradients by a power of two and measures them in the same pass.
 *
 * This is not an op: it has no gradient, and its result is not a tensor. Almost all gradients are
 * f32; the pass over them works on bits. The bits of finite magnitudes are ordered like the
 * magnitudes, and are smaller than those of infinity and NaN.
 */
#include "ops/kernel.h"
#include "ops/backend/plugin.h"
#include "ops/backend/state.h"

enum { BLOCK = 16384, INFINITE = 0x7f800000, MAGNITUDE = 0x7fffffff };

static double element(const lt_tensor *x, int64_t i)
{
    switch (x->dtype) {
    case LT_F64: return ((const double *)x->data)[i];
    case LT_F32: return ((const float *)x->data)[i];
    case LT_F16: return lt__f16_to_f32(((const uint16_t *)x->data)[i]);
    default: return lt__bf16_to_f32(((const uint16_t *)x->data)[i]);
    }
}

static void put(lt_tensor *x, int64_t i, double value)
{
    switch (x->dtype) {
    case LT_F64: ((double *)x->data)[i] = value; break;
    case LT_F32: ((float *)x->data)[i] = (float)value; break;
    case LT_F16: ((uint16_t *)x->data)[i] = lt__f64_to_f16(value); break;
    default: ((uint16_t *)x->data)[i] = lt__f64_to_bf16(value);
    }
}

static void measure(lt_grad_stats *stats, double value)
{
    if (!isfinite(value))
        stats->not_finite++;
    else if (fabs(value) > stats->largest)
        stats->largest = fabs(value);
}

static void rescale(lt_tensor *x, double by, lt_grad_stats *stats)
{
    for (int64_t i = 0; i < x->count; i++) {
        double was = element(x, i);
        put(x, i, was * by);
        measure(stats, was);
    }
}

typedef struct block_stats {
    int32_t largest, not_finite;
} block_stats; /* largest: the bits of a magnitude */

static inline void measure_bits(block_stats *s, float value)
{
    union {
        float f;
        int32_t i;
    } is = {value};
    int32_t size = is.i & MAGNITUDE, finite = size < INFINITE ? size : 0;
    s->largest = finite > s->largest ? finite : s->largest;
    s->not_finite += size >= INFINITE;
}

LT_SIMD static block_stats rescale_block(float *x, int64_t n, float by)
{
    block_stats s = {0};
    for (int64_t i = 0; i < n; i++) {
        measure_bits(&s, x[i]);
        x[i] *= by;
    }
    return s;
}

LT_SIMD static block_stats measure_block(const float *x, int64_t n)
{
    block_stats s = {0};
    for (int64_t i = 0; i < n; i++)
        measure_bits(&s, x[i]);
    return s;
}

/* largest: the bits of a magnitude */
static lt_grad_stats stats_of(int32_t largest, int64_t not_finite)
{
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    return (lt_grad_stats){magnitude, not_finite};
}

static lt_grad_stats measure_f32(const float *x, int64_t count)
{
    lt_grad_stats stats = {0};
    for (int64_t i = 0; i < count; i += BLOCK) {
        block_stats s = measure_block(x + i, count - i < BLOCK ? count - i : BLOCK);
        stats = lt__grad_stats_join(stats, stats_of(s.largest, s.not_finite));
    }
    return stats;
}

lt_grad_stats lt_grad_stats_of(const lt_tensor *x)
{
    lt_grad_stats stats = {0};
    if (x->dtype == LT_F32)
        return measure_f32(x->data, x->count);
    for (int64_t i = 0; i < x->count; i++)
        measure(&stats, element(x, i));
    return stats;
}

static void rescale_f32(lt_tensor *x, float by, lt_grad_stats *stats)
{
    float *data = x->data;
    int64_t count = x->count, not_finite = 0;
    int32_t largest = 0;
    int threads = x->ctx->threads;
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 32768 && threads > 1)   \
    reduction(+ : not_finite) reduction(max : largest)
#endif
    for (int64_t i = 0; i < count; i += BLOCK) {
        block_stats s = rescale_block(data + i, count - i < BLOCK ? count - i : BLOCK, by);
        largest = s.largest > largest ? s.largest : largest;
        not_finite += s.not_finite;
    }
    *stats = lt__grad_stats_join(*stats, stats_of(largest, not_finite));
}

/* Waits for the device if stats is not NULL. */
static lt_status rescale_on_device(lt_tensor *x, double by, lt_grad_stats *stats)
{
    const lt_accelerator *accelerator = lt__accelerator(x->ctx);
    lt_device *device = x->storage->device;
    struct {
        lt_grad_row row;
        lt_grad_stats stats;
    } *there = stats ? lt__device_alloc(x->ctx, device, sizeof *there) : NULL;
    lt_grad_stats here;
    if (stats && !there)
        return LT_ENOMEM;
    lt_status status = accelerator->rescale(x, x, by, stats ? &there->row : NULL);
    if (status == LT_OK && stats)
        status = accelerator->join(device, &there->row, 1, &there->stats);
    if (status == LT_OK && stats)
        status = lt__move(x->ctx->devices[0], &here, device, &there->stats, sizeof here);
    if (status == LT_OK && stats)
        *stats = lt__grad_stats_join(*stats, here);
    lt__device_free(x->ctx, device, there, sizeof *there);
    return status;
}

lt_status lt_rescale(lt_tensor *x, double by, lt_grad_stats *stats)
{
    lt_grad_stats ignored = {0};
    int exponent;
    LT_TRY(lt__check_alive(x));
    if (!lt__is_float((lt_dtype)x->dtype))
        return lt_fail(LT_EINVAL, "rescale requires a float tensor, but got %s", LT_TEXT(x));
    if (!(by > 0 && isfinite(by) && frexp(by, &exponent) == 0.5))
        return lt_fail(LT_EINVAL, "rescale requires a power of two, but got %g", by);
    if (!x->storage->device->is_host) {
        lt__bump_version(x);
        return rescale_on_device(x, by, stats);
    }
    stats = stats ? stats : &ignored;
    bool plain = x->ctx->config.reference || x->dtype != LT_F32 || (double)(float)by != by;
    if (plain)
        rescale(x, by, stats);
    else
        rescale_f32(x, (float)by, stats);
    lt__bump_version(x);
    return LT_OK;
}
