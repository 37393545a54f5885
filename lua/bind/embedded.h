/* embedded.h - the library's Lua files, embedded in the binary as text. */
#ifndef LT_LUA_BIND_EMBEDDED_H
#define LT_LUA_BIND_EMBEDDED_H

#include <stddef.h>

#define LT_EMBEDDED "=luatrain/" /* prefix of their chunk names */

typedef struct lt_embedded {
    const char *name, *text; /* name, without "luatrain.", such as "train.run"; source */
    size_t length;           /* length of text in bytes */
} lt_embedded;
extern const lt_embedded lt__embedded[]; /* all files; the last name is NULL */

#endif
