/* fuzz_idx.c - reads IDX files of arbitrary bytes: the result is a tensor or LT_EDATA, and memory
 * is allocated only for data that exist. Byte 0 selects whether the rest is compressed with gzip
 * first, so that the fuzzer gets past the checksum. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include "data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[32];
    int fd = memfd_create("idx", 0);
    bool pack = size > 0 && data[0] & 1;
    if (size > 0)
        data++, size--;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    gzFile file = gzopen(path, pack ? "wb1" : "wbT"); /* T: uncompressed */
    if (fd < 0 || !file || gzwrite(file, data, (unsigned)size) != (int)size ||
        gzclose(file) != Z_OK)
        abort();
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *x = lt_idx_read(ctx, path);
    if (!x && lt_errcode() != LT_EDATA)
        abort();
    lt_release(x);
    if (lt_memory_stats(ctx).live != 0 || lt_memory_stats(ctx).peak > 2 * 1032 * size + 4096)
        abort();
    lt_ctx_free(ctx);
    close(fd);
    return 0;
}
