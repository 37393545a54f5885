/* idx.c - reads IDX files, the format of MNIST: two zero bytes, a type, the number of dims, the
 * dims as big-endian 32-bit integers, and the elements in row-major order, also big-endian.
 *
 * The header is not trusted. A first pass counts the bytes of data in the file and verifies gzip's
 * checksum; a second pass reads the data into newly allocated memory. The cost is decompressing
 * twice (0.2 s for 60,000 images of 28x28). In return, no header can make a small file allocate
 * much memory.
 */
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "data/source.h"

typedef struct header {
    lt_dtype dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    size_t bytes;      /* length of the header */
    size_t data_bytes; /* length of the data according to the header */
} header;

/* Reports a zlib error. Removes zlib's name for the file descriptor from the start of its
 * message. */
static lt_status read_failed(gzFile file, const char *path)
{
    int code;
    const char *reason = gzerror(file, &code), *colon = strstr(reason, ": ");
    if (code == Z_MEM_ERROR)
        return lt_fail(LT_ENOMEM, "out of memory while reading a gzip file");
    return lt_fail(LT_EDATA, "cannot read %s: %s; download it again", LT_SHORT_PATH(path),
                   colon ? colon + 2 : reason);
}

/* Reads up to `bytes` bytes, fewer only at the end of the file. Stores the number read in *got. */
static lt_status read_up_to(gzFile file, const char *path, void *buffer, size_t bytes, size_t *got)
{
    enum { MOST = 1 << 30 }; /* gzread counts in int */
    *got = 0;
    while (*got < bytes) {
        size_t rest = bytes - *got;
        int n = gzread(file, (char *)buffer + *got, (unsigned)LT_MIN(rest, MOST));
        int code;
        gzerror(file, &code);
        if (n < 0 || code != Z_OK) /* gzread returns 0 with an error code if truncated */
            return read_failed(file, path);
        if (n == 0)
            break;
        *got += (size_t)n;
    }
    return LT_OK;
}

static lt_status read_header(gzFile file, const char *path, header *h)
{
    unsigned char magic[4], sizes[4 * LT_MAX_DIMS];
    size_t got;
    LT_TRY(read_up_to(file, path, magic, 4, &got));
    if (got < 4 || magic[0] || magic[1])
        return lt_fail(LT_EDATA,
                       "%s is not an IDX file: it does not start with two zero bytes, a type "
                       "and the number of dims",
                       LT_SHORT_PATH(path));
    switch (magic[2]) {
    case 0x08: h->dtype = LT_U8; break;
    case 0x0c: h->dtype = LT_I32; break;
    case 0x0d: h->dtype = LT_F32; break;
    case 0x0e: h->dtype = LT_F64; break;
    default:
        return lt_fail(LT_EDATA,
                       "%s has elements of IDX type 0x%02x; luatrain reads 0x08 (u8), 0x0c (i32), "
                       "0x0d (f32) and 0x0e (f64)",
                       LT_SHORT_PATH(path), magic[2]);
    }
    h->ndim = magic[3];
    if (h->ndim < 1 || h->ndim > LT_MAX_DIMS)
        return lt_fail(LT_EDATA, "%s has %d dims; luatrain reads 1 to %d", LT_SHORT_PATH(path),
                       h->ndim, LT_MAX_DIMS);
    LT_TRY(read_up_to(file, path, sizes, 4 * (size_t)h->ndim, &got));
    if (got < 4 * (size_t)h->ndim)
        return lt_fail(LT_EDATA, "%s ends inside its header; download it again",
                       LT_SHORT_PATH(path));
    h->bytes = 4 + 4 * (size_t)h->ndim;
    h->data_bytes = lt_dtype_bytes(h->dtype);
    for (int i = 0; i < h->ndim; i++) {
        const unsigned char *s = sizes + 4 * i;
        h->dims[i] = (int64_t)s[0] << 24 | s[1] << 16 | s[2] << 8 | s[3];
        if (h->dims[i] == 0)
            return lt_fail(LT_EDATA, "%s is empty: axis %d has 0 elements", LT_SHORT_PATH(path),
                           i + 1);
        if (__builtin_mul_overflow(h->data_bytes, (size_t)h->dims[i], &h->data_bytes))
            return lt_fail(LT_EDATA, "%s declares more elements than any file can contain",
                           LT_SHORT_PATH(path));
    }
    return LT_OK;
}

/* Compares the length of the data with the header. Reads to the end of the file, or until there is
 * more than the header declares. */
static lt_status check_size(gzFile file, const char *path, const header *h)
{
    char buffer[1 << 14];
    size_t count = 0, got;
    do {
        LT_TRY(read_up_to(file, path, buffer, sizeof buffer, &got));
        count += got;
    } while (got == sizeof buffer && count <= h->data_bytes);
    if (count < h->data_bytes)
        return lt_fail(LT_EDATA,
                       "%s is cut short: its header declares %zu bytes of data, but it has %zu; "
                       "download it again",
                       LT_SHORT_PATH(path), h->data_bytes, count);
    if (count > h->data_bytes)
        return lt_fail(LT_EDATA, "%s has more data than the %zu bytes that its header declares",
                       LT_SHORT_PATH(path), h->data_bytes);
    return LT_OK;
}

/* Converts from big-endian; all supported machines are little-endian. */
static void swap_bytes(unsigned char *p, size_t bytes, size_t width)
{
    for (unsigned char *end = p + bytes; p < end; p += width)
        for (size_t i = 0; i < width / 2; i++) {
            unsigned char b = p[i];
            p[i] = p[width - 1 - i];
            p[width - 1 - i] = b;
        }
}

static lt_status read_data(gzFile file, const char *path, const header *h, lt_tensor *x)
{
    size_t got;
    if (gzseek(file, (z_off_t)h->bytes, SEEK_SET) < 0)
        return read_failed(file, path);
    LT_TRY(read_up_to(file, path, lt_data(x), h->data_bytes, &got));
    if (got < h->data_bytes)
        return lt_fail(LT_EDATA, "%s became shorter while it was being read", LT_SHORT_PATH(path));
    swap_bytes(lt_data(x), h->data_bytes, lt_dtype_bytes(h->dtype));
    return LT_OK;
}

lt_tensor *lt_idx_read(lt_ctx *ctx, const char *path)
{
    LT_NEED_CTX(ctx, NULL);
    header h;
    lt_tensor *x = NULL;
    int64_t bytes;
    int fd = lt__open_regular(path, &bytes);
    if (fd < 0)
        return NULL;
    gzFile file = gzdopen(fd, "rb"); /* takes fd */
    if (!file) {
        close(fd);
        lt_fail(LT_ENOMEM, "out of memory for reading a file");
        return NULL;
    }
    gzbuffer(file, 1 << 17);
    if (read_header(file, path, &h) == LT_OK && check_size(file, path, &h) == LT_OK)
        x = lt__tensor_new(ctx, ctx->devices[0], h.dtype, h.ndim, h.dims, false);
    if (x)
        x = lt__tensor_if(read_data(file, path, &h, x), x);
    gzclose_r(file);
    return x;
}
