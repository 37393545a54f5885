/* save.c - replaces files atomically and writes files of named tensors. file.c reads them and
 * describes the format.
 *
 * Whatever happens, path names either the old file or the complete new one. The writer does not
 * allocate memory for the header: it generates it twice, the first time only to count its bytes.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"

/* ==== Replacing a file ======================================================================== */

/* Writes all bytes. Returns errno, or 0. */
static int write_all(int fd, const char *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = write(fd, data + done, bytes - done);
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            return n == 0 ? EIO : errno;
    }
    return 0;
}

static int sync_descriptor(int fd)
{
    int failed;
    while ((failed = fsync(fd)) != 0 && errno == EINTR)
        ;
    return failed ? errno : 0;
}

/* Finds the regular file that path refers to, through symbolic links, and its permissions. If there
 * is no file yet, target is path itself and *mode is 0. Other kinds of files, such as devices, are
 * not replaced. */
static lt_status find_target(const char *path, char target[PATH_MAX], mode_t *mode)
{
    struct stat now;
    *mode = 0;
    if (stat(path, &now) != 0) {
        snprintf(target, PATH_MAX, "%s", path);
        return strlen(path) < PATH_MAX ? LT_OK : lt__bad(path, "%s", strerror(ENAMETOOLONG));
    }
    if (!S_ISREG(now.st_mode))
        return lt__bad(path, "this is not a regular file; it is not replaced");
    *mode = now.st_mode & 0777;
    return realpath(path, target) ? LT_OK : lt__bad(path, "cannot resolve it: %s", strerror(errno));
}

/* Creates a new file PATH.tmpN with a name not in use. Returns -1 with LT_EFILE on failure. */
static int create_beside(const char *path, char temporary[PATH_MAX])
{
    int fd = -1;
    errno = EEXIST;
    for (int i = 0; i < 1000 && fd < 0 && errno == EEXIST; i++) {
        if (snprintf(temporary, PATH_MAX, "%s.tmp%d", path, i) >= PATH_MAX)
            errno = ENAMETOOLONG;
        else
            fd = lt__open(temporary, O_WRONLY | O_CREAT | O_EXCL);
    }
    if (fd < 0)
        (void)lt__bad(path, "cannot create a temporary file next to it: %s", strerror(errno));
    return fd;
}

/* Syncs the folder of path to disk; only then is a rename certain to survive a crash. */
static lt_status sync_folder(const char *path)
{
    char folder[PATH_MAX] = ".";
    const char *slash = strrchr(path, '/');
    if (slash)
        snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    int fd = lt__open(folder, O_RDONLY | O_DIRECTORY);
    int error = fd < 0 ? errno : sync_descriptor(fd);
    if (fd >= 0)
        close(fd);
    if (error && error != EINVAL) /* EINVAL: this file system does not sync folders */
        return lt__bad(path, "cannot sync its folder to the disk: %s", strerror(error));
    return LT_OK;
}

/* The replacement of a file; the new content is written to fd. */
typedef struct replacement {
    const char *path;
    char target[PATH_MAX], temporary[PATH_MAX];
    mode_t mode;
    int fd;
} replacement;

static lt_status begin(replacement *r, const char *path)
{
    r->path = path;
    LT_TRY(find_target(path, r->target, &r->mode));
    r->fd = create_beside(r->target, r->temporary);
    return r->fd < 0 ? LT_EFILE : LT_OK;
}

/* Moves the new file over the old one, or removes it if writing failed (status). */
static lt_status finish(replacement *r, lt_status status)
{
    int error = status == LT_OK ? sync_descriptor(r->fd) : 0;
    if (error)
        status = lt__bad(r->path, "cannot write to the disk: %s", strerror(error));
    if (r->mode && fchmod(r->fd, r->mode) != 0 && status == LT_OK)
        status = lt__bad(r->path, "cannot set its permissions: %s", strerror(errno));
    if (close(r->fd) != 0 && errno != EINTR && status == LT_OK)
        status = lt__bad(r->path, "cannot close: %s", strerror(errno));
    if (status == LT_OK && rename(r->temporary, r->target) != 0)
        status = lt__bad(r->path, "cannot replace it: %s", strerror(errno));
    if (status == LT_OK)
        return sync_folder(r->target);
    if (unlink(r->temporary) != 0)
        lt_fail(status, "%s; %s is left behind: %s", lt_errmsg(), r->temporary, strerror(errno));
    return status;
}

lt_status lt_file_replace(const char *path, const void *data, size_t bytes)
{
    replacement r;
    LT_TRY(begin(&r, path));
    int error = write_all(r.fd, data, bytes);
    return finish(&r, error ? lt__bad(path, "cannot write: %s", strerror(error)) : LT_OK);
}

/* ==== Writing tensors ========================================================================= */

typedef struct writer {
    int fd;         /* -1: count bytes only */
    int error;      /* errno of the first failure; nothing is written after it */
    uint64_t bytes; /* bytes written or counted so far */
    lt_sha256 sha;  /* digest of these bytes */
    size_t used;
    char buffer[8192];
} writer;

static void flush(writer *w)
{
    if (!w->error)
        w->error = write_all(w->fd, w->buffer, w->used);
    w->used = 0;
}

static void put(writer *w, const void *data, size_t bytes)
{
    w->bytes += bytes;
    if (w->fd >= 0)
        lt_sha256_add(&w->sha, data, bytes);
    for (const char *from = data; w->fd >= 0 && bytes > 0;) {
        size_t space = sizeof w->buffer - w->used, n = bytes < space ? bytes : space;
        memcpy(w->buffer + w->used, from, n);
        w->used += n;
        from += n;
        bytes -= n;
        if (w->used == sizeof w->buffer)
            flush(w);
    }
}

static LT_PRINTF(2, 3) void put_text(writer *w, const char *fmt, ...)
{
    char text[128];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    put(w, text, (size_t)n);
}

/* Writes a JSON string. Sets w->error to EILSEQ if it is not UTF-8. */
static void put_string(writer *w, const char *s)
{
    put(w, "\"", 1);
    for (size_t step; *s; s += step) {
        step = lt__utf8_bytes(s);
        if (step == 0) {
            w->error = EILSEQ;
            return;
        }
        if (*s == '"' || *s == '\\')
            put(w, "\\", 1);
        if ((uint8_t)*s < 0x20)
            put_text(w, "\\u%04x", *s);
        else
            put(w, s, step);
    }
    put(w, "\"", 1);
}

/* The arguments of lt__file_save_with(). */
typedef struct content {
    const char *path;
    int n, n_meta;
    const char *const *names, *const *meta;
    lt_tensor *const *tensors;
    lt_read_fn read; /* reads meta tensors; or NULL */
    void *ud;
} content;

static void put_header(writer *w, const content *c)
{
    uint64_t offset = 0;
    put_text(w, LT_DIGEST_BEGIN LT_DIGEST_ZEROS "\"");
    for (int i = 0; i < 2 * c->n_meta; i++) {
        put_text(w, "%c", i % 2 ? ':' : ',');
        put_string(w, c->meta[i]);
    }
    put_text(w, "}");
    for (int i = 0; i < c->n; i++) {
        const lt_tensor *x = c->tensors[i];
        uint64_t end = offset + lt__tensor_bytes(x);
        put_text(w, ",");
        put_string(w, c->names[i]);
        put_text(w, ":{\"dtype\":\"%s\",\"shape\":[", lt__format_names[x->dtype]);
        for (int k = 0; k < x->ndim; k++)
            put_text(w, k ? ",%lld" : "%lld", (long long)x->dims[k]);
        put_text(w, "],\"data_offsets\":[%llu,%llu]}", (lt_ull)offset, (lt_ull)end);
        offset = end;
    }
    put_text(w, "}");
}

/* Returns a name that occurs twice among n names, which are `stride` apart, or NULL. */
static const char *repeated(const char *const *names, int n, int stride)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            if (strcmp(names[i * stride], names[k * stride]) == 0)
                return names[i * stride];
    return NULL;
}

/* Checks the arguments (LT_EINVAL). Stores the length of the header, padded to a multiple of 8, in
 * *header. */
static lt_status check_content(const content *c, uint64_t *header)
{
    writer w = {.fd = -1};
    if (c->n > LT_MAX_NAMES || c->n_meta > LT_MAX_NAMES)
        return lt_fail(
            LT_EINVAL,
            "%s: %d tensors and %d metadata entries are too many; the limit is %d of each", c->path,
            c->n, c->n_meta, LT_MAX_NAMES);
    const char *twice = repeated(c->names, c->n, 1);
    if (!twice)
        twice = repeated(c->meta, c->n_meta, 2);
    if (twice)
        return lt_fail(LT_EINVAL, "%s: the name '%s' is given twice", c->path, LT_PRINTABLE(twice));
    for (int i = 0; i < c->n_meta; i++)
        if (strcmp(c->meta[2 * i], LT_DIGEST) == 0)
            return lt_fail(LT_EINVAL, "%s: metadata cannot be named %s", c->path, LT_DIGEST);
    for (int i = 0; i < c->n; i++) {
        if (strcmp(c->names[i], LT_METADATA) == 0)
            return lt_fail(LT_EINVAL, "%s: a tensor cannot be named %s", c->path, LT_METADATA);
        bool is_read = c->read && c->tensors[i]->meta;
        if (!is_read && lt__check_alive(c->tensors[i]) != LT_OK)
            return lt_fail_prefix("%s: tensor '%s'", c->path, LT_PRINTABLE(c->names[i]));
    }
    put_header(&w, c);
    *header = (w.bytes + 7) / 8 * 8;
    if (w.error)
        return lt_fail(LT_EINVAL, "%s: a name or a metadata value is not UTF-8", c->path);
    if (*header > LT_MAX_HEADER)
        return lt_fail(LT_EINVAL,
                       "%s: names and metadata take %llu bytes, but the format allows at most %d",
                       c->path, (lt_ull)*header, LT_MAX_HEADER);
    return LT_OK;
}

static lt_status put_data(writer *w, const content *c, lt_tensor *x)
{
    enum { PIECE = 32768 }; /* bytes; small enough to stay in the cache from hashing to copying */
    lt_tensor *here = c->read && x->meta ? c->read(c->ud, x) : lt__on_host(x);
    if (!here)
        return lt_errcode();
    size_t bytes = lt__tensor_bytes(x);
    for (size_t done = 0, n; done < bytes && !w->error; done += n) {
        n = bytes - done < PIECE ? bytes - done : PIECE;
        put(w, (const char *)here->data + done, n);
    }
    lt_release(here);
    return LT_OK;
}

/* Writes the digest over its placeholder zeros, after all else is written. */
static void put_digest(writer *w)
{
    char hex[LT_DIGITS + 1];
    lt_sha256_end(&w->sha, hex);
    if (!w->error && lseek(w->fd, LT_DIGEST_AT, SEEK_SET) < 0)
        w->error = errno;
    if (!w->error)
        w->error = write_all(w->fd, hex, LT_DIGITS);
}

/* Writes the whole file to fd. */
static lt_status write_file(int fd, const content *c, uint64_t header)
{
    writer w = {.fd = fd};
    lt_sha256_begin(&w.sha);
    put(&w, &header, sizeof header);
    put_header(&w, c);
    while (w.bytes < sizeof header + header)
        put(&w, " ", 1);
    for (int i = 0; i < c->n; i++)
        LT_TRY(put_data(&w, c, c->tensors[i]));
    flush(&w);
    put_digest(&w);
    return w.error ? lt__bad(c->path, "cannot write: %s", strerror(w.error)) : LT_OK;
}

lt_status lt__file_save_with(const char *path, int n, const char *const *names,
                             lt_tensor *const *tensors, int n_meta, const char *const *meta,
                             lt_read_fn read, void *ud)
{
    const content c = {path, n, n_meta, names, meta, tensors, read, ud};
    replacement r;
    uint64_t header = 0;
    LT_TRY(check_content(&c, &header));
    LT_TRY(begin(&r, path));
    return finish(&r, write_file(r.fd, &c, header));
}

lt_status lt_file_save(const char *path, int n, const char *const *names, lt_tensor *const *tensors,
                       int n_meta, const char *const *meta)
{
    return lt__file_save_with(path, n, names, tensors, n_meta, meta, NULL, NULL);
}
