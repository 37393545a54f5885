/* test_image.c - JPEG and PNG files: decoded pixels, and every kind of damage.
 *
 * The files in this folder were made with Pillow from the gradient below: 13 rows of 17 pixels.
 * rgb.png is unchanged, alpha.png is half transparent, and the JPEGs have quality 90, baseline.jpg
 * with restart markers. grey16.png has 16 bits, palette.png has five colours. half.jpg, 5 rows of
 * 12 pixels, has half the horizontal colour resolution (4:2:2); its last two columns are blue, the
 * others red.
 */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/source.h"
#include "tests/lt_test.h"

enum { H = 13, W = 17, ROOM = 4096 };

static const char *const files[] = {"baseline.jpg", "progressive.jpg", "grey.jpg",   "cmyk.jpg",
                                    "rgb.png",      "alpha.png",       "grey16.png", "palette.png"};
enum { FILES = sizeof files / sizeof *files, JPEGS = 4 };

static lt_sample_buffers buffers; /* for all tests, like the image that was decoded last */
static lt_image image;

static int gradient(int y, int x, int c)
{
    return c == 0   ? x * 255 / (W - 1)
           : c == 1 ? y * 255 / (H - 1)
                    : 255 - (x + y) * 255 / (W + H - 2);
}

static int luma(int y, int x)
{
    return (77 * gradient(y, x, 0) + 150 * gradient(y, x, 1) + 29 * gradient(y, x, 2)) / 256;
}

typedef struct file {
    uint8_t bytes[ROOM];
    size_t n;
} file;

static file load(const char *name)
{
    file f;
    char path[64];
    snprintf(path, sizeof path, "tests/data/%s", name);
    FILE *in = fopen(path, "rb");
    if (!in)
        FAIL("cannot open %s", path);
    f.n = fread(f.bytes, 1, ROOM, in);
    fclose(in);
    CHECK(f.n > 0 && f.n < ROOM / 2);
    return f;
}

/* Decodes a copy of exactly n bytes, so that ASan detects reads past the end. */
static lt_status decode(const uint8_t *bytes, size_t n, int channels, lt_sample_buffers *own,
                        lt_image *result)
{
    uint8_t *copy = malloc(n > 0 ? n : 1);
    memcpy(copy, bytes, n);
    lt_status status = lt__image_decode("cat/1.jpg", copy, n, channels, own, result);
    free(copy);
    return status;
}

static void check_refused(const file *f, const char *text)
{
    lt_sample_buffers own = {0};
    CHECK_FAILS(decode(f->bytes, f->n, 3, &own, &image), LT_EDATA, text);
    CHECK(strncmp(lt_errmsg(), "cat/1.jpg: cannot decode: ", 26) == 0);
    CHECK(own.decoded.data == NULL);
}

/* The offset of the first occurrence of these n bytes. */
static size_t find(const file *f, const void *what, size_t n)
{
    size_t at = 0;
    while (at + n <= f->n && memcmp(f->bytes + at, what, n) != 0)
        at++;
    CHECK(at + n <= f->n);
    return at;
}

static void put32(uint8_t *p, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(value >> (24 - 8 * i));
}

static size_t find_chunk(const file *f, const char *name) { return find(f, name, 4) - 4; }

/* Corrects the checksum of the PNG chunk at this offset. */
static void fix_checksum(file *f, size_t at)
{
    const uint8_t *p = f->bytes + at;
    uint32_t length = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    put32(f->bytes + at + 8 + length, (uint32_t)crc32(0, p + 4, length + 4));
}

/* ==== Decoding ================================================================================ */

/* Checks the largest and the average difference of a file's pixels from the gradient or its luma.
 */
static void check_near(const char *name, int channels, bool grey, int most, double average)
{
    file f = load(name);
    double sum = 0;
    CHECK_OK(decode(f.bytes, f.n, channels, &buffers, &image));
    CHECK_EQ(image.h, H);
    CHECK_EQ(image.w, W);
    CHECK_EQ(image.c, channels);
    CHECK_EQ(image.dtype, LT_U8);
    const uint8_t *p = image.pixels;
    for (int i = 0; i < H * W * channels; i++) {
        int y = i / channels / W, x = i / channels % W;
        int want = grey ? luma(y, x) : gradient(y, x, i % channels);
        CHECK_NEAR(p[i], want, most);
        sum += abs(p[i] - want);
    }
    CHECK(sum <= average * H * W * channels);
}

TEST(png_is_exact)
{
    check_near("rgb.png", 3, false, 0, 0);
    check_near("alpha.png", 3, false, 0, 0);
    check_near("rgb.png", 1, true, 0, 0);
    check_near("alpha.png", 1, true, 0, 0);
}

TEST(jpeg_is_near) /* the main loss is in the colours, stored at half resolution */
{
    check_near("baseline.jpg", 3, false, 20, 2.5);
    check_near("progressive.jpg", 3, false, 20, 2.5);
    check_near("baseline.jpg", 1, true, 3, 1);
    check_near("grey.jpg", 3, true, 3, 1);
    check_near("grey.jpg", 1, true, 3, 1);
    check_near("cmyk.jpg", 3, false, 3, 1);
    check_near("cmyk.jpg", 1, true, 3, 1);
}

TEST_CTX(palette_and_16_bits)
{
    static const uint8_t colours[5][3] = {
        {255, 0, 0}, {0, 255, 0}, {0, 0, 255}, {10, 20, 30}, {200, 100, 50}};
    lt_tensor *palette = lt_image_read(ctx, "tests/data/palette.png", 3);
    lt_tensor *grey = lt_image_read(ctx, "tests/data/grey16.png", 1);
    CHECK(palette && grey);
    CHECK_EQ(lt_ndim(palette), 3);
    CHECK_EQ(lt_dim(palette, 0), H);
    CHECK_EQ(lt_dim(palette, 1), W);
    CHECK_EQ(lt_dim(palette, 2), 3);
    CHECK_EQ(lt_dim(grey, 2), 1);
    const uint8_t *p = lt_data(palette), *g = lt_data(grey);
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++) {
            CHECK_EQ(memcmp(p + 3 * (y * W + x), colours[(x + y) % 5], 3), 0);
            CHECK_EQ(g[y * W + x], ((x * 4096 + y * 17) & 0xffff) >> 8);
        }
    RELEASE(palette, grey);
}

/* The last columns as Pillow decodes them. */
TEST_CTX(half_of_the_horizontal_colour_resolution)
{
    static const uint8_t want[5][3][3] = {{{212, 38, 125}, {62, 0, 172}, {18, 1, 229}},
                                          {{210, 45, 121}, {74, 23, 186}, {28, 34, 240}},
                                          {{195, 45, 109}, {79, 59, 192}, {27, 71, 240}},
                                          {{185, 51, 102}, {88, 99, 204}, {30, 114, 246}},
                                          {{182, 55, 98}, {92, 129, 210}, {31, 149, 249}}};
    lt_tensor *x = lt_image_read(ctx, "tests/data/half.jpg", 3);
    CHECK(x && lt_dim(x, 0) == 5 && lt_dim(x, 1) == 12);
    const uint8_t *p = lt_data(x);
    for (int y = 0; y < 5; y++)
        for (int i = 0; i < 9; i++)
            CHECK_NEAR(p[(12 * y + 9) * 3 + i], want[y][i / 3][i % 3], 3);
    lt_release(x);
}

/* As in libpng. */
TEST(a_colour_that_the_palette_lacks_is_black)
{
    file f = load("palette.png");
    size_t at = find_chunk(&f, "PLTE"), cut = at + 8 + 9;
    lt_image whole;
    static uint8_t pixels[H * W * 3];
    CHECK_EQ(f.bytes[at + 3], 15);
    CHECK_OK(decode(f.bytes, f.n, 3, &buffers, &whole));
    memcpy(pixels, whole.pixels, sizeof pixels);
    f.bytes[at + 3] = 9; /* three of five colours */
    memmove(f.bytes + cut, f.bytes + cut + 6, f.n - cut - 6);
    f.n -= 6;
    fix_checksum(&f, at);
    CHECK_OK(decode(f.bytes, f.n, 3, &buffers, &image));
    for (int i = 0; i < H * W * 3; i++)
        CHECK_EQ(((const uint8_t *)image.pixels)[i],
                 (i / 3 / W + i / 3 % W) % 5 < 3 ? pixels[i] : 0);
    f.bytes[at + 3] = 8;
    memmove(f.bytes + cut - 1, f.bytes + cut, f.n - cut);
    f.n--;
    fix_checksum(&f, at);
    check_refused(&f, "the palette of the PNG is damaged; download it again");
}

/* ==== Damage ================================================================================== */

TEST(every_truncation_is_an_error)
{
    for (int i = 0; i < FILES; i++) {
        file f = load(files[i]);
        size_t whole = f.n;
        for (f.n = 0; f.n < whole; f.n++)
            check_refused(&f, f.n == 0                    ? "the file is empty"
                              : f.n < (i < JPEGS ? 2 : 8) ? "neither a JPEG nor a PNG"
                                                          : "is cut short: it has no ");
        memset(f.bytes + whole, 0x5a, 7); /* bytes after the end are ignored */
        CHECK_OK(decode(f.bytes, whole + 7, 3, &buffers, &image));
    }
}

TEST(every_flipped_bit_of_a_png_is_an_error)
{
    for (int i = JPEGS; i < FILES; i++) {
        file f = load(files[i]);
        for (size_t bit = 0; bit < 8 * f.n; bit++) {
            f.bytes[bit / 8] ^= 1 << bit % 8;
            check_refused(&f, "");
            f.bytes[bit / 8] ^= 1 << bit % 8;
        }
    }
}

/* A JPEG has no checksum: a flipped bit may change pixels, but nothing else. */
TEST(a_flipped_bit_of_a_jpeg_is_an_error_or_other_pixels)
{
    for (int i = 0; i < JPEGS; i++) {
        file f = load(files[i]);
        for (size_t bit = 0; bit < 8 * f.n; bit++) {
            f.bytes[bit / 8] ^= 1 << bit % 8;
            if (decode(f.bytes, f.n, 3, &buffers, &image) == LT_OK)
                CHECK(image.h > 0 && image.w > 0 && image.c == 3);
            else
                CHECK_EQ(lt_errcode(), LT_EDATA);
            f.bytes[bit / 8] ^= 1 << bit % 8;
        }
    }
}

TEST(a_small_file_cannot_cause_a_large_allocation)
{
    static const struct {
        unsigned h, w;
        const char *text;
    } cases[] = {{8001, 8000, "it has 8001x8000 pixels (height x width); luatrain accepts"},
                 {8000, 8000, "its header declares 8000x8000 pixels (height x width), more than "},
                 {65535, 65535, "it has 65535x65535 pixels (height x width); luatrain accepts"},
                 {13, 0, "its header declares 13x0 pixels"},
                 {0, 17, "its header declares 0x17 pixels"}};
    file jpeg = load("baseline.jpg"), png = load("rgb.png");
    uint8_t *frame = jpeg.bytes + find(&jpeg, "\xff\xc0", 2), *header = png.bytes + 16;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put32(frame + 5, (uint32_t)cases[i].h << 16 | cases[i].w);
        check_refused(&jpeg, cases[i].text);
        put32(header, cases[i].w);
        put32(header + 4, cases[i].h);
        fix_checksum(&png, 8);
        check_refused(&png, cases[i].text);
    }
    memset(header, 255, 8);
    fix_checksum(&png, 8);
    check_refused(&png, "it has 4294967295x4294967295 pixels");
}

/* A file of n bytes can hold at most 1032 n bytes of rows. The bytes per pixel vary widely. */
TEST(the_rows_of_a_png_are_limited_by_its_size)
{
    static const struct {
        unsigned h, w;
        uint8_t bits, type;
        const char *text; /* NULL: the size is possible */
    } cases[] = {
        {8000, 8000, 16, 6,
         "its 8000x8000 pixels (height x width) are 512008000 bytes; luatrain accepts PNGs of at "
         "most 268435456"},
        {64000000, 1, 16, 6, "are 576000000 bytes; luatrain accepts"},
        {100, 1500, 16, 6, "its header declares 100x1500 pixels (height x width), more than "},
        {100, 1500, 1, 0, NULL},
        {1, 1200000, 16, 2, "its header declares 1x1200000 pixels"},
        {1, 1200000, 1, 3, NULL},
        {1200000, 1, 1, 0, "its header declares 1200000x1 pixels"}, /* each row has a filter byte */
        {8, 8, 8, 1, "the header of the PNG is damaged; download it again"},
        {8, 8, 8, 7, "the header of the PNG is damaged; download it again"},
        {8, 8, 3, 0, "the header of the PNG is damaged; download it again"},
        {8, 8, 4, 2, "the header of the PNG is damaged; download it again"},
        {8, 8, 16, 3, "the header of the PNG is damaged; download it again"},
        {8, 8, 1, 4, "the header of the PNG is damaged; download it again"},
        {8, 8, 2, 6, "the header of the PNG is damaged; download it again"},
        {8, 8, 32, 0, "the header of the PNG is damaged; download it again"},
    };
    file png = load("rgb.png");
    CHECK(1200000 / 1032 > png.n && 1200000 / 8 / 1032 < png.n); /* else adapt the cases */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put32(png.bytes + 16, cases[i].w);
        put32(png.bytes + 20, cases[i].h);
        png.bytes[24] = cases[i].bits;
        png.bytes[25] = cases[i].type;
        fix_checksum(&png, 8);
        check_refused(&png, cases[i].text ? cases[i].text : "its compressed data are damaged");
    }
}

TEST(unsupported_jpegs_are_refused)
{
    file f = load("baseline.jpg");
    size_t frame = find(&f, "\xff\xc0", 2);
    f.bytes[frame + 1] = 0xc9;
    check_refused(&f, "it is a lossless, hierarchical or arithmetic JPEG; luatrain reads baseline");
    f.bytes[frame + 1] = 0xc0;
    f.bytes[frame + 4] = 12;
    check_refused(&f, "it is a JPEG with 12 bits per colour; luatrain reads those with 8");
    f = load("baseline.jpg");
    f.bytes[frame + 3] = 14; /* two components; the third is treated as padding */
    f.bytes[frame + 9] = 2;
    check_refused(&f, "it is a JPEG with 2 colours; luatrain reads those with 1, 3 or 4");
    f = load("cmyk.jpg");
    f.bytes[find(&f, "Adobe", 5)] = 'a';
    check_refused(&f, "the JPEG has four colours, but no Adobe segment with transform 0 or 2");
}

/* Overwrites bytes of a JPEG, at an offset from the first occurrence of a marker. */
static void check_jpeg_with(const char *marker, size_t offset, const char *bytes, size_t n,
                            const char *text)
{
    file f = load("baseline.jpg");
    memcpy(f.bytes + find(&f, marker, 2) + offset, bytes, n);
    check_refused(&f, text);
}

static void insert(file *f, size_t at, const uint8_t *bytes, size_t n)
{
    CHECK(f->n + n <= ROOM);
    memmove(f->bytes + at + n, f->bytes + at, f->n - at);
    memcpy(f->bytes + at, bytes, n);
    f->n += n;
}

/* Inserts copies of a scan before the end. The decoder reads missing data as zeros. */
static void insert_scans(file *f, const uint8_t *scan, size_t bytes, int count)
{
    for (int i = 0; i < count; i++)
        insert(f, f->n - 2, scan, bytes);
}

TEST(a_jpeg_has_at_most_100_scans)
{
    static const uint8_t refine_dc[] = {0xff, 0xda, 0, 12, 3, 1, 0, 2, 0, 3, 0, 0, 0, 0x10};
    file f = load("progressive.jpg"); /* has 10 */
    lt_sample_buffers more = {0};
    lt_image same;
    CHECK_OK(decode(f.bytes, f.n, 3, &buffers, &image));
    insert_scans(&f, refine_dc, sizeof refine_dc, 90);
    CHECK_OK(decode(f.bytes, f.n, 3, &more, &same));
    CHECK_EQ(memcmp(image.pixels, same.pixels, H * W * 3), 0);
    insert_scans(&f, refine_dc, sizeof refine_dc, 1);
    check_refused(&f, "it has more than 100 scans; luatrain accepts JPEGs with at most 100");
    free(more.decoded.data);
}

/* Such a scan takes 12 bytes in the file, but the decoder visits all blocks of a colour for it. */
TEST(the_scans_of_a_jpeg_are_limited_by_its_size)
{
    static const uint8_t refine_ac[] = {0xff, 0xda, 0, 8, 1, 1, 0, 1, 63, 0x10, 0, 0};
    file f = load("progressive.jpg");
    size_t frame = find(&f, "\xff\xc2", 2);
    insert_scans(&f, refine_ac, sizeof refine_ac, 90);
    CHECK_OK(decode(f.bytes, f.n, 3, &buffers, &image));
    put32(f.bytes + frame + 5, 480 << 16 | 512);
    check_refused(&f, "its first 31 scans visit 111360 blocks of 8x8 pixels; luatrain accepts at "
                      "most 64 for each of its 1688 bytes; save it with fewer scans");
}

/* There are 1.5 blocks per 8x8 pixels, and each block takes at least one bit in its first scan. */
TEST(the_blocks_of_a_jpeg_are_limited_by_its_size)
{
    file f = load("baseline.jpg");
    put32(f.bytes + find(&f, "\xff\xc0", 2) + 5, 512 << 16 | 640);
    CHECK(512 / 8 * 640 / 8 * 3 / 2 / 8 > f.n); /* else choose a larger size */
    check_refused(&f, "its header declares 512x640 pixels (height x width), more than ");
}

TEST(a_jpeg_has_one_frame_and_valid_tables)
{
    enum { CODES = 2 * 255 };
    uint8_t table[4 + 17 + CODES] = {0xff, 0xc4, (19 + CODES) >> 8, (19 + CODES) & 255, 3};
    file f = load("baseline.jpg"), huge = f;
    size_t frame = find(&f, "\xff\xc0", 2), scan = find(&f, "\xff\xda", 2);
    insert(&f, scan, f.bytes + frame, 19);
    check_refused(&f, "the frame header of the JPEG is damaged");
    table[4 + 15] = table[4 + 16] = 255; /* codes of 15 and of 16 bits */
    insert(&huge, scan, table, sizeof table);
    check_refused(&huge, "the Huffman table of the JPEG is damaged");
}

TEST(a_jpeg_defines_all_that_it_uses)
{
    check_jpeg_with("\xff\xc4", 0, "\xff\xfe", 2, "uses a table that it does not define");
    check_jpeg_with("\xff\xdb", 0, "\xff\xfe", 2, "uses a table that it does not define");
    check_jpeg_with("\xff\xda", 0, "\xff\xfe", 2,
                    "ends before the data of all its colour components");
    check_jpeg_with("\xff\xc0", 0, "\xff\xfe", 2, "the scan header of the JPEG is damaged");
    check_jpeg_with("\xff\xda", 4, "\x02", 1, "the scan header of the JPEG is damaged");
    check_jpeg_with("\xff\xda", 5, "\x09", 1, "the scan header of the JPEG is damaged");
    check_jpeg_with("\xff\xc4", 0, "\xff\xc0", 2, "the frame header of the JPEG is damaged");
    check_jpeg_with("\xff\xc0", 11, "\x02", 1, "the frame header of the JPEG is damaged");
    check_jpeg_with("\xff\xc0", 11, "\x25", 1, "the frame header of the JPEG is damaged");
    check_jpeg_with("\xff\xc4", 2, "\0\1", 2, "the length of a segment of the JPEG is damaged");
    check_jpeg_with("\xff\xdb", 4, "\x10", 1, "the quantization table of the JPEG is damaged");
    check_jpeg_with("\xff\xc4", 5, "\xff\xff", 2, "the Huffman table of the JPEG is damaged");
    check_jpeg_with("\xff\xc4", 5, "\x80", 1, "the Huffman table of the JPEG is damaged");
}

TEST(a_png_has_known_chunks_in_order)
{
    file f = load("rgb.png");
    size_t data = find_chunk(&f, "IDAT"), end = find_chunk(&f, "IEND");
    f.bytes[data + 30] ^= 1;
    check_refused(&f, "the checksum of the PNG chunk at byte 33 is wrong; download it again");
    memset(f.bytes + data + 10, 0xff, 20);
    fix_checksum(&f, data);
    check_refused(&f, "its compressed data are damaged; download it again");
    memcpy(f.bytes + data + 4, "ODAT", 4);
    fix_checksum(&f, data);
    check_refused(&f, "luatrain does not support the PNG chunk at byte 33, which is needed");
    memcpy(f.bytes + data + 4, "IHDR", 4);
    fix_checksum(&f, data);
    check_refused(&f, "a PNG must have one header, at its beginning; this one does not");
    memcpy(f.bytes + 12, "CgBI", 4);
    fix_checksum(&f, 8);
    check_refused(&f, "a PNG must have one header, at its beginning; this one does not");
    f = load("rgb.png");
    put32(f.bytes + 8, 0);
    fix_checksum(&f, 8);
    f.n = 8 + 12;
    check_refused(&f, "a PNG must have one header, at its beginning; this one does not");
    f = load("rgb.png");
    memmove(f.bytes + data, f.bytes + end, f.n - end); /* no data at all */
    f.n -= end - data;
    check_refused(&f, "its compressed data are damaged; download it again");
}

/* The decoder would call memcpy with NULL and 0 bytes, which is undefined in C. */
TEST(an_empty_first_data_chunk_is_refused)
{
    static const uint8_t empty[12] = {0, 0, 0, 0, 'I', 'D', 'A', 'T'};
    file f = load("rgb.png"), later = f;
    size_t data = find_chunk(&f, "IDAT");
    insert(&f, data, empty, sizeof empty);
    fix_checksum(&f, data);
    check_refused(&f, "the first IDAT chunk of the PNG is empty; save the image again");
    data = find_chunk(&later, "IEND");
    insert(&later, data, empty, sizeof empty);
    fix_checksum(&later, data);
    CHECK_OK(decode(later.bytes, later.n, 3, &buffers, &image));
}

/* ==== Files =================================================================================== */

TEST_CTX(a_path_that_is_not_an_image_file_is_an_error)
{
    char pipe[] = "/tmp/luatrain-image-XXXXXX";
    CHECK(lt_image_read(ctx, "/nowhere/cat.jpg", 3) == NULL);
    CHECK_EQ(lt_errcode(), LT_EDATA);
    CHECK_STR(lt_errmsg(), "cannot open /nowhere/cat.jpg: No such file or directory");
    CHECK(lt_image_read(ctx, "/", 3) == NULL);
    CHECK_STR(lt_errmsg(), "/ is not a regular file");
    CHECK(lt_image_read(ctx, "/dev/zero", 3) == NULL);
    CHECK_STR(lt_errmsg(), "/dev/zero is not a regular file");
    close(mkstemp(pipe));
    unlink(pipe);
    CHECK_EQ(mkfifo(pipe, 0600), 0);
    CHECK(lt_image_read(ctx, pipe, 3) == NULL);
    unlink(pipe);
    CHECK_MSG("is not a regular file");
    CHECK_EQ(lt_errcode(), LT_EDATA);
    CHECK(lt_image_read(ctx, "tests/data/test_image.c", 3) == NULL);
    CHECK_STR(lt_errmsg(),
              "tests/data/test_image.c: cannot decode: the file is neither a JPEG nor a PNG");
    CHECK(lt_image_read(ctx, "tests/data/rgb.png", 2) == NULL);
    CHECK_EQ(lt_errcode(), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "image: channels must be 1 or 3, but is 2");
}

TEST(the_file_size_has_a_limit)
{
    lt_bytes buffer = {0};
    size_t n, size = load("rgb.png").n;
    char text[128];
    CHECK_OK(lt__read_file("tests/data/rgb.png", size, &buffer, &n));
    CHECK_EQ(n, size);
    CHECK_EQ(memcmp(buffer.data, load("rgb.png").bytes, n), 0);
    snprintf(text, sizeof text, "tests/data/rgb.png has %zu bytes; luatrain accepts at most %zu",
             size, size - 1);
    CHECK_FAILS(lt__read_file("tests/data/rgb.png", size - 1, &buffer, &n), LT_EDATA, text);
    free(buffer.data);
}

TEST(running_out_of_memory_is_an_error)
{
    lt_tensor *x = NULL;
    for (int n = 1; !x; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "alloc:n=%d", n);
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.fault = fault});
        x = lt_image_read(ctx, "tests/data/rgb.png", 3);
        if (!x)
            CHECK_EQ(lt_errcode(), LT_ENOMEM);
        CHECK(n < 10);
        lt_release(x);
        CLOSE_CTX(ctx);
    }
}
