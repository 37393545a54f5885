/* fuzz_file.c - reads tensor files of arbitrary bytes. Either opening fails with LT_EFILE, or all
 * tensors can be read, and are the same after saving and reading them again. Memory use is
 * proportional to the size of the file.
 *
 * Byte 0 selects the meaning of the others: the whole file, or a recipe for one. In a recipe, a
 * byte below 0x80 stands for itself, one below 0xc0 for a part of a header, and any other starts an
 * entry of a valid tensor. Without such entries the fuzzer would hardly get past the JSON parser.
 * Byte 1 may add data, so that the sizes no longer match.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/core.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Writes the entry of a tensor whose data begin at *offset, or one byte off, depending on the upper
 * bits of form. */
static char *put_entry(char *end, int letter, int form, int *offset)
{
    static const struct {
        const char *name;
        int bytes;
    } dtypes[] = {{"F32", 4}, {"F64", 8}, {"F16", 2}, {"BF16", 2},
                  {"I64", 8}, {"I32", 4}, {"U8", 1},  {"BOOL", 1}};
    static const struct {
        const char *dims;
        int count;
    } shapes[] = {{"", 1},    {"0", 0},   {"3", 3},    {"2,2", 4}, {"1,1,1,1,1,1,1,5", 5},
                  {"4,0", 0}, {"1,7", 7}, {"2,1,2", 4}};
    int first = *offset + (form >> 6 == 2);
    *offset += shapes[form / 8 % 8].count * dtypes[form % 8].bytes + (form >> 6 == 3);
    return end + sprintf(end, "%s\"%c\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%d,%d]}",
                         end[-1] == '{' ? "" : ",", letter, dtypes[form % 8].name,
                         shapes[form / 8 % 8].dims, first, *offset);
}

static size_t make_file(const uint8_t *data, size_t size, char *file)
{
    static const char *const pieces[] = {"\"__metadata__\":{",
                                         "\"k\":\"v\"",
                                         "\"k\\u00e9\":\"\"",
                                         "},",
                                         "},\"__metadata__\":{}",
                                         "[",
                                         "]",
                                         "1,",
                                         "\"a\":",
                                         "\"dtype\":\"F32\"",
                                         "\"shape\":[2]",
                                         "\"data_offsets\":[0,8]",
                                         "\\u0000",
                                         "é",
                                         "\"\\ud834\\udd1e\":",
                                         ","};
    if (size < 2 || data[0] & 1) {
        memcpy(file, data, size);
        return size;
    }
    int offset = 0;
    char *end = file + 8;
    *end++ = '{';
    for (size_t i = 2; i < size; i++)
        if (data[i] < 0x80)
            *end++ = (char)data[i];
        else if (data[i] < 0xc0)
            end = stpcpy(end, pieces[data[i] % 16]);
        else
            end = put_entry(end, 'a' + data[i] % 32, i + 1 < size ? data[i + 1] : 0, &offset);
    *end++ = '}';
    uint64_t length = (uint64_t)(end - file - 8);
    size_t n = (size_t)offset + (data[1] > 0xf0 ? data[1] & 15u : 0);
    memcpy(file, &length, sizeof length);
    memset(end, 0, n);
    return (size_t)(end - file) + n;
}

static void must(bool promise)
{
    if (!promise)
        abort();
}

static void check_round_trip(lt_ctx *ctx, lt_file *f)
{
    enum { MOST = 256 };
    int n = lt_file_count(f), n_meta = 0;
    const char *names[MOST], *meta[2 * MOST], *key, *value;
    lt_tensor *x[MOST];
    char path[64];
    while (lt_file_meta_at(f, n_meta, &meta[2 * n_meta], &meta[2 * n_meta + 1]) &&
           n_meta < MOST - 1)
        n_meta++;
    if (n > MOST || n_meta == MOST - 1 || lt_file_meta(f, "sha256")) /* a reserved name */
        return;
    for (int i = 0; i < n; i++) {
        names[i] = lt_file_name(f, i);
        must(lt_file_find(f, names[i]) == i && (x[i] = lt_file_read(f, i)));
    }
    snprintf(path, sizeof path, "%s/fuzz_file.%d",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)getpid());
    must(lt_file_save(path, n, names, x, n_meta, meta) == LT_OK);
    lt_file *again = lt_file_open(ctx, path);
    must(again && lt_file_count(again) == n && lt_file_verify(again) == LT_OK);
    for (int i = 0; i < n; i++) {
        lt_tensor *y = lt_file_read(again, i);
        must(y && strcmp(lt_file_name(again, i), names[i]) == 0 &&
             lt_tensor_dtype(y) == lt_tensor_dtype(x[i]));
        must(lt_ndim(y) == lt_ndim(x[i]) &&
             memcmp(lt_dims(y), lt_dims(x[i]), (size_t)lt_ndim(y) * sizeof(int64_t)) == 0);
        must(memcmp(lt_data(y), lt_data(x[i]),
                    (size_t)lt_count(y) * lt_dtype_bytes(lt_tensor_dtype(y))) == 0);
        lt_release(x[i]);
        lt_release(y);
    }
    for (int i = 0; i < n_meta; i++)
        must(lt_file_meta_at(again, i, &key, &value) && strcmp(key, meta[2 * i]) == 0 &&
             strcmp(value, meta[2 * i + 1]) == 0);
    lt_file_close(again);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char file[256 * 4096];
    char path[32];
    if (size > 4096)
        return 0;
    size_t bytes = make_file(data, size, file);
    int fd = memfd_create("file", 0);
    must(fd >= 0 && write(fd, file, bytes) == (ssize_t)bytes);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.threads = 1});
    lt_file *f = lt_file_open(ctx, path);
    must(f || (lt_errcode() == LT_EFILE && strncmp(lt_errmsg(), path, strlen(path)) == 0));
    must(!f || lt_file_verify(f) == LT_OK || lt_errcode() == LT_EFILE);
    if (f)
        check_round_trip(ctx, f);
    lt_file_close(f);
    must(lt_memory_stats(ctx).live == 0 && lt_memory_stats(ctx).peak < 32 * bytes + 16384);
    lt_ctx_free(ctx);
    close(fd);
    return 0;
}
