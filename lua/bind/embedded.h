/* embedded.h - the Lua half of the library, as text inside the binary. */
#ifndef LT_LUA_BIND_EMBEDDED_H
#define LT_LUA_BIND_EMBEDDED_H

#include <stddef.h>

#define LT_EMBEDDED "=luatrain/" /* begins the names of their chunks */

typedef struct lt_embedded { const char *name, *text; size_t length; } lt_embedded;
extern const lt_embedded lt__embedded[]; /* ends with a NULL name */

#endif
