/* test_idx.c - IDX files: each element type, gzip, and every kind of damage to a small file. */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/data.h"
#include "tests/lt_test.h"

static char path[] = "/tmp/luatrain-idx-XXXXXX";

__attribute__((constructor)) static void make_path(void) { close(mkstemp(path)); }
__attribute__((destructor)) static void remove_path(void) { unlink(path); }

static void write_plain(const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(data, 1, bytes, file) == bytes);
    CHECK_EQ(fclose(file), 0);
}

static void write_gzip(const void *data, size_t bytes)
{
    gzFile file = gzopen(path, "wb9");
    CHECK(file && gzwrite(file, data, (unsigned)bytes) == (int)bytes);
    CHECK_EQ(gzclose(file), Z_OK);
}

static size_t read_back(unsigned char *data, size_t capacity)
{
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    size_t n = fread(data, 1, capacity, file);
    fclose(file);
    return n;
}

/* 2 images of 2x3, bytes 1 to 12 */
static const unsigned char images[] = {0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2,  0,  0,
                                       0, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

static void check_images(lt_tensor *x)
{
    CHECK(x != NULL);
    CHECK_EQ(lt_tensor_dtype(x), LT_U8);
    CHECK_EQ(lt_ndim(x), 3);
    CHECK_EQ(lt_dim(x, 0), 2);
    CHECK_EQ(lt_dim(x, 1), 2);
    CHECK_EQ(lt_dim(x, 2), 3);
    CHECK_EQ(memcmp(lt_data(x), images + 16, 12), 0);
}

static void check_refused(lt_ctx *ctx, const char *text)
{
    CHECK_NULL(lt_idx_read(ctx, path), LT_EDATA, text);
    CHECK_MSG(path);
    CHECK_EQ(lt_memory_stats(ctx).allocations, 0);
}

TEST_CTX(reads_plain_and_gzip)
{
    write_plain(images, sizeof images);
    lt_tensor *x = lt_idx_read(ctx, path);
    check_images(x);
    lt_release(x);
    write_gzip(images, sizeof images);
    x = lt_idx_read(ctx, path);
    check_images(x);
    lt_release(x);
}

TEST_CTX(numbers_are_big_endian)
{
    static const struct {
        unsigned char bytes[24];
        size_t n;
        lt_dtype dtype;
        double a, b;
    } cases[] = {
        {{0, 0, 0x0c, 1, 0, 0, 0, 2, 0, 1, 2, 3, 0xff, 0xff, 0xff, 0xfe}, 16, LT_I32, 66051, -2},
        {{0, 0, 0x0d, 1, 0, 0, 0, 2, 0x3f, 0xc0, 0, 0, 0xc0, 0, 0, 0}, 16, LT_F32, 1.5, -2},
        {{0, 0, 0x0e, 1, 0, 0, 0, 2, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0xc0}, 24, LT_F64, 1.5, -2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double a, b;
        write_plain(cases[i].bytes, cases[i].n);
        lt_tensor *x = lt_idx_read(ctx, path);
        CHECK(x != NULL);
        CHECK_EQ(lt_tensor_dtype(x), cases[i].dtype);
        CHECK_OK(lt_item(x, 0, &a));
        CHECK_OK(lt_item(x, 1, &b));
        CHECK_NEAR(a, cases[i].a, 0);
        CHECK_NEAR(b, cases[i].b, 0);
        lt_release(x);
    }
}

TEST_CTX(other_element_types_are_refused)
{
    write_plain((unsigned char[]){0, 0, 0x0b, 1, 0, 0, 0, 1, 0, 7}, 10);
    check_refused(ctx, "has elements of IDX type 0x0b; luatrain reads 0x08 (u8), 0x0c (i32)");
}

TEST_CTX(every_truncation_is_an_error)
{
    unsigned char packed[256];
    for (size_t n = 0; n < sizeof images; n++) {
        write_plain(images, n);
        check_refused(ctx, n < 4    ? "is not an IDX file"
                           : n < 16 ? "ends inside its header"
                                    : "is cut short");
    }
    write_gzip(images, sizeof images);
    size_t size = read_back(packed, sizeof packed);
    for (size_t n = 0; n < size; n++) {
        write_plain(packed, n);
        check_refused(ctx,
                      n < 2 ? "is not an IDX file" : ": unexpected end of file; download it again");
    }
}

TEST_CTX(every_flipped_bit_is_an_error_or_other_values)
{
    for (size_t bit = 0; bit < 8 * sizeof images; bit++) {
        unsigned char damaged[sizeof images];
        memcpy(damaged, images, sizeof images);
        damaged[bit / 8] ^= 1 << bit % 8;
        write_plain(damaged, sizeof damaged);
        lt_tensor *x = lt_idx_read(ctx, path);
        if (x)
            CHECK_EQ(lt_count(x) * (int64_t)lt_dtype_bytes(lt_tensor_dtype(x)), 12);
        else
            CHECK_EQ(lt_errcode(), LT_EDATA);
        CHECK(x || bit < 8 * 16); /* the data have no checksum */
        lt_release(x);
    }
    CHECK(lt_memory_stats(ctx).peak < 4096);
}

/* gzip has a checksum, so a file that can be read has the original content. */
TEST_CTX(every_flipped_bit_of_gzip_is_an_error_or_harmless)
{
    unsigned char packed[256];
    write_gzip(images, sizeof images);
    size_t size = read_back(packed, sizeof packed);
    for (size_t bit = 0; bit < 8 * size; bit++) {
        packed[bit / 8] ^= 1 << bit % 8;
        write_plain(packed, size);
        packed[bit / 8] ^= 1 << bit % 8;
        lt_tensor *x = lt_idx_read(ctx, path);
        if (x)
            check_images(x);
        else
            CHECK_EQ(lt_errcode(), LT_EDATA);
        lt_release(x);
    }
    CHECK(lt_memory_stats(ctx).peak < 4096);
}

TEST_CTX(a_small_file_cannot_cause_a_large_allocation)
{
    unsigned char huge[] = {0, 0, 14, 2, 0, 15, 255, 255, 0, 15, 255, 255, 1, 2, 3};
    unsigned char endless[4 + 4 * 8] = {0, 0, 14, 8};
    memset(endless + 4, 255, sizeof endless - 4);
    write_gzip(huge, sizeof huge);
    check_refused(ctx,
                  "is cut short: its header declares 8796076245000 bytes of data, but it has 3");
    write_gzip(endless, sizeof endless);
    check_refused(ctx, "declares more elements than any file can contain");
}

TEST_CTX(trailing_data_are_an_error)
{
    unsigned char longer[sizeof images + 1];
    memcpy(longer, images, sizeof images);
    longer[sizeof images] = 0;
    write_plain(longer, sizeof longer);
    check_refused(ctx, "has more data than the 12 bytes that its header declares");
    write_gzip(longer, sizeof longer);
    check_refused(ctx, "has more data than the 12 bytes that its header declares");
}

TEST_CTX(dims_have_limits)
{
    write_plain((unsigned char[]){0, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 0}, 12);
    check_refused(ctx, "is empty: axis 2 has 0 elements");
    write_plain((unsigned char[]){0, 0, 8, 0, 7}, 5);
    check_refused(ctx, "has 0 dims; luatrain reads 1 to 8");
    write_plain((unsigned char[]){0, 0, 8, 9, 7}, 5);
    check_refused(ctx, "has 9 dims; luatrain reads 1 to 8");
}

TEST_CTX(a_path_that_is_not_a_regular_file_is_named)
{
    CHECK(lt_idx_read(ctx, "/nowhere/train-images") == NULL);
    CHECK_EQ(lt_errcode(), LT_EDATA);
    CHECK_STR(lt_errmsg(), "cannot open /nowhere/train-images: No such file or directory");
    CHECK(lt_idx_read(ctx, "/") == NULL);
    CHECK_EQ(lt_errcode(), LT_EDATA);
    CHECK_STR(lt_errmsg(), "/ is not a regular file");
    unlink(path);
    CHECK_EQ(mkfifo(path, 0600), 0);
    alarm(10); /* kills the test if the library blocks on the FIFO */
    check_refused(ctx, "is not a regular file");
    alarm(0);
    unlink(path);
}

TEST(running_out_of_memory_is_an_error)
{
    write_gzip(images, sizeof images);
    lt_tensor *x = NULL;
    for (int n = 1; !x; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "alloc:n=%d", n);
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.fault = fault});
        x = lt_idx_read(ctx, path);
        if (!x)
            CHECK_EQ(lt_errcode(), LT_ENOMEM);
        CHECK(n < 10);
        lt_release(x);
        CLOSE_CTX(ctx);
    }
}

TEST_CTX(reads_fashion_mnist)
{
    static const char folder[] = "/usr/share/datasets/fashion-mnist/";
    char file[128];
    int64_t of_class[10] = {0};
    snprintf(file, sizeof file, "%strain-images-idx3-ubyte.gz", folder);
    if (access(file, R_OK) != 0)
        SKIP("Fashion-MNIST (the package dataset-fashion-mnist is not installed)");
    lt_tensor *x = lt_idx_read(ctx, file);
    CHECK(x != NULL);
    CHECK_EQ(lt_dim(x, 0), 60000);
    CHECK_EQ(lt_dim(x, 1), 28);
    CHECK_EQ(lt_dim(x, 2), 28);
    snprintf(file, sizeof file, "%strain-labels-idx1-ubyte.gz", folder);
    lt_tensor *labels = lt_idx_read(ctx, file);
    CHECK(labels != NULL);
    CHECK_EQ(lt_count(labels), 60000);
    const uint8_t *label = lt_data(labels);
    for (int i = 0; i < 60000; i++) {
        CHECK(label[i] < 10);
        of_class[label[i]]++;
    }
    for (int c = 0; c < 10; c++)
        CHECK_EQ(of_class[c], 6000);
    RELEASE(labels, x);
}
