/* locale.h - temporarily switches to the C locale, so that numbers have a decimal point whatever
 * the program's locale is.
 *
 * Only the locale of the calling thread changes, and it is restored afterwards. A thread that was
 * in the global locale follows setlocale() again afterwards.
 */
#ifndef LT_CORE_LOCALE_H
#define LT_CORE_LOCALE_H

#include <ctype.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/core.h"

typedef struct lt_locale {
    locale_t c, before;
} lt_locale;

/* In glibc and musl, newlocale() returns a static C locale: it allocates nothing and cannot fail.
 * Elsewhere, if it fails, uselocale() changes nothing. */
static inline lt_locale lt__enter_c_locale(void)
{
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    return (lt_locale){c, uselocale(c)};
}

static inline void lt__leave_c_locale(lt_locale l)
{
    uselocale(l.before);
    if (l.c)
        freelocale(l.c);
}

/* vsnprintf() and snprintf() in the C locale. Writes "nan" for a number "-nan", which is what
 * 0.0 / 0.0 prints as on x86. */
LT_PRINTF(3, 0)
static inline int lt__vformat(char *text, size_t bytes, const char *fmt, va_list args)
{
    lt_locale l = lt__enter_c_locale();
    int n = vsnprintf(text, bytes, fmt, args);
    lt__leave_c_locale(l);
    for (char *at = n > 0 && bytes > 0 ? text : NULL; at && (at = strstr(at, "-nan")); at++) {
        bool begins = at == text || strchr(" =,:([{", at[-1]); /* else it is within a word */
        if (!begins || isalnum((unsigned char)at[4]) || at[4] == '_')
            continue;
        memmove(at, at + 1, strlen(at));
        n--;
    }
    return n;
}

LT_PRINTF(3, 4)
static inline int lt__format(char *text, size_t bytes, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = lt__vformat(text, bytes, fmt, args);
    va_end(args);
    return n;
}

#endif
