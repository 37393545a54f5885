/* files.h - shared by the tests of tensor files: a temporary folder, and files written byte by
 * byte. */
#ifndef LT_TESTS_FILES_H
#define LT_TESTS_FILES_H

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/tensor.h"
#include "tests/lt_test.h"

static char folder[64];

/* The path of a file with this name in a temporary folder, which is removed at exit. */
static inline const char *in_folder(const char *name)
{
    static char path[4][128];
    static int next;
    if (!folder[0]) {
        const char *memory = "/dev/shm"; /* rewriting a file a thousand times is cheap here */
        snprintf(folder, sizeof folder, "%s/lt_test_file.XXXXXX",
                 access(memory, W_OK) == 0 ? memory : "/tmp");
        CHECK(mkdtemp(folder) != NULL);
    }
    char *here = path[next++ % 4];
    snprintf(here, sizeof *path, "%s/%s", folder, name);
    return here;
}

__attribute__((destructor)) static void remove_folder(void)
{
    char path[512];
    struct dirent *entry;
    DIR *dir = folder[0] ? opendir(folder) : NULL;
    while (dir && (entry = readdir(dir)))
        if (entry->d_name[0] != '.') {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            remove(path);
        }
    if (dir)
        closedir(dir);
    rmdir(folder);
}

static inline void spit(const char *path, const void *bytes, size_t n)
{
    FILE *out = fopen(path, "wb");
    CHECK(out != NULL);
    CHECK_EQ(fwrite(bytes, 1, n, out), n);
    fclose(out);
}

static inline size_t slurp(const char *path, void *bytes, size_t most)
{
    FILE *in = fopen(path, "rb");
    CHECK(in != NULL);
    size_t n = fread(bytes, 1, most, in);
    fclose(in);
    return n;
}

/* Writes a file with this header and n zero bytes of data. */
static inline const char *file_of(const char *header, size_t n)
{
    static char bytes[70000];
    const char *path = in_folder("given.safetensors");
    uint64_t length = strlen(header);
    CHECK(8 + length + n <= sizeof bytes);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    memset(bytes + 8 + length, 0, n);
    spit(path, bytes, 8 + length + n);
    return path;
}

static inline lt_ctx *context(void)
{
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.threads = 1, .poison = true});
    CHECK(ctx != NULL);
    return ctx;
}

#define TEST_FILES(title) TEST_WITH(title, lt_ctx *ctx, context(), CLOSE_CTX)

static inline void refuse(lt_ctx *ctx, const char *path, lt_status code, const char *text)
{
    size_t live = lt_memory_stats(ctx).live;
    CHECK(lt_file_open(ctx, path) == NULL);
    CHECK_EQ(lt_errcode(), code);
    CHECK_MSG(text);
    CHECK_EQ(lt_memory_stats(ctx).live, live);
}

/* A tensor whose bytes follow a pattern that depends on the dtype. */
static inline lt_tensor *counting(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims)
{
    lt_tensor *x = lt_tensor_new(ctx, dtype, ndim, dims);
    CHECK(x != NULL);
    uint8_t *bytes = lt_data(x);
    for (size_t i = 0; i < (size_t)lt_count(x) * lt_dtype_bytes(dtype); i++)
        bytes[i] = (uint8_t)(i * 7 + (size_t)dtype);
    return x;
}

/* Saves three tensors to a file and reads its bytes. Returns their number. */
static inline size_t small_file(lt_ctx *ctx, char *bytes, size_t most)
{
    const char *names[] = {"conv.w", "conv.b", "n"}, *meta[] = {"step", "17"};
    lt_tensor *x[] = {counting(ctx, LT_F32, 2, (int64_t[]){2, 3}),
                      counting(ctx, LT_BF16, 1, (int64_t[]){2}), counting(ctx, LT_I64, 0, NULL)};
    const char *path = in_folder("small.safetensors");
    CHECK_OK(lt_file_save(path, 3, names, x, 1, meta));
    for (int i = 0; i < 3; i++)
        lt_release(x[i]);
    return slurp(path, bytes, most);
}

/* Saves x alone, with one metadata entry. */
static inline lt_status save_small(const char *path, lt_tensor *x)
{
    const char *name = "x", *meta[] = {"k", "v"};
    return lt_file_save(path, 1, &name, &x, 1, meta);
}

#endif
