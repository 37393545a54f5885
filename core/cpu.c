/* cpu.c - the CPU as a device: aligned memory and the memory kernels. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

/* Memory-bound loops repay a team only when they leave the caches. */
#ifdef _OPENMP
#define LT_PARALLEL _Pragma("omp parallel for schedule(static) if (n > 262144)")
#else
#define LT_PARALLEL
#endif

int lt_cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

static void *cpu_alloc(lt_device *device, size_t bytes)
{
    (void)device;
    return aligned_alloc(64, bytes);
}

static void cpu_free(lt_device *device, void *p, size_t bytes)
{
    (void)device;
    (void)bytes;
    free(p);
}

static lt_status cpu_copy(lt_device *device, void *dst, const void *src, size_t bytes)
{
    (void)device;
    if (bytes > 0)
        memmove(dst, src, bytes);
    return LT_OK;
}

static lt_status cpu_convert(lt_device *device, void *dst, lt_dtype dst_dtype, const void *src,
                             lt_dtype src_dtype, size_t n)
{
    (void)device;
    lt_convert(dst, dst_dtype, src, src_dtype, n);
    return LT_OK;
}

static lt_status cpu_fill(lt_device *device, void *dst, lt_dtype dtype, size_t n, double value)
{
    (void)device;
    size_t size = lt_dtype_bytes(dtype);
    char *to = dst, one[8];
    if (n == 0)
        return LT_OK;
    lt_convert(one, dtype, &value, LT_F64, 1);
    memcpy(to, one, size);
    for (size_t done = 1; done < n;) { /* doubles what is there */
        size_t more = done < n - done ? done : n - done;
        if (more > 4096)
            more = 4096;
        memcpy(to + done * size, to, more * size);
        done += more;
    }
    return LT_OK;
}

/* Floats only. A loop per type; halves are added in f32 and rounded once. */
static lt_status cpu_add(lt_device *device, void *dst, const void *src, lt_dtype dtype, size_t n)
{
    (void)device;
    float *f = dst;
    const float *g = src;
    double *d = dst;
    const double *e = src;
    uint16_t *h = dst;
    const uint16_t *k = src;
    switch (dtype) {
    case LT_F32:
        LT_PARALLEL
        for (size_t i = 0; i < n; i++)
            f[i] += g[i];
        return LT_OK;
    case LT_F64:
        LT_PARALLEL
        for (size_t i = 0; i < n; i++)
            d[i] += e[i];
        return LT_OK;
    case LT_F16:
        LT_PARALLEL
        for (size_t i = 0; i < n; i++)
            h[i] = lt__f32_to_f16(lt__f16_to_f32(h[i]) + lt__f16_to_f32(k[i]));
        return LT_OK;
    case LT_BF16:
        LT_PARALLEL
        for (size_t i = 0; i < n; i++)
            h[i] = lt__f32_to_bf16(lt__bf16_to_f32(h[i]) + lt__bf16_to_f32(k[i]));
        return LT_OK;
    default:
        return lt_fail(LT_EINVAL, "gradients are floats, not %s", lt_dtype_name(dtype));
    }
}

static lt_status cpu_sync(lt_device *device)
{
    (void)device;
    return LT_OK;
}

static void cpu_close(lt_device *device) { free(device); }

lt_device *lt__cpu_device_new(void)
{
    lt_device *device = calloc(1, sizeof *device);
    if (device)
        *device = (lt_device){.name = "cpu",
                              .alloc = cpu_alloc,
                              .free = cpu_free,
                              .copy = cpu_copy,
                              .convert = cpu_convert,
                              .fill = cpu_fill,
                              .add = cpu_add,
                              .sync = cpu_sync,
                              .close = cpu_close,
                              .is_host = true};
    return device;
}
