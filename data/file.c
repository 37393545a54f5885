/* file.c - opens regular files without blocking, reads them whole, and formats their paths for
 * messages.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/source.h"

/* File names may come from untrusted sources. Control codes must not reach the terminal, and a long
 * name must leave space for the reason in the message. */
const char *lt__short_path(const char *path, char buffer[LT_SHORT_PATH_BYTES])
{
    enum { DOTS = 3, MOST = LT_SHORT_PATH_BYTES - DOTS - 1 };
    const uint8_t *from = (const uint8_t *)path, *end = from + strlen(path);
    char *to = buffer;
    if (end - from > MOST) {
        from = end - MOST;
        const void *slash = memchr(from, '/', MOST);
        for (from = slash ? slash : from; (*from & 0xc0) == 0x80; from++)
            ; /* keep UTF-8 characters whole */
        memcpy(to, "...", DOTS);
        to += DOTS;
    }
    for (; *from; from++) {
        bool wide = from[0] == 0xc2 && (from[1] & 0xe0) == 0x80; /* U+0080 to U+009F in UTF-8 */
        *to++ = wide || *from < 0x20 || *from == 0x7f ? '?' : (char)*from;
        from += wide;
    }
    *to = '\0';
    return buffer;
}

int lt__open_regular(const char *path, int64_t *bytes)
{
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* opening a FIFO must not block */
    if (fd < 0 || fstat(fd, &s) != 0) {
        lt_fail(LT_EDATA, "cannot open %s: %s", LT_SHORT_PATH(path), strerror(errno));
    } else if (!S_ISREG(s.st_mode)) {
        lt_fail(LT_EDATA, "%s is not a regular file", LT_SHORT_PATH(path));
    } else {
        *bytes = s.st_size;
        return fd;
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

/* Reads `bytes` bytes. *n is the number read, which is smaller if the file has become shorter. */
static lt_status read_all(int fd, const char *path, uint8_t *data, size_t bytes, size_t *n)
{
    for (*n = 0; *n < bytes;) {
        ssize_t got = read(fd, data + *n, bytes - *n);
        if (got < 0 && errno != EINTR)
            return lt_fail(LT_EDATA, "cannot read %s: %s", LT_SHORT_PATH(path), strerror(errno));
        if (got == 0)
            break;
        *n += got > 0 ? (size_t)got : 0;
    }
    return LT_OK;
}

lt_status lt__read_file(const char *path, size_t max, lt_bytes *buffer, size_t *n)
{
    int64_t bytes;
    lt_status status;
    int fd = lt__open_regular(path, &bytes);
    if (fd < 0)
        return lt_errcode();
    if ((uint64_t)bytes > max)
        status = lt_fail(LT_EDATA, "%s has %lld bytes; luatrain accepts at most %zu",
                         LT_SHORT_PATH(path), (long long)bytes, max);
    else if (!lt__bytes_reserve(buffer, (size_t)bytes))
        status = lt_errcode();
    else
        status = read_all(fd, path, buffer->data, (size_t)bytes, n);
    close(fd);
    return status;
}
