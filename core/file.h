/* file.h - shared by the reader (file.c) and the writer (save.c) of safetensors files; private to
 * core.
 */
#ifndef LT_CORE_FILE_H
#define LT_CORE_FILE_H

#include "core/tensor.h"

#define LT_MAX_HEADER 100000000 /* bytes; the format's own limit */
#define LT_MAX_NAMES 16384      /* limit for tensors, and for metadata entries */
#define LT_METADATA "__metadata__"

/* Files that we write store a digest as their first metadata entry: the header begins with
 * LT_DIGEST_BEGIN, 64 hex digits and a quote, so the digits start at byte LT_DIGEST_AT of the file.
 * The digest is the SHA-256 of the whole file with '0' in place of each of these digits. */
#define LT_DIGEST "sha256"
#define LT_DIGEST_BEGIN "{\"" LT_METADATA "\":{\"" LT_DIGEST "\":\""
#define LT_DIGEST_ZEROS "0000000000000000000000000000000000000000000000000000000000000000"
enum { LT_DIGITS = 64, LT_DIGEST_AT = sizeof(uint64_t) + sizeof LT_DIGEST_BEGIN - 1 };

typedef unsigned long long lt_ull; /* for %llu */

/* The dtype names of the format. Its other dtypes (BOOL, I8, F8_E4M3, ...) are not supported. */
extern const char *const lt__format_names[LT_DTYPE_COUNT];

/* Fails with LT_EFILE and "PATH: reason". */
lt_status lt__bad(const char *path, const char *fmt, ...) LT_PRINTF(2, 3);
/* The format of a file with these first 8 bytes, for messages: "a GGUF file, not a safetensors
 * file; ...", and how to convert it. A static string. */
const char *lt__kind_of(const char begin[8]);
/* Makes a string from a file safe to show: truncated, and without terminal control codes. */
const char *lt__printable(const char *text, char buffer[72]);
#define LT_PRINTABLE(text) lt__printable((text), (char[72]){0})

/* The length in bytes of the UTF-8 character at s, or 0 if it is invalid. The text ends with a
 * NUL. */
size_t lt__utf8_bytes(const char *s);
/* open(), retried after EINTR. New files get the permissions that the umask allows. */
int lt__open(const char *path, int flags);

#endif
