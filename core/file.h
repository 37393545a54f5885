/* file.h - what reading (file.c) and writing (save.c) of safetensors files share; private to core.
 */
#ifndef LT_CORE_FILE_H
#define LT_CORE_FILE_H

#include "core/tensor.h"

#define LT_MAX_HEADER 100000000 /* bytes; the format's own limit */
#define LT_MAX_NAMES 16384      /* tensors, and as many metadata */
#define LT_METADATA "__metadata__"

/* The digest of a file of ours is its first piece of metadata: LT_DIGEST_BEGIN, its 64 digits and a
 * quote begin the header, so its digits lie at byte LT_DIGEST_AT of the file. It is SHA-256 of the
 * whole file with '0' for each of them. */
#define LT_DIGEST "sha256"
#define LT_DIGEST_BEGIN "{\"" LT_METADATA "\":{\"" LT_DIGEST "\":\""
#define LT_DIGEST_ZEROS "0000000000000000000000000000000000000000000000000000000000000000"
enum { LT_DIGITS = 64, LT_DIGEST_AT = sizeof(uint64_t) + sizeof LT_DIGEST_BEGIN - 1 };

typedef unsigned long long lt_ull; /* for %llu */

/* The format's names. Others that it has (BOOL, I8, F8_E4M3, ...) are no dtypes here. */
extern const char *const lt__format_names[LT_DTYPE_COUNT];

/* LT_EFILE with "PATH: reason". */
lt_status lt__bad(const char *path, const char *fmt, ...) LT_PRINTF(2, 3);
/* A text from a file as it may be shown: not long, and without control codes for a terminal. */
const char *lt__shown(const char *text, char buffer[72]);
#define LT_SHOWN(text) lt__shown((text), (char[72]){0})

/* Bytes of the UTF-8 character at s, in memory that ends with a NUL; 0 when there is none. */
size_t lt__utf8_bytes(const char *s);
/* open(), again when it is interrupted; a new file is for whom the umask lets. */
int lt__open(const char *path, int flags);

#endif
