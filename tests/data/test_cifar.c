/* test_cifar.c - the binary files of CIFAR-10. */
#include <stdlib.h>
#include <unistd.h>

#include "data/data.h"
#include "tests/lt_test.h"

enum { RECORD = 3073 };

static char path[] = "/tmp/luatrain-cifar-XXXXXX", other[] = "/tmp/luatrain-cifar-XXXXXX";
static const char *const paths[] = {path, other};

__attribute__((constructor)) static void make_paths(void)
{
    close(mkstemp(path));
    close(mkstemp(other));
}
__attribute__((destructor)) static void remove_paths(void)
{
    unlink(path);
    unlink(other);
}

/* Byte i of the pixels of record r, in the file's order. */
static int sample(int r, int i) { return (i * 7 + r * 31 + i / 256) % 256; }

/* Writes records [first, first + n), labelled first % 10 and so on, truncated to `bytes` bytes. */
static void write_records(const char *to, int first, int n, size_t bytes)
{
    FILE *f = fopen(to, "wb");
    CHECK(f != NULL);
    for (size_t i = 0; i < bytes && i < (size_t)n * RECORD; i++) {
        int r = first + (int)i / RECORD, at = (int)i % RECORD;
        fputc(at == 0 ? r % 10 : sample(r, at - 1), f);
    }
    CHECK_EQ(fclose(f), 0);
}

static void check_refused(int n, const char *text)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *x, *y;
    CHECK_FAILS(lt_cifar10_read(ctx, n, paths, &x, &y), LT_EDATA, text);
    CHECK(x == NULL && y == NULL);
    CHECK_EQ(lt_memory_stats(ctx).allocations, 0);
    lt_ctx_free(ctx);
}

TEST_CTX(planes_become_pixels)
{
    lt_tensor *x, *y;
    write_records(path, 0, 3, SIZE_MAX);
    write_records(other, 3, 2, SIZE_MAX);
    CHECK_OK(lt_cifar10_read(ctx, 2, paths, &x, &y));
    CHECK_EQ(lt_tensor_dtype(x), LT_U8);
    CHECK_EQ(lt_tensor_dtype(y), LT_U8);
    CHECK_EQ(lt_ndim(x), 4);
    CHECK_EQ(lt_dim(x, 0), 5);
    CHECK_EQ(lt_dim(x, 1), 32);
    CHECK_EQ(lt_dim(x, 2), 32);
    CHECK_EQ(lt_dim(x, 3), 3);
    CHECK_EQ(lt_ndim(y), 1);
    CHECK_EQ(lt_dim(y, 0), 5);
    const uint8_t *pixels = lt_data(x), *labels = lt_data(y);
    for (int r = 0; r < 5; r++) {
        CHECK_EQ(labels[r], r);
        for (int i = 0; i < 1024; i++)
            for (int c = 0; c < 3; c++)
                CHECK_EQ(*pixels++, sample(r, c * 1024 + i));
    }
    RELEASE(x, y);
}

TEST(a_truncated_file_is_an_error)
{
    static const size_t cuts[] = {0, 1, RECORD - 1, RECORD + 1, 2 * RECORD - 1};
    char text[256];
    write_records(other, 0, 1, SIZE_MAX);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        write_records(path, 0, 2, cuts[i]);
        snprintf(text, sizeof text,
                 "%s is not a CIFAR-10 file or is cut short: its %zu bytes are not a multiple of "
                 "3073, the length of a record; download it again",
                 path, cuts[i]);
        check_refused(2, text);
    }
}

TEST(a_label_out_of_range_is_an_error)
{
    char text[128];
    write_records(path, 0, 4, SIZE_MAX);
    write_records(other, 0, 4, SIZE_MAX);
    FILE *f = fopen(other, "r+b");
    CHECK(f && fseek(f, 2 * RECORD, SEEK_SET) == 0 && fputc(10, f) == 10 && fclose(f) == 0);
    snprintf(text, sizeof text, "%s: record 3 has label 10, but CIFAR-10 has labels 0 to 9", other);
    check_refused(2, text);
}

TEST_CTX(a_missing_file_or_a_folder_is_named_in_the_message)
{
    lt_tensor *x, *y;
    CHECK_FAILS(lt_cifar10_read(ctx, 1, (const char *[]){"/nowhere/a.bin"}, &x, &y), LT_EDATA,
                "cannot open /nowhere/a.bin: No such file or directory");
    CHECK_FAILS(lt_cifar10_read(ctx, 1, (const char *[]){"/"}, &x, &y), LT_EDATA,
                "/ is not a regular file");
}

TEST(running_out_of_memory_is_an_error)
{
    write_records(path, 0, 2, SIZE_MAX);
    lt_status status = LT_ENOMEM;
    for (int n = 1; status != LT_OK; n++) {
        char fault[32];
        lt_tensor *x, *y;
        snprintf(fault, sizeof fault, "alloc:n=%d", n);
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.fault = fault});
        status = lt_cifar10_read(ctx, 1, paths, &x, &y);
        CHECK(status == LT_OK || (status == LT_ENOMEM && !x && !y));
        CHECK(n < 10);
        RELEASE(x, y);
        CLOSE_CTX(ctx);
    }
}
