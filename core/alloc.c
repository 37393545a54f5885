/* alloc.c - memory of the system; see alloc.h. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/alloc.h"

static lt_status no_memory(const char *what, va_list args)
{
    char text[256];
    vsnprintf(text, sizeof text, what, args);
    return lt_fail(LT_ENOMEM, "out of memory %s", text);
}

void *lt__calloc(size_t n, size_t size, const char *what, ...)
{
    va_list args;
    void *p = calloc(n > 0 ? n : 1, size);
    va_start(args, what);
    if (!p)
        no_memory(what, args);
    va_end(args);
    return p;
}

/* list points to a pointer of any type. */
static lt_status resize(void *list, size_t n, size_t size, const char *what, va_list args)
{
    void *p;
    memcpy(&p, list, sizeof p);
    size_t bytes = 0;
    bool fits = !__builtin_mul_overflow(n, size, &bytes);
    if (!fits || !(p = realloc(p, bytes > 0 ? bytes : 1)))
        return no_memory(what, args);
    memcpy(list, &p, sizeof p);
    return LT_OK;
}

lt_status lt__resize(void *list, size_t n, size_t size, const char *what, ...)
{
    va_list args;
    va_start(args, what);
    lt_status status = resize(list, n, size, what, args);
    va_end(args);
    return status;
}

lt_status lt__reserve(void *list, size_t n, size_t *capacity, size_t size, const char *what, ...)
{
    va_list args;
    if (n <= *capacity)
        return LT_OK;
    size_t room = LT_MAX(n, *capacity > 0 ? 2 * *capacity : 16);
    va_start(args, what);
    lt_status status = resize(list, room, size, what, args);
    va_end(args);
    if (status == LT_OK)
        *capacity = room;
    return status;
}
