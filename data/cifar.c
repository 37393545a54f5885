/* cifar.c - reads the binary files of CIFAR-10: records of a label and an image of 32x32 pixels in
 * three planes, red, green and blue.
 *
 * The files are read twice: first to count the records and check the labels, then to fill the
 * allocated tensors.
 */
#include <limits.h>
#include <stdlib.h>

#include "data/source.h"

enum { PIXELS = 32 * 32, RECORD = 1 + 3 * PIXELS, CLASSES = 10 };

static lt_status read_records(const char *path, lt_bytes *file, int64_t *count)
{
    size_t n;
    LT_TRY(lt__read_file(path, INT_MAX, file, &n));
    if (n == 0 || n % RECORD != 0)
        return lt_fail(LT_EDATA,
                       "%s is not a CIFAR-10 file or is cut short: its %zu bytes are not a "
                       "multiple of %d, the length of a record; download it again",
                       LT_SHORT_PATH(path), n, RECORD);
    *count = (int64_t)(n / RECORD);
    for (int64_t i = 0; i < *count; i++)
        if (file->data[i * RECORD] >= CLASSES)
            return lt_fail(LT_EDATA, "%s: record %lld has label %d, but CIFAR-10 has labels 0 to 9",
                           LT_SHORT_PATH(path), (long long)i + 1, file->data[i * RECORD]);
    return LT_OK;
}

/* Converts planes (3, 32, 32) to pixels (32, 32, 3). */
static void put_image(const uint8_t *planes, uint8_t *pixels)
{
    for (int i = 0; i < PIXELS; i++)
        for (int c = 0; c < 3; c++)
            pixels[3 * i + c] = planes[c * PIXELS + i];
}

static lt_status count_records(int n, const char *const *paths, lt_bytes *file, int64_t *total)
{
    *total = 0;
    if (n < 1)
        return lt_fail(LT_EINVAL, "cifar10: the number of files must be at least 1, but is %d", n);
    for (int k = 0; k < n; k++) {
        int64_t count;
        LT_TRY(read_records(paths[k], file, &count));
        *total += count;
    }
    return LT_OK;
}

static lt_status fill(int n, const char *const *paths, lt_bytes *file, int64_t capacity,
                      uint8_t *pixels, uint8_t *labels)
{
    for (int k = 0; k < n; k++) {
        int64_t count;
        LT_TRY(read_records(paths[k], file, &count));
        if (count > capacity)
            return lt_fail(LT_EDATA, "%s became longer while it was being read",
                           LT_SHORT_PATH(paths[k]));
        capacity -= count;
        for (const uint8_t *p = file->data; count > 0; count--, p += RECORD) {
            *labels++ = p[0];
            put_image(p + 1, pixels);
            pixels += 3 * PIXELS;
        }
    }
    if (capacity > 0)
        return lt_fail(LT_EDATA, "%s, or one before it, became shorter while it was being read",
                       LT_SHORT_PATH(paths[n - 1]));
    return LT_OK;
}

lt_status lt_cifar10_read(lt_ctx *ctx, int n, const char *const *paths, lt_tensor **images,
                          lt_tensor **labels)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    lt_bytes file = {0};
    int64_t count;
    *images = *labels = NULL;
    lt_status status = count_records(n, paths, &file, &count);
    if (status != LT_OK)
        goto done;
    lt_device *cpu = ctx->devices[0];
    *images = lt__tensor_new(ctx, cpu, LT_U8, 4, (int64_t[]){count, 32, 32, 3}, false);
    *labels = lt__tensor_new(ctx, cpu, LT_U8, 1, &count, false);
    status = *images && *labels ? fill(n, paths, &file, count, lt_data(*images), lt_data(*labels))
                                : lt_errcode();
    if (status != LT_OK) {
        lt_release(*images);
        lt_release(*labels);
        *images = *labels = NULL;
    }
done:
    free(file.data);
    return status;
}
