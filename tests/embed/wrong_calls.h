/* wrong_calls.h - checks for tests that call public functions with wrong arguments. A failed check
 * is printed and recorded, and the test continues, so that one run shows all of them.
 */
#ifndef LUATRAIN_TESTS_WRONG_CALLS_H
#define LUATRAIN_TESTS_WRONG_CALLS_H

#include "tests/lt_test.h"

static inline void call_is_wrong(int line, const char *call, const char *what)
{
    printf("line %d: %s %s: %s\n", line, call, what, lt_errmsg());
    test_failed = true;
}

/* Forgets the last message, so that a check cannot take it for a new one. */
static inline void forget_message(void)
{
    lt_status status = lt_fail(LT_OK, "%s", "");
    (void)status;
}

static inline void check_refused(int line, const char *call, lt_status want, lt_status got,
                                 const char *text)
{
    if (got != want || lt_errcode() != want || !strstr(lt_errmsg(), text))
        call_is_wrong(line, call, lt_status_text(got));
}

static inline void check_null(int line, const char *call, lt_status want, const void *got,
                              const char *text)
{
    if (got || lt_errcode() != want || !strstr(lt_errmsg(), text))
        call_is_wrong(line, call, got ? "is not NULL" : "is NULL");
}

static inline void check_quiet(int line, const char *call, bool is_right)
{
    if (!is_right || lt_errcode() != LT_OK)
        call_is_wrong(line, call, "is wrong, or sets a message");
}

/* The call fails with this status and a message that contains text. */
#define REFUSES(status, call, text)                                                                \
    (forget_message(), check_refused(__LINE__, #call, status, call, text))
/* The call returns NULL, with this status and a message that contains text. */
#define NONE(status, call, text) (forget_message(), check_null(__LINE__, #call, status, call, text))
/* The expression is true, and its calls set no message. */
#define QUIET(expression) (forget_message(), check_quiet(__LINE__, #expression, expression))
#endif
