/* cpu.c - the CPU as a device: aligned allocation and the memory kernels.
 *
 * For large blocks the allocator requests huge pages, which make memory-bound kernels about a fifth
 * faster. The resident size of these blocks then grows in steps of 2 MB.
 *
 * Results that are larger than the caches and not read again soon are written with non-temporal
 * stores, so that a cache line need not be read before it is overwritten.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/pool.h"

/* Memory-bound loops run in pieces. Waking the threads pays off only for arrays that exceed the
 * caches. */
enum { PIECE = 16384, PARALLEL_FROM = 262144 }; /* elements; in cpu_copy(), bytes */
enum { HUGE_PAGE = 2 << 20, HUGE_FROM = 4 * HUGE_PAGE };
enum { HEADROOM = 16 << 20 }; /* bytes that tensors leave free for libraries */

#ifdef _OPENMP
#define LT_PARALLEL                                                                                \
    _Pragma("omp parallel for schedule(static) num_threads(device->threads) if (n > PARALLEL_FROM)")
#else
#define LT_PARALLEL
#endif

static size_t piece_at(size_t i, size_t n) { return LT_MIN(n - i, PIECE); }

int lt_cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int n = CPU_COUNT(&set), quota = lt__cgroup_cpus("/sys/fs/cgroup", "/proc/self/cgroup");
    n = quota > 0 && quota < n ? quota : n;
    return n > 0 ? n : 1;
}

int lt_omp_threads(void)
{
    const char *text = getenv("OMP_NUM_THREADS");
    char *end;
    long n = text ? strtol(text, &end, 10) : 0;
    if (n <= 0 || (*end && !strchr(", ", *end)))
        return 0;
    return (int)LT_MIN(n, 1024);
}

int lt_thread_limit(void)
{
#ifdef _OPENMP
    return omp_get_max_active_levels() > 0 ? omp_get_thread_limit() : 1;
#else
    return INT_MAX;
#endif
}

bool lt__can_map(size_t bytes)
{
    void *area = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return area != MAP_FAILED && munmap(area, bytes) == 0;
}

static void *cpu_alloc(lt_device *device, size_t bytes)
{
    bool huge = bytes >= HUGE_FROM;
    (void)device;
    void *p = huge ? aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1))
                   : aligned_alloc(64, bytes);
    if (p && !lt__can_map(HEADROOM)) {
        free(p);
        return NULL;
    }
    if (p && huge)
        (void)madvise(p, bytes, MADV_HUGEPAGE); /* a hint; may fail */
    return p;
}

static void cpu_free(lt_device *device, void *p, size_t bytes)
{
    (void)device;
    (void)bytes;
    free(p);
}

#ifdef __SSE2__

void lt__copy_nontemporal(void *dst, const void *src, size_t bytes)
{
    char *to = dst;
    const char *from = src;
    size_t head = -(uintptr_t)to % 16;
    if (bytes < 16 + head)
        head = bytes;
    memcpy(to, from, head);
    for (bytes -= head, to += head, from += head; bytes >= 16; bytes -= 16, to += 16, from += 16)
        _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
    memcpy(to, from, bytes);
}

void lt__nontemporal_fence(void) { _mm_sfence(); }

#else

void lt__copy_nontemporal(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }
void lt__nontemporal_fence(void) {}

#endif

static lt_status cpu_copy(lt_device *device, void *dst, const void *src, size_t bytes)
{
    char *to = dst;
    const char *from = src;
    size_t n = bytes, distance = to > from ? (size_t)(to - from) : (size_t)(from - to);
    (void)device; /* unused without OpenMP */
    if (!lt__bypasses_cache(bytes) || distance < bytes) {
        if (bytes > 0)
            memmove(dst, src, bytes);
        return LT_OK;
    }
    LT_PARALLEL
    for (size_t i = 0; i < n; i += PIECE) {
        lt__copy_nontemporal(to + i, from + i, piece_at(i, n));
        lt__nontemporal_fence();
    }
    return LT_OK;
}

static lt_status cpu_convert(lt_device *device, void *dst, lt_dtype dst_dtype, const void *src,
                             lt_dtype src_dtype, size_t n)
{
    size_t dst_size = lt_dtype_bytes(dst_dtype), src_size = lt_dtype_bytes(src_dtype);
    (void)device; /* unused without OpenMP */
    LT_PARALLEL
    for (size_t i = 0; i < n; i += PIECE)
        lt_convert((char *)dst + i * dst_size, dst_dtype, (const char *)src + i * src_size,
                   src_dtype, piece_at(i, n));
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
    for (size_t done = 1, more; done < n; done += more) { /* copies the part filled so far */
        more = LT_MIN(LT_MIN(done, n - done), 4096);
        memcpy(to + done * size, to, more * size);
    }
    return LT_OK;
}

/* Adds in f32 and rounds once. */
static void add_halves(uint16_t *h, const uint16_t *k, lt_dtype dtype, size_t n)
{
    enum { BLOCK = 1024 };
    float a[BLOCK], b[BLOCK];
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t count = LT_MIN(n - i, BLOCK);
        lt_convert(a, LT_F32, h + i, dtype, count);
        lt_convert(b, LT_F32, k + i, dtype, count);
        for (size_t j = 0; j < count; j++)
            a[j] += b[j];
        lt_convert(h + i, dtype, a, LT_F32, count);
    }
}

static void add_piece(void *dst, const void *src, lt_dtype dtype, size_t n)
{
    float *f = dst;
    const float *g = src;
    double *d = dst;
    const double *e = src;
    if (lt__is_half(dtype))
        add_halves(dst, src, dtype, n);
    for (size_t i = 0; dtype == LT_F32 && i < n; i++)
        f[i] += g[i];
    for (size_t i = 0; dtype == LT_F64 && i < n; i++)
        d[i] += e[i];
}

static lt_status cpu_add(lt_device *device, void *dst, const void *src, lt_dtype dtype, size_t n)
{
    size_t size = lt_dtype_bytes(dtype);
    (void)device;
    if (!lt__is_float(dtype))
        return lt_fail(LT_EINVAL, "gradients must have a float dtype, but got %s",
                       lt_dtype_name(dtype));
    LT_PARALLEL
    for (size_t i = 0; i < n; i += PIECE)
        add_piece((char *)dst + i * size, (const char *)src + i * size, dtype, piece_at(i, n));
    return LT_OK;
}

static lt_status cpu_look_up(lt_device *device, void *dst, const uint8_t *src, const void *table,
                             size_t each, int64_t n, int64_t channels)
{
    (void)device;
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)dst + (size_t)i * each,
               (const char *)table + (size_t)(i % channels * 256 + src[i]) * each, each);
    return LT_OK;
}

static lt_status cpu_sync(lt_device *device)
{
    (void)device;
    return LT_OK;
}

static void cpu_close(lt_device *device) { free(device); }

lt_device *lt__cpu_device_new(int threads)
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
                              .look_up = cpu_look_up,
                              .sync = cpu_sync,
                              .close = cpu_close,
                              .threads = threads,
                              .is_host = true};
    return device;
}
