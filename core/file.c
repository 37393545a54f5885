/* file.c - reads files of named tensors in the safetensors format; save.c writes them.
 *
 * A file consists of a little-endian u64 with the length of the header, the JSON header, and the
 * data: the tensors one after the other, without holes. The reader trusts nothing: each size is
 * checked against the size of the file before memory is allocated for it, and anything the format
 * does not allow is rejected. The reader uses pread instead of mmap, because a mapped file that
 * another process truncates crashes the program.
 *
 * The JSON parser is cJSON, which is laxer than this format: it lets a NUL cut strings short,
 * accepts invalid UTF-8, rounds numbers, and builds a tree of up to forty times the size of the
 * text. Therefore scan_header() checks the text first. cJSON allocates the tree with malloc().
 * MAX_VALUES bounds its size, and lt_file_open() frees it before it returns.
 *
 * lt_file_open() or lt_file_verify() detects any single flipped bit in a file that we wrote. The
 * digest detects the flips that leave the file valid. A file still counts as ours if one character
 * around its digest is wrong, such as a letter of the key.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "core/file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a file's data are copied as they are");

enum {
    MAX_VALUES = 1 << 18, /* JSON values: up to 14 per tensor, 1 per metadata entry */
    MAX_DIGITS = 15,      /* digits of a number, so that a double in cJSON is exact */
    CHUNK = 4096          /* elements read at a time */
};

const char *const lt__format_names[LT_DTYPE_COUNT] = {
    [LT_F32] = "F32", [LT_F64] = "F64", [LT_F16] = "F16", [LT_BF16] = "BF16",
    [LT_I64] = "I64", [LT_I32] = "I32", [LT_U8] = "U8",
};

typedef struct named { /* first member of entry and pair */
    const char *name;
    int position; /* its position in the header */
} named;

typedef struct entry {
    named key;
    lt_dtype dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    uint64_t count;
    uint64_t begin, end; /* byte offsets from the start of the data */
} entry;

typedef struct pair {
    named key;
    const char *value;
} pair;

struct lt_file {
    lt_ctx *ctx;
    char *path;
    int fd;
    uint64_t bytes;           /* size of the file */
    struct timespec modified; /* mtime when the file was opened */
    uint64_t data;            /* offset of the data in the file */
    /* characters that differ around the digest: 0 ours, 1 ours but damaged, more: not ours */
    int unlike;
    /* (data - 7) bytes: the header and a NUL; later the strings of entries and meta */
    char *text;
    int n, n_meta;
    entry *entries; /* (n), in the order of their data */
    pair *meta;     /* (n_meta), in the order of the header */
};

lt_status lt__bad(const char *path, const char *fmt, ...)
{
    char reason[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(reason, sizeof reason, fmt, args);
    va_end(args);
    return lt_fail(LT_EFILE, "%s: %s", path, reason);
}

const char *lt__printable(const char *text, char buffer[72])
{
    size_t n = strnlen(text, 64);
    while (n > 0 && ((uint8_t)text[n] & 0xc0) == 0x80) /* keep UTF-8 characters whole */
        n--;
    for (size_t i = 0; i < n; i++)
        buffer[i] = (uint8_t)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    strcpy(buffer + n, text[n] ? "..." : "");
    return buffer;
}

size_t lt__utf8_bytes(const char *s)
{
    static const uint32_t min[] = {0x80, 0x800, 0x10000};
    uint8_t first = (uint8_t)s[0];
    if (first < 0x80)
        return 1;
    size_t n = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (first < 0xc0 || first > 0xf7)
        return 0;
    uint32_t code = first & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (((uint8_t)s[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | ((uint8_t)s[i] & 0x3f);
    }
    bool surrogate = code >= 0xd800 && code <= 0xdfff;
    return code < min[n - 2] || code > 0x10ffff || surrogate ? 0 : n;
}

int lt__open(const char *path, int flags)
{
    int fd;
    while ((fd = open(path, flags | O_CLOEXEC, 0666)) < 0 && errno == EINTR)
        ;
    return fd;
}

/* ==== Reading the header ====================================================================== */

static lt_status read_at(const lt_file *f, uint64_t offset, void *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(f->fd, (char *)to + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno != EINTR)
            return lt__bad(f->path, "cannot read: %s", strerror(errno));
        if (n == 0)
            return lt__bad(f->path, "the file became shorter while it was being read");
        if (n > 0)
            done += (size_t)n;
    }
    return LT_OK;
}

/* The number of characters around the digest of a header that differ from what save.c writes. */
static int unlike_ours(const char *header, uint64_t n)
{
    static const char begin[] = LT_DIGEST_BEGIN;
    enum { BEFORE = sizeof begin - 1 };
    if (n < BEFORE + LT_DIGITS + 1)
        return BEFORE;
    int unlike = header[BEFORE + LT_DIGITS] != '"';
    for (int i = 0; i < BEFORE; i++)
        unlike += header[i] != begin[i];
    return unlike;
}

/* The number of leading metadata entries that are hidden from the caller: our digest, or none. */
static int hidden_meta(const lt_file *f) { return f->unlike == 0; }

static lt_status load_header(lt_file *f)
{
    struct stat info;
    uint64_t length;
    f->fd = lt__open(f->path, O_RDONLY | O_NONBLOCK); /* opening a FIFO could block forever */
    if (f->fd < 0 || fstat(f->fd, &info) != 0)
        return lt__bad(f->path, "cannot open: %s", strerror(errno));
    if (!S_ISREG(info.st_mode))
        return lt__bad(f->path,
                       S_ISDIR(info.st_mode) ? "this is a folder" : "this is not a regular file");
    f->bytes = (uint64_t)info.st_size;
    f->modified = info.st_mtim;
    if (f->bytes < sizeof length)
        return lt__bad(f->path, "%llu bytes are too few for a safetensors file", (lt_ull)f->bytes);
    LT_TRY(read_at(f, 0, &length, sizeof length));
    if (length > LT_MAX_HEADER)
        return lt__bad(f->path, "this is %s", lt__kind_of((const char *)&length));
    if (length > f->bytes - sizeof length)
        return lt__bad(f->path,
                       "the header has %llu bytes, but the file only %llu; it is cut short or "
                       "damaged",
                       (lt_ull)length, (lt_ull)f->bytes);
    f->data = sizeof length + length;
    if (!(f->text = lt__alloc(f->ctx, length + 1)))
        return LT_ENOMEM;
    f->text[length] = 0; /* cJSON 1.7.15 reads one byte past the end */
    LT_TRY(read_at(f, sizeof length, f->text, length));
    f->unlike = unlike_ours(f->text, length);
    return LT_OK;
}

/* Rejects what cJSON accepts but the format does not, and bounds cJSON's memory. A header that
 * passes has only objects, lists, strings and counts, at most three levels deep and without NUL. */
static lt_status scan_header(const lt_file *f)
{
    const char *s = f->text, *wrong = s[0] == '{' ? NULL : "does not begin an object";
    size_t n = f->data - 8, i = 0;
    int depth = 0, values = 1;
    bool in_string = false;
    for (size_t step; i < n && !wrong; i += wrong ? 0 : step) {
        uint8_t c = (uint8_t)s[i];
        step = lt__utf8_bytes(s + i);
        if (step == 0) {
            wrong = "is not UTF-8";
        } else if (c == '"') {
            in_string = !in_string;
        } else if (in_string) {
            if (c < 0x20 || strncmp(s + i, "\\u0000", 6) == 0)
                wrong = "is a control character in a string";
            if (c == '\\')
                step = 2;
        } else if (c >= '0' && c <= '9') {
            step = strspn(s + i, "0123456789");
            if (step > MAX_DIGITS || (c == '0' && step > 1))
                wrong = "begins a number that is not a count below 10^15";
        } else if (c == '{' || c == '[') {
            values++;
            if (++depth > 3)
                wrong = "begins a fourth level, but the format has three";
        } else if (c == '}' || c == ']') {
            depth--;
        } else if (c == ',') {
            if (++values > MAX_VALUES)
                wrong = "begins one value too many; split the file";
        } else if (c == 0 || !strchr(": \t\r\n", c)) {
            wrong = "does not begin an object, list, string or count";
        }
    }
    return wrong ? lt__bad(f->path, "byte %zu of the header %s", i, wrong) : LT_OK;
}

/* Reads a list of at most max counts. */
static bool read_counts(const cJSON *list, int max, int64_t *counts, int *n)
{
    *n = 0;
    for (const cJSON *item = list->child; item; item = item->next) {
        if (!cJSON_IsNumber(item) || *n == max)
            return false;
        counts[(*n)++] = (int64_t)item->valuedouble;
    }
    return true;
}

/* Reads and checks each of the three members of item. */
static lt_status read_members(const lt_file *f, const cJSON *item, entry *e)
{
    const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL;
    int64_t range[2];
    int members = 0, n;
    for (const cJSON *m = cJSON_IsObject(item) ? item->child : NULL; m; m = m->next, members++) {
        if (strcmp(m->string, "dtype") == 0)
            dtype = m;
        else if (strcmp(m->string, "shape") == 0)
            shape = m;
        else if (strcmp(m->string, "data_offsets") == 0)
            offsets = m;
    }
    if (members != 3 || !cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets))
        return lt__bad(f->path,
                       "tensor '%s' must have a dtype, a shape, data_offsets and nothing else",
                       LT_PRINTABLE(e->key.name));
    int found = LT_DTYPE_COUNT;
    while (--found >= 0 && strcmp(dtype->valuestring, lt__format_names[found]) != 0)
        ;
    if (found < 0)
        return lt__bad(f->path,
                       "tensor '%s' has dtype %s, which luatrain does not support; convert it to "
                       "F32, F64, F16, BF16, I64, I32 or U8",
                       LT_PRINTABLE(e->key.name), LT_PRINTABLE(dtype->valuestring));
    if (!read_counts(shape, LT_MAX_DIMS, e->dims, &e->ndim))
        return lt__bad(f->path, "the shape of tensor '%s' is not a list of at most %d counts",
                       LT_PRINTABLE(e->key.name), LT_MAX_DIMS);
    if (!read_counts(offsets, 2, range, &n) || n != 2 || range[0] > range[1])
        return lt__bad(f->path, "the data_offsets of tensor '%s' are not two counts in order",
                       LT_PRINTABLE(e->key.name));
    e->dtype = (lt_dtype)found;
    e->begin = (uint64_t)range[0];
    e->end = (uint64_t)range[1];
    return LT_OK;
}

/* Reads an entry and checks that its members are consistent and that it fits into the file. */
static lt_status read_entry(const lt_file *f, const cJSON *item, entry *e)
{
    int64_t count;
    LT_TRY(read_members(f, item, e));
    if (lt__count_dims(e->ndim, e->dims, &count) != LT_OK)
        return lt__bad(f->path, "tensor '%s': %s", LT_PRINTABLE(e->key.name), lt_errmsg());
    e->count = (uint64_t)count;
    if (e->end > f->bytes - f->data)
        return lt__bad(f->path,
                       "tensor '%s' ends at byte %llu of the data, but the file has %llu; it is "
                       "cut short or damaged",
                       LT_PRINTABLE(e->key.name), (lt_ull)e->end, (lt_ull)(f->bytes - f->data));
    if (e->end - e->begin != e->count * lt_dtype_bytes(e->dtype))
        return lt__bad(f->path, "tensor '%s' has %llu elements of %s, but %llu bytes",
                       LT_PRINTABLE(e->key.name), (lt_ull)e->count, lt__format_names[e->dtype],
                       (lt_ull)(e->end - e->begin));
    return LT_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const named *)a)->name, ((const named *)b)->name);
}

static int compare_positions(const void *a, const void *b)
{
    return ((const named *)a)->position - ((const named *)b)->position;
}

/* Checks that no two of n elements, which start with a struct named, have the same name. Sorts them
 * by name and back. */
static lt_status check_names(const lt_file *f, void *things, int n, size_t size)
{
    const char *name = NULL, *at = things;
    if (n == 0)
        return LT_OK;
    qsort(things, (size_t)n, size, compare_names);
    for (int i = 0; i < n; i++, at += size) {
        const char *before = name;
        name = ((const named *)at)->name;
        if (before && strcmp(before, name) == 0)
            return lt__bad(f->path, "the name '%s' occurs twice", LT_PRINTABLE(name));
    }
    qsort(things, (size_t)n, size, compare_positions);
    return LT_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) /* an empty tensor goes before the one at the same offset */
        return x->end < y->end ? -1 : 1;
    return x->key.position - y->key.position;
}

/* Sorts the entries by the order of their data, which must cover the data section without gaps. */
static lt_status order_entries(lt_file *f)
{
    uint64_t covered = 0;
    if (f->n > 0)
        qsort(f->entries, (size_t)f->n, sizeof *f->entries, compare_offsets);
    for (int i = 0; i < f->n; i++) {
        const entry *e = &f->entries[i];
        if (e->begin != covered)
            return lt__bad(f->path,
                           "tensor '%s' begins at byte %llu of the data, but the one before ends "
                           "at byte %llu; holes and overlaps are not allowed",
                           LT_PRINTABLE(e->key.name), (lt_ull)e->begin, (lt_ull)covered);
        covered = e->end;
    }
    if (covered != f->bytes - f->data)
        return lt__bad(f->path, "the data continue after the last tensor, from byte %llu to %llu",
                       (lt_ull)covered, (lt_ull)(f->bytes - f->data));
    return LT_OK;
}

/* Copies a string of the tree to *strings, which it advances. The strings replace the header's
 * text, which is always longer. */
static const char *keep_string(char **strings, const char *string)
{
    char *kept = *strings;
    *strings = stpcpy(kept, string) + 1;
    return kept;
}

static lt_status read_tree(lt_file *f, const cJSON *root)
{
    const cJSON *metadata = NULL, *item;
    char *strings = f->text;
    cJSON_ArrayForEach(item, root)
    {
        if (strcmp(item->string, LT_METADATA) != 0)
            f->n++;
        else if (metadata || !cJSON_IsObject(item))
            return lt__bad(f->path, "%s must occur once and be an object", LT_METADATA);
        else
            metadata = item;
    }
    f->n_meta = metadata ? cJSON_GetArraySize(metadata) : 0;
    if (f->n > LT_MAX_NAMES || f->n_meta - hidden_meta(f) > LT_MAX_NAMES)
        return lt__bad(f->path,
                       "%d tensors and %d metadata entries are too many; the limit is %d of each",
                       f->n, f->n_meta, LT_MAX_NAMES);
    if (!(f->entries = lt__alloc(f->ctx, (size_t)f->n * sizeof *f->entries)) ||
        !(f->meta = lt__alloc(f->ctx, (size_t)f->n_meta * sizeof *f->meta)))
        return LT_ENOMEM;
    int position = 0;
    cJSON_ArrayForEach(item, metadata)
    {
        if (!cJSON_IsString(item))
            return lt__bad(f->path, "metadata '%s' is not a string", LT_PRINTABLE(item->string));
        pair *p = &f->meta[position];
        p->key = (named){keep_string(&strings, item->string), position++};
        p->value = keep_string(&strings, item->valuestring);
    }
    position = 0;
    cJSON_ArrayForEach(item, root)
    {
        if (item == metadata)
            continue;
        entry *e = &f->entries[position];
        e->key = (named){keep_string(&strings, item->string), position++};
        LT_TRY(read_entry(f, item, e));
    }
    LT_TRY(check_names(f, f->meta, f->n_meta, sizeof *f->meta));
    LT_TRY(check_names(f, f->entries, f->n, sizeof *f->entries));
    return order_entries(f);
}

static lt_status parse_header(lt_file *f)
{
    const char *end = f->text;
    LT_TRY(scan_header(f));
    cJSON *root = cJSON_ParseWithLengthOpts(f->text, f->data - 8, &end, false);
    uint64_t parsed = (uint64_t)(end - f->text);
    lt_status status;
    if (!root || parsed + strspn(end, " \t\r\n") != f->data - 8)
        status = lt__bad(f->path, "the header is not JSON from byte %llu on", (lt_ull)parsed);
    else
        status = read_tree(f, root);
    cJSON_Delete(root);
    return status;
}

/* ==== The open file =========================================================================== */

lt_file *lt_file_open(lt_ctx *ctx, const char *path)
{
    LT_NEED_CTX(ctx, NULL);
    lt_file *f = lt__alloc_zero(ctx, sizeof *f);
    if (!f)
        return NULL;
    f->ctx = lt__ctx_retain(ctx);
    f->fd = -1;
    if (!(f->path = lt__alloc(ctx, strlen(path) + 1)))
        goto fail;
    strcpy(f->path, path);
    if (load_header(f) == LT_OK && parse_header(f) == LT_OK)
        return f;
fail:
    lt_file_close(f);
    return NULL;
}

void lt_file_close(lt_file *f)
{
    if (!f)
        return;
    lt_ctx *ctx = f->ctx;
    if (f->fd >= 0)
        close(f->fd);
    lt__free(ctx, f->meta, (size_t)f->n_meta * sizeof *f->meta);
    lt__free(ctx, f->entries, (size_t)f->n * sizeof *f->entries);
    lt__free(ctx, f->text, f->data - 7);
    lt__free(ctx, f->path, f->path ? strlen(f->path) + 1 : 0);
    lt__free(ctx, f, sizeof *f);
    lt__ctx_release(ctx);
}

int lt_file_count(const lt_file *f) { return f->n; }
const char *lt_file_name(const lt_file *f, int i) { return f->entries[i].key.name; }

int lt_file_find(const lt_file *f, const char *name)
{
    int i = f->n;
    while (--i >= 0 && strcmp(f->entries[i].key.name, name) != 0)
        ;
    return i;
}

void lt_file_shape(const lt_file *f, int i, lt_dtype *dtype, int *ndim, int64_t *dims)
{
    const entry *e = &f->entries[i];
    *dtype = e->dtype;
    *ndim = e->ndim;
    memcpy(dims, e->dims, (size_t)e->ndim * sizeof *dims);
}

bool lt_file_meta_at(const lt_file *f, int i, const char **key, const char **value)
{
    if (i < 0 || i >= f->n_meta - hidden_meta(f))
        return false;
    const pair *p = &f->meta[i + hidden_meta(f)];
    *key = p->key.name;
    *value = p->value;
    return true;
}

const char *lt_file_meta(const lt_file *f, const char *wanted)
{
    const char *key, *value;
    for (int i = 0; lt_file_meta_at(f, i, &key, &value); i++)
        if (strcmp(key, wanted) == 0)
            return value;
    return NULL;
}

static lt_status check_index(const lt_file *f, int i)
{
    if (i >= 0 && i < f->n)
        return LT_OK;
    return lt_fail(LT_EINVAL, "%s has %d tensors; index %d is out of range", f->path, f->n, i);
}

lt_tensor *lt_file_read(lt_file *f, int i)
{
    if (check_index(f, i) != LT_OK)
        return NULL;
    const entry *e = &f->entries[i];
    lt_tensor *x = lt_tensor_new(f->ctx, e->dtype, e->ndim, e->dims);
    return x ? lt__tensor_if(lt_file_read_into(f, i, x), x) : NULL;
}

/* Checks that the file was not modified since it was opened, so that lt_file_verify() and
 * lt_file_read() see the same bytes. */
static lt_status check_unchanged(const lt_file *f)
{
    struct stat now;
    if (fstat(f->fd, &now) != 0)
        return lt__bad(f->path, "cannot read: %s", strerror(errno));
    if (now.st_mtim.tv_sec != f->modified.tv_sec || now.st_mtim.tv_nsec != f->modified.tv_nsec)
        return lt__bad(f->path, "the file was changed while it was being read");
    return LT_OK;
}

/* Reads the elements of e to CPU memory and converts them to dtype. */
static lt_status read_elements(lt_file *f, const entry *e, char *to, lt_dtype dtype)
{
    size_t size = lt_dtype_bytes(dtype), file_size = lt_dtype_bytes(e->dtype);
    for (size_t done = 0, n; done < e->count; done += n) {
        uint64_t raw[CHUNK]; /* space for elements of up to 8 bytes */
        n = e->count - done < CHUNK ? e->count - done : CHUNK;
        LT_TRY(read_at(f, f->data + e->begin + done * file_size, raw, n * file_size));
        lt_convert(to + done * size, dtype, raw, e->dtype, n);
    }
    return check_unchanged(f);
}

lt_status lt_file_read_into(lt_file *f, int i, lt_tensor *dst)
{
    LT_TRY(check_index(f, i));
    const entry *e = &f->entries[i];
    lt_tensor like = {.dtype = (uint8_t)e->dtype, .ndim = (uint8_t)e->ndim};
    memcpy(like.dims, e->dims, (size_t)e->ndim * sizeof *like.dims);
    LT_TRY(lt__check_alive(dst));
    if (!lt__same_dims(dst, &like))
        return lt__bad(f->path, "tensor '%s' is %s and cannot be read into %s",
                       LT_PRINTABLE(e->key.name), lt_describe(&like, (char[96]){0}, 96),
                       lt_describe(dst, (char[96]){0}, 96));
    lt_dtype dtype = (lt_dtype)dst->dtype;
    lt__bump_version(dst);
    if (dst->storage->device->is_host)
        return read_elements(f, e, dst->data, dtype);
    lt_tensor *here = lt__tensor_like(dst, dst->ctx->devices[0], dtype);
    if (!here)
        return lt_errcode();
    lt_status status = read_elements(f, e, here->data, dtype);
    if (status == LT_OK)
        status = lt_copy(dst, here);
    lt_release(here);
    return status;
}

/* ==== Digest ================================================================================== */

bool lt_file_has_digest(const lt_file *f) { return f->unlike <= 1; }

lt_status lt_file_verify(lt_file *f)
{
    char said[LT_DIGITS + 1] = "", found[LT_DIGITS + 1];
    lt_sha256 sha;
    if (!lt_file_has_digest(f))
        return LT_OK;
    lt_sha256_begin(&sha);
    for (uint64_t done = 0, n; done < f->bytes; done += n) {
        char chunk[32768];
        n = f->bytes - done < sizeof chunk ? f->bytes - done : sizeof chunk;
        LT_TRY(read_at(f, done, chunk, n));
        if (done == 0) { /* the digest is in the first chunk */
            memcpy(said, chunk + LT_DIGEST_AT, LT_DIGITS);
            memcpy(chunk + LT_DIGEST_AT, LT_DIGEST_ZEROS, LT_DIGITS);
        }
        lt_sha256_add(&sha, chunk, n);
    }
    lt_sha256_end(&sha, found);
    if (strcmp(said, found) == 0)
        return LT_OK;
    return lt__bad(f->path, "it is damaged: it has digest %.8s..., but its content has %.8s...",
                   LT_PRINTABLE(said), found);
}
