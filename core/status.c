/* status.c - status codes, their texts, and the error message of each thread.
 *
 * The message and its status code are the library's only thread-local state. The buffer has a fixed
 * size, so reporting a failure cannot fail. If a prefix does not fit, the end of the message is cut
 * off, not the start.
 */
#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "core/locale.h"

enum { MESSAGE_BYTES = 2048 };

static _Thread_local char message[MESSAGE_BYTES];
static _Thread_local lt_status last;

static const struct {
    const char *name;
    int exit;
    const char *text;
} table[LT_STATUS_COUNT] = {
    [LT_OK] = {"OK", 0, "ok"},
    [LT_EINVAL] = {"EINVAL", 1, "invalid argument"},
    [LT_ESCRIPT] = {"ESCRIPT", 1, "script error"},
    [LT_EUSAGE] = {"EUSAGE", 2, "usage error"},
    [LT_EENV] = {"EENV", 3, "missing from this machine"},
    [LT_EDATA] = {"EDATA", 4, "bad data"},
    [LT_EFILE] = {"EFILE", 5, "bad checkpoint"},
    [LT_ENUMERIC] = {"ENUMERIC", 6, "non-finite number"},
    [LT_ENOMEM] = {"ENOMEM", 7, "out of memory"},
    [LT_EPEER] = {"EPEER", 8, "peer lost"},
    [LT_EDESYNC] = {"EDESYNC", 9, "ranks disagree"},
    [LT_EUNSUPPORTED] = {"EUNSUPPORTED", 1, "not supported"},
    [LT_EDONE] = {"EDONE", 0, "done early"},
    [LT_ESTOPPED] = {"ESTOPPED", 75, "stopped by a signal"},
};

const char *lt__status_name(lt_status status) { return table[status].name; }

int lt_exit_code(lt_status status)
{
    unsigned own = (unsigned)status - LT_EXIT;
    if (own < 256)
        return (int)own;
    return (unsigned)status < LT_STATUS_COUNT ? table[status].exit : 1;
}

const char *lt_status_text(lt_status status)
{
    if ((unsigned)status - LT_EXIT < 256)
        return "ended by the script";
    return (unsigned)status < LT_STATUS_COUNT ? table[status].text : "unknown status";
}

lt_status lt_fail(lt_status code, const char *fmt, ...)
{
    char fresh[MESSAGE_BYTES]; /* the arguments may point into the old message */
    va_list args;
    va_start(args, fmt);
    lt__vformat(fresh, sizeof fresh, fmt, args);
    va_end(args);
    memcpy(message, fresh, sizeof message);
    last = code;
    return code;
}

lt_status lt_fail_prefix(const char *fmt, ...)
{
    char fresh[MESSAGE_BYTES];
    va_list args;
    va_start(args, fmt);
    int n = lt__vformat(fresh, sizeof fresh, fmt, args);
    va_end(args);
    int space = (int)sizeof fresh - 3 - n; /* left for the old message */
    if (n >= 0 && space > 0)
        snprintf(fresh + n, sizeof fresh - (size_t)n, ": %.*s", space, message);
    memcpy(message, fresh, sizeof message);
    return last;
}

const char *lt_errmsg(void) { return message; }
lt_status lt_errcode(void) { return last; }

static char lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c + 'a' - 'A') : c; }

/* The number of letters to insert, remove, replace or swap with the next one, without regard to
 * case. Words are truncated to 31 letters. (Damerau 1964; optimal string alignment) */
static int distance(const char *a, const char *b)
{
    enum { LONGEST = 31 };
    int rows[3][LONGEST + 1];
    int na = (int)strnlen(a, LONGEST), nb = (int)strnlen(b, LONGEST);
    for (int j = 0; j <= nb; j++)
        rows[0][j] = j;
    for (int i = 1; i <= na; i++) {
        int *row = rows[i % 3], *before = rows[(i + 2) % 3], *first = rows[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            char x = lower(a[i - 1]), y = lower(b[j - 1]);
            row[j] = LT_MIN(before[j - 1] + (x != y), LT_MIN(row[j - 1], before[j]) + 1);
            if (i > 1 && j > 1 && x == lower(b[j - 2]) && y == lower(a[i - 2]))
                row[j] = LT_MIN(row[j], first[j - 2] + 1);
        }
    }
    return rows[na % 3][nb];
}

/* Whether name ends with word, preceded by - or _. */
static bool ends_with_word(const char *name, const char *word)
{
    size_t in_all = strlen(name), n = strlen(word);
    return n > 0 && in_all > n && strchr("-_", name[in_all - n - 1]) &&
           strcmp(name + in_all - n, word) == 0;
}

static bool begins_with(const char *name, const char *word)
{
    return strncmp(name, word, strlen(word)) == 0;
}

int lt_nearest(const char *word, const char *const *names, int n)
{
    int nearest = -1, min = 3;
    if (strlen(word) < 4)
        min = 2;
    for (int i = 0; i < n; i++) {
        int d = distance(word, names[i]);
        if (d == 2 && strlen(word) == 4 && !begins_with(names[i], word))
            continue; /* "size" and "silu" have only half of their letters in common */
        if (d < min) {
            min = d;
            nearest = i;
        }
    }
    word += strspn(word, "-");
    for (int i = 0; i < n && nearest < 0; i++)
        if (ends_with_word(names[i], word))
            nearest = i;
    return nearest;
}
