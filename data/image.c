/* image.c - reads JPEG and PNG files. The decoder is stb_image; only this file uses it.
 *
 * stb_image decodes whatever it can: it verifies no checksums, fills in missing data, and reads
 * past its tables if a Huffman table has a few thousand codes instead of at most 256. Therefore the
 * file is first scanned marker by marker or chunk by chunk. It must be complete, and so must all
 * the tables that the decoder will need. Whatever its header says, a file uses memory only in
 * proportion to its size, and never more than 1 GB. A progressive JPEG may have at most 100 scans,
 * and the number of blocks they visit is limited by its size. Checksums protect all of a PNG, so
 * every flipped bit is detected. A JPEG has no checksum: changed coefficients give a different
 * image, and this cannot be detected.
 *
 * The decoder's memory is zeroed, so that the pixels of a malformed file are a function of its
 * bytes. 16-bit samples are truncated to their upper 8 bits, alpha is dropped, and grey is computed
 * as luma. Orientation and colour profiles are ignored.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "data/source.h"

enum { MAX_PIXELS = 64000000, MAX_BYTES = 256 << 20 }; /* MAX_BYTES: of a PNG's rows */

/* Sets the error message, as stb_image itself returns only NULL. */
static void *allocate(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        lt_fail(LT_ENOMEM, "out of memory for its pixels");
    return p;
}

/* Only PNG decoding reallocates: it doubles the buffer of the compressed data, and that of the rows
 * if there are more than the header says. */
static void *reallocate(void *old, size_t old_bytes, size_t bytes)
{
    char *p = bytes <= 2 * (size_t)MAX_BYTES ? realloc(old, bytes) : NULL;
    if (p)
        memset(p + old_bytes, 0, bytes - old_bytes);
    else if (bytes <= 2 * (size_t)MAX_BYTES)
        lt_fail(LT_ENOMEM, "out of memory for its pixels");
    return p;
}

/* Doubles a row of w colour samples of a JPEG with half the horizontal colour resolution (4:2:2):
 * each pixel is 3/4 of its own sample and 1/4 of the nearer neighbour. stb_image's function of this
 * name swaps these weights in the last column but one. The macro renames its definition; its use
 * has no arguments, so it is not renamed. */
static uint8_t *stbi__resample_row_h_2(uint8_t *out, uint8_t *in, uint8_t *far, int w, int scale)
{
    (void)far, (void)scale;
    for (int i = 0; i < w; i++) {
        int left = in[i > 0 ? i - 1 : i], right = in[i < w - 1 ? i + 1 : i];
        out[2 * i] = (uint8_t)((3 * in[i] + left + 2) >> 2);
        out[2 * i + 1] = (uint8_t)((3 * in[i] + right + 2) >> 2);
    }
    return out;
}
#define stbi__resample_row_h_2(out, in, far, w, scale) unused_row_h_2(out, in, far, w, scale)

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#define STBI_NO_STDIO
#define STBI_NO_HDR
#define STBI_NO_LINEAR
#define STBI_NO_FAILURE_STRINGS /* their buffer is shared by all threads */
#define STBI_ASSERT(x) ((void)0)
#define STBI_MALLOC(bytes) allocate(bytes)
#define STBI_REALLOC_SIZED(p, old_bytes, bytes) reallocate(p, old_bytes, bytes)
#define STBI_FREE(p) free(p)
#define STBI_MAX_DIMENSIONS MAX_PIXELS
#include <stb/stb_image.h> /* a system header, so its warnings are suppressed */

/* ==== Common to both formats ================================================================= */

static lt_status check_size(uint64_t height, uint64_t width)
{
    unsigned long long h = height, w = width;
    if (h == 0 || w == 0)
        return lt_fail(LT_EDATA, "its header declares %llux%llu pixels (height x width)", h, w);
    if (h > MAX_PIXELS / w)
        return lt_fail(LT_EDATA,
                       "it has %llux%llu pixels (height x width); luatrain accepts at most 64 "
                       "million",
                       h, w);
    return LT_OK;
}

/* Checks the file size n against min, the minimum for an image of this size. */
static lt_status check_bytes(uint64_t height, uint64_t width, uint64_t min, size_t n)
{
    if (min > n)
        return lt_fail(LT_EDATA,
                       "its header declares %llux%llu pixels (height x width), more "
                       "than %zu bytes can hold",
                       (unsigned long long)height, (unsigned long long)width, n);
    return LT_OK;
}

static lt_status cut_short(const char *kind, const char *end)
{
    return lt_fail(LT_EDATA, "the %s is cut short: it has no %s; download it again", kind, end);
}

static unsigned read16(const uint8_t *p) { return (unsigned)p[0] << 8 | p[1]; }
static uint32_t read32(const uint8_t *p) { return (uint32_t)read16(p) << 16 | read16(p + 2); }

/* ==== PNG ===================================================================================== */

static const uint8_t png_signature[8] = {137, 'P', 'N', 'G', 13, 10, 26, 10};

/* Checks the IHDR chunk. The decoder allocates the rows, each with a filter byte, and the pixels.
 * deflate expands one byte to at most 1032. */
static lt_status check_header(const uint8_t *p, size_t n)
{
    static const struct {
        uint8_t colours, depths; /* depths: sum of the allowed bit depths */
    } types[] = {{1, 1 + 2 + 4 + 8 + 16},
                 {0, 0},
                 {3, 8 + 16},
                 {1, 1 + 2 + 4 + 8},
                 {2, 8 + 16},
                 {0, 0},
                 {4, 8 + 16}};
    uint64_t w = read32(p), h = read32(p + 4), bits = p[8], type = p[9];
    if (type >= sizeof types / sizeof *types || bits == 0 || (bits & (bits - 1)) != 0 ||
        !(types[type].depths & bits))
        return lt_fail(LT_EDATA, "the header of the PNG is damaged; download it again");
    LT_TRY(check_size(h, w));
    uint64_t rows = h * ((w * bits * types[type].colours + 7) / 8 + 1);
    if (rows > MAX_BYTES)
        return lt_fail(LT_EDATA,
                       "its %llux%llu pixels (height x width) are %llu bytes; luatrain accepts "
                       "PNGs of at most %d",
                       (unsigned long long)h, (unsigned long long)w, (unsigned long long)rows,
                       MAX_BYTES);
    return check_bytes(h, w, rows / 1032, n);
}

enum { PALETTE = 3, COLOURS = 256 }; /* colour type of an image with a palette; its most colours */

/* Checks the chunks: a length, a name, the data, and a checksum of name and data. Sets *palette to
 * the offset of a palette with fewer than COLOURS colours, or to 0. */
static lt_status check_png(const uint8_t *p, size_t n, size_t *palette)
{
    size_t at = sizeof png_signature, length;
    bool has_data = false, has_palette = false;
    *palette = 0;
    for (;; at += length + 12) {
        if (n - at < 12 || (length = read32(p + at)) > n - at - 12)
            return cut_short("PNG", "IEND chunk at its end");
        const uint8_t *chunk = p + at + 4;
        if (crc32(0, chunk, (uInt)length + 4) != read32(chunk + 4 + length))
            return lt_fail(LT_EDATA,
                           "the checksum of the PNG chunk at byte %zu is wrong; "
                           "download it again",
                           at);
        bool is_header = memcmp(chunk, "IHDR", 4) == 0;
        if (is_header != (at == sizeof png_signature) || (is_header && length != 13))
            return lt_fail(LT_EDATA,
                           "a PNG must have one header, at its beginning; this one does not");
        if (is_header)
            LT_TRY(check_header(chunk + 4, n));
        else if (memcmp(chunk, "IEND", 4) == 0)
            return LT_OK;
        else if (memcmp(chunk, "IDAT", 4) == 0 && length == 0 && !has_data)
            return lt_fail(LT_EDATA, "the first IDAT chunk of the PNG is empty; save the image "
                                     "again");
        else if (memcmp(chunk, "IDAT", 4) == 0)
            has_data = true;
        else if (memcmp(chunk, "PLTE", 4) == 0 && p[sizeof png_signature + 17] == PALETTE) {
            if (has_palette || length == 0 || length % 3 != 0 || length > 3 * COLOURS)
                return lt_fail(LT_EDATA, "the palette of the PNG is damaged; download it again");
            has_palette = true;
            *palette = length < 3 * COLOURS ? at : 0;
        } else if (!(chunk[0] & 32) && memcmp(chunk, "PLTE", 4) != 0)
            return lt_fail(LT_EDATA,
                           "luatrain does not support the PNG chunk at byte %zu, which is needed "
                           "to decode it",
                           at);
    }
}

/* Returns a copy of a PNG of *n bytes in which the palette at this offset has COLOURS colours; the
 * added ones are black. The decoder does not check that the pixels use only colours that exist.
 * New. NULL with LT_ENOMEM. */
static uint8_t *with_whole_palette(const uint8_t *p, size_t *n, size_t at)
{
    size_t end = at + 8 + read32(p + at), more = at + 8 + 3 * COLOURS - end;
    uint8_t *copy = allocate(*n + more);
    if (!copy)
        return NULL;
    memcpy(copy, p, end);
    memcpy(copy + end + more, p + end, *n - end);
    copy[at + 2] = 3 * COLOURS >> 8;
    copy[at + 3] = 3 * COLOURS & 255;
    *n += more;
    return copy;
}

/* ==== JPEG ==================================================================================== */

/* Standard: ITU-T T.81. */
enum {
    SOF0 = 0xc0,
    SOF2 = 0xc2,
    DHT = 0xc4,
    SOF15 = 0xcf,
    RST0 = 0xd0,
    RST7 = 0xd7,
    SOI = 0xd8,
    EOI = 0xd9,
    SOS = 0xda,
    DQT = 0xdb,
    APP14 = 0xee
};

enum { DC, AC, QUANTIZATION }; /* kinds of tables */

enum { MAX_SCANS = 100, MAX_VISITS = 64 }; /* MAX_VISITS: block visits per byte of the file */

typedef struct jpeg {
    unsigned tables; /* defined so far: bit 4 * kind + number */
    uint64_t height, width;
    int components;                  /* 0 before the frame header */
    uint8_t id[4], quantization[4];  /* per component */
    unsigned across[4], down[4];     /* sampling factors: blocks per minimum coded unit (MCU) */
    unsigned most_across, most_down; /* maxima of these */
    bool progressive;
    unsigned scanned; /* bit i: component i was in a scan */
    int scans;
    uint64_t visits; /* block visits of all scans */
    uint64_t bits;   /* visits that read at least one bit */
    bool adobe;      /* Adobe's segment has a transform that luatrain reads: CMYK or YCCK */
} jpeg;

static lt_status damaged(const char *what)
{
    return lt_fail(LT_EDATA, "the %s of the JPEG is damaged; download it again", what);
}

static lt_status see_frame(jpeg *j, int marker, const uint8_t *p, size_t bytes)
{
    if (marker > SOF2)
        return lt_fail(LT_EDATA, "it is a lossless, hierarchical or arithmetic JPEG; luatrain "
                                 "reads baseline and progressive ones");
    if (j->components || bytes < 6 || bytes != 6 + 3 * (size_t)p[5])
        return damaged("frame header");
    if (p[0] != 8)
        return lt_fail(LT_EDATA,
                       "it is a JPEG with %d bits per colour; luatrain reads those with 8", p[0]);
    if (p[5] != 1 && p[5] != 3 && p[5] != 4)
        return lt_fail(LT_EDATA,
                       "it is a JPEG with %d colours; luatrain reads those with 1, 3 or 4", p[5]);
    j->height = read16(p + 1);
    j->width = read16(p + 3);
    j->components = p[5];
    j->progressive = marker == SOF2;
    for (int i = 0; i < j->components; i++) {
        unsigned across = p[7 + 3 * i] >> 4, down = p[7 + 3 * i] & 15;
        if (across < 1 || across > 4 || down < 1 || down > 4)
            return damaged("frame header");
        j->id[i] = p[6 + 3 * i];
        j->quantization[i] = p[8 + 3 * i] & 3;
        j->across[i] = across;
        j->down[i] = down;
        j->most_across = across > j->most_across ? across : j->most_across;
        j->most_down = down > j->most_down ? down : j->most_down;
    }
    return check_size(j->height, j->width);
}

/* A segment can contain several tables. */
static lt_status see_huffman(jpeg *j, const uint8_t *p, size_t bytes)
{
    while (bytes > 0) {
        size_t codes = 0;
        for (int i = 1; i <= 16 && bytes >= 17; i++)
            codes += p[i];
        if (codes > 256 || bytes < 17 + codes)
            return damaged("Huffman table");
        j->tables |= 1u << (4 * (p[0] >> 4 & 1) + (p[0] & 3));
        p += 17 + codes;
        bytes -= 17 + codes;
    }
    return LT_OK;
}

static lt_status see_quantization(jpeg *j, const uint8_t *p, size_t bytes)
{
    while (bytes > 0) {
        size_t length = p[0] >> 4 ? 129 : 65;
        if (bytes < length)
            return damaged("quantization table");
        j->tables |= 1u << (4 * QUANTIZATION + (p[0] & 3));
        p += length;
        bytes -= length;
    }
    return LT_OK;
}

static uint64_t units(uint64_t pixels, uint64_t unit) { return (pixels + unit - 1) / unit; }

/* The number of blocks of component i in a scan, which contains it alone or with others (T.81,
 * A.2). */
static uint64_t blocks_of(const jpeg *j, int i, bool alone)
{
    if (alone)
        return units(units(j->width * j->across[i], j->most_across), 8) *
               units(units(j->height * j->down[i], j->most_down), 8);
    return units(j->width, 8 * j->most_across) * j->across[i] * units(j->height, 8 * j->most_down) *
           j->down[i];
}

/* Each scan of a progressive JPEG visits all blocks of its components. A block takes at least one
 * bit in a scan that includes its first coefficient. In other scans a few bytes can represent 32767
 * empty blocks. A blank image saved by libjpeg or mozjpeg has up to 22 visits per byte of the file;
 * photographs have up to 2. */
static lt_status check_work(const jpeg *j, size_t n)
{
    if (j->scans > MAX_SCANS)
        return lt_fail(LT_EDATA,
                       "it has more than %d scans; luatrain accepts JPEGs with at most %d",
                       MAX_SCANS, MAX_SCANS);
    LT_TRY(check_bytes(j->height, j->width, j->bits / 8, n));
    if (j->visits / MAX_VISITS > n)
        return lt_fail(LT_EDATA,
                       "its first %d scans visit %llu blocks of 8x8 pixels; luatrain accepts at "
                       "most %d for each of its %zu bytes; save it with fewer scans",
                       j->scans, (unsigned long long)j->visits, MAX_VISITS, n);
    return LT_OK;
}

static lt_status see_scan(jpeg *j, const uint8_t *p, size_t bytes, size_t n)
{
    if (bytes < 1 || p[0] < 1 || p[0] > j->components || bytes != 4 + 2 * (size_t)p[0])
        return damaged("scan header");
    int first = p[bytes - 3], refined = p[bytes - 1] >> 4;
    bool dc = !j->progressive || (first == 0 && refined == 0), ac = !j->progressive || first > 0;
    for (const uint8_t *s = p + 1; s < p + 1 + 2 * p[0]; s += 2) {
        int i = 0;
        while (i < j->components && j->id[i] != s[0])
            i++;
        if (i == j->components)
            return damaged("scan header");
        unsigned wanted = 1u << (4 * QUANTIZATION + j->quantization[i]);
        wanted |= dc ? 1u << (4 * DC + (s[1] >> 4 & 3)) : 0;
        wanted |= ac ? 1u << (4 * AC + (s[1] & 3)) : 0;
        if (wanted & ~j->tables)
            return lt_fail(LT_EDATA, "the JPEG uses a table that it does not define");
        j->scanned |= 1u << i;
        uint64_t blocks = blocks_of(j, i, p[0] == 1);
        j->visits += blocks;
        j->bits += first == 0 ? blocks : 0;
    }
    j->scans++;
    return check_work(j, n);
}

/* Checks the segments: 0xff, a marker, a length and the contents. A scan is followed by its data,
 * in which 0xff is followed by 0 or by a restart marker. */
static lt_status check_jpeg(const uint8_t *p, size_t n)
{
    jpeg j = {0};
    for (size_t at = 2;;) {
        while (n - at >= 2 && (p[at] != 0xff || p[at + 1] == 0xff || p[at + 1] == 0 ||
                               (p[at + 1] >= RST0 && p[at + 1] <= RST7)))
            at++;
        int marker = n - at >= 2 ? p[at + 1] : -1;
        if (marker == EOI)
            break;
        if (n - at < 4 || n - at - 2 < read16(p + at + 2))
            return cut_short("JPEG", "end-of-image marker");
        if (read16(p + at + 2) < 2)
            return damaged("length of a segment");
        const uint8_t *segment = p + at + 4;
        size_t bytes = read16(p + at + 2) - 2;
        if (marker == DHT)
            LT_TRY(see_huffman(&j, segment, bytes));
        else if (marker >= SOF0 && marker <= SOF15)
            LT_TRY(see_frame(&j, marker, segment, bytes));
        else if (marker == DQT)
            LT_TRY(see_quantization(&j, segment, bytes));
        else if (marker == SOS)
            LT_TRY(see_scan(&j, segment, bytes, n));
        else if (marker == APP14 && bytes >= 12 && memcmp(segment, "Adobe", 6) == 0)
            j.adobe = segment[11] == 0 || segment[11] == 2;
        at += 4 + bytes;
    }
    if (j.components == 0 || j.scanned != (1u << j.components) - 1)
        return lt_fail(LT_EDATA, "the JPEG ends before the data of all its colour components");
    if (j.components == 4 && !j.adobe)
        return lt_fail(LT_EDATA,
                       "the JPEG has four colours, but no Adobe segment with transform 0 or 2, "
                       "which would say what they are");
    return LT_OK;
}

/* ==== Any image =============================================================================== */

static lt_status check(const uint8_t *bytes, size_t n, size_t *palette)
{
    const int max = INT_MAX - 3 * COLOURS; /* stb_image counts in int */
    *palette = 0;
    if (n == 0)
        return lt_fail(LT_EDATA, "the file is empty");
    if (n > (size_t)max)
        return lt_fail(LT_EDATA, "the file has %zu bytes; luatrain accepts at most %d", n, max);
    if (n >= 2 && bytes[0] == 0xff && bytes[1] == SOI)
        return check_jpeg(bytes, n);
    if (n >= sizeof png_signature && memcmp(bytes, png_signature, sizeof png_signature) == 0)
        return check_png(bytes, n, palette);
    return lt_fail(LT_EDATA, "the file is neither a JPEG nor a PNG");
}

lt_status lt__image_decode(const char *path, const uint8_t *bytes, size_t n, int channels,
                           lt_sample_buffers *buffers, lt_image *image)
{
    int h, w, c;
    size_t palette;
    uint8_t *whole = NULL;
    if (check(bytes, n, &palette) != LT_OK ||
        (palette > 0 && !(whole = with_whole_palette(bytes, &n, palette))))
        return lt_fail_prefix("%s: cannot decode", LT_SHORT_PATH(path));
    lt_fail(LT_EDATA, "its compressed data are damaged; download it again"); /* default message */
    uint8_t *pixels = stbi_load_from_memory(whole ? whole : bytes, (int)n, &w, &h, &c, channels);
    free(whole);
    if (!pixels)
        return lt_fail_prefix("%s: cannot decode", LT_SHORT_PATH(path));
    free(buffers->decoded.data);
    buffers->decoded = (lt_bytes){pixels, (size_t)h * (size_t)w * (size_t)channels};
    *image = (lt_image){pixels, LT_U8, h, w, channels};
    return LT_OK;
}

lt_tensor *lt_image_read(lt_ctx *ctx, const char *path, int channels)
{
    LT_NEED_CTX(ctx, NULL);
    lt_sample_buffers buffers = {0};
    lt_image image;
    lt_tensor *x = NULL;
    size_t n;
    if (channels != 1 && channels != 3)
        lt_fail(LT_EINVAL, "image: channels must be 1 or 3, but is %d", channels);
    else if (lt__read_file(path, INT_MAX, &buffers.file, &n) == LT_OK &&
             lt__image_decode(path, buffers.file.data, n, channels, &buffers, &image) == LT_OK)
        x = lt_tensor_from(ctx, LT_U8, 3, (int64_t[]){image.h, image.w, image.c}, image.pixels);
    lt__sample_buffers_free(&buffers);
    return x;
}
