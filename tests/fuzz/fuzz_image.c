/* fuzz_image.c - decodes images of arbitrary bytes: the result is the same pixels each time, or
 * LT_EDATA with the name of the file. If the number of bytes is even, the checksums of a PNG are
 * corrected first, so that the fuzzer gets past them.
 */
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "data/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t read32(const uint8_t *p)
{
    return (size_t)p[0] << 24 | (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3];
}

static void fix_checksums(uint8_t *p, size_t n)
{
    size_t length;
    for (size_t at = 8; at + 12 <= n && (length = read32(p + at)) <= n - at - 12;
         at += length + 12) {
        uLong sum = crc32(0, p + at + 4, (uInt)length + 4);
        for (int i = 0; i < 4; i++)
            p[at + 8 + length + (size_t)i] = (uint8_t)(sum >> (24 - 8 * i));
    }
}

static void must(bool promise)
{
    if (!promise)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lt_sample_buffers first = {0}, again = {0};
    lt_image x, y;
    int channels = size % 4 < 2 ? 3 : 1;
    uint8_t *bytes = malloc(size);
    must(bytes || size == 0);
    if (size > 0)
        memcpy(bytes, data, size);
    if (size % 2 == 0)
        fix_checksums(bytes, size);
    if (lt__image_decode("a.png", bytes, size, channels, &first, &x) == LT_OK) {
        must(x.h > 0 && x.w > 0 && x.c == channels && x.dtype == LT_U8);
        must(lt__image_decode("a.png", bytes, size, channels, &again, &y) == LT_OK);
        must(y.h == x.h && y.w == x.w &&
             memcmp(x.pixels, y.pixels, (size_t)(x.h * x.w * x.c)) == 0);
    } else
        must(lt_errcode() == LT_EDATA && strncmp(lt_errmsg(), "a.png: cannot decode: ", 22) == 0);
    free(again.decoded.data);
    free(first.decoded.data);
    free(bytes);
    return 0;
}
