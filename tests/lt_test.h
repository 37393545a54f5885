/* lt_test.h - the C test runner. Include it in the only source file of a test program.
 *
 *     TEST(sum_of_an_empty_tensor_is_zero)
 *     {
 *         CHECK(x != NULL);
 *         CHECK_EQ(lt_count(x), 0);
 *     }
 *
 * Tests register themselves and run in file order; `./test_x NAME...` runs only the named ones. A
 * failed check prints file:line and ends its test, even from a helper function. In a thread that
 * the test created, it prints and records the failure, and the thread continues. Arguments are
 * evaluated once. The last line is `N passed, N failed, N skipped`; the exit code is 1 if a test
 * failed.
 */
#ifndef LT_TEST_H
#define LT_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

typedef struct lt_test {
    const char *name;
    void (*body)(void);
    struct lt_test *next;
} lt_test;

static lt_test *test_first;
__attribute__((unused)) static lt_test **test_end = &test_first; /* by a program without tests */
static atomic_bool test_failed, test_skipped;
static _Thread_local jmp_buf *test_exit; /* NULL in threads that a test created */

#define TEST(title)                                                                                \
    static void test_body_##title(void);                                                           \
    __attribute__((constructor)) static void test_add_##title(void)                                \
    {                                                                                              \
        static lt_test test = {#title, test_body_##title, NULL};                                   \
        *test_end = &test;                                                                         \
        test_end = &test.next;                                                                     \
    }                                                                                              \
    static void test_body_##title(void)

LT_PRINTF(4, 5)
static inline void test_leave(atomic_bool *to, const char *file, int line, const char *fmt, ...)
{
    char text[4096];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (to == &test_skipped)
        printf("skipped: %s\n", text);
    else
        printf("%s:%d: %s\n", file, line, text);
    *to = true;
    if (test_exit)
        longjmp(*test_exit, 1);
}

/* Both print a reason, formatted as by printf, and end the test. */
#define FAIL(...) test_leave(&test_failed, __FILE__, __LINE__, __VA_ARGS__)
#define SKIP(...) test_leave(&test_skipped, __FILE__, __LINE__, __VA_ARGS__)

#define CHECK(cond) ((cond) ? (void)0 : FAIL("%s is false", #cond))

#define IS_INTEGER(x) _Generic((x), float : false, double : false, default : true)

/* Returns n if one of every n cases is enough, because the test runs with sanitizers and all cases
 * run without: tools/test sets LUATRAIN_TEST_FEW=1. Otherwise 1. */
static inline int test_stride(int n)
{
    const char *few = getenv("LUATRAIN_TEST_FEW");
    return few && strcmp(few, "1") == 0 ? n : 1;
}

/* Checks that two integers are equal. For floats, use CHECK_NEAR with a tolerance of 0. */
#define CHECK_EQ(got, want)                                                                        \
    do {                                                                                           \
        _Static_assert(IS_INTEGER(got) && IS_INTEGER(want), "for integers; use CHECK_NEAR");       \
        long long got_ = (long long)(got), want_ = (long long)(want);                              \
        if (got_ != want_)                                                                         \
            FAIL("%s is %lld, not %s = %lld", #got, got_, #want, want_);                           \
    } while (0)

/* Checks that two numbers differ by at most tolerance. Equal infinities pass; NaN always fails. */
#define CHECK_NEAR(got, want, tolerance)                                                           \
    do {                                                                                           \
        double got_ = (got), want_ = (want), tolerance_ = (tolerance);                             \
        if (got_ != want_ && !(fabs(got_ - want_) <= tolerance_))                                  \
            FAIL("%s is %.17g, not %.17g (tolerance %g)", #got, got_, want_, tolerance_);          \
    } while (0)

/* Checks that two strings are equal. */
#define CHECK_STR(got, want)                                                                       \
    do {                                                                                           \
        const char *got_ = (got), *want_ = (want);                                                 \
        if (!got_ || strcmp(got_, want_) != 0)                                                     \
            FAIL("%s is \"%s\", not \"%s\"", #got, got_ ? got_ : "(NULL)", want_);                 \
    } while (0)

/* Checks that the call succeeds; otherwise prints its message. */
#define CHECK_OK(call) ((call) == LT_OK ? (void)0 : FAIL("%s failed: %s", #call, lt_errmsg()))

/* Checks that the call fails with this code and with a message that contains text. */
#define CHECK_FAILS(call, code, text)                                                              \
    do {                                                                                           \
        lt_status got_ = (call);                                                                   \
        if (got_ != (code))                                                                        \
            FAIL("%s gave '%s': %s", #call, lt_status_text(got_), lt_errmsg());                    \
        CHECK_MSG(text);                                                                           \
    } while (0)

/* The same for a call that returns NULL if it fails. */
#define CHECK_NULL(call, code, text) CHECK_FAILS((call) ? LT_OK : lt_errcode(), code, text)

/* Checks that this thread's last message contains text. */
#define CHECK_MSG(text)                                                                            \
    do {                                                                                           \
        const char *want_text_ = (text);                                                           \
        if (!strstr(lt_errmsg(), want_text_))                                                      \
            FAIL("the message is \"%s\", without \"%s\"", lt_errmsg(), want_text_);                \
    } while (0)

/* Releases tensors. */
#define RELEASE(...)                                                                               \
    test_release((lt_tensor *[]){__VA_ARGS__}, sizeof((lt_tensor *[]){__VA_ARGS__}))
static inline void test_release(lt_tensor **list, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof *list; i++)
        lt_release(list[i]);
}

/* Frees a context, and checks that none of its memory was in use. */
#define CLOSE_CTX(ctx)                                                                             \
    do {                                                                                           \
        lt_ctx *ctx_ = (ctx);                                                                      \
        CHECK_EQ(lt_memory_stats(ctx_).live, 0);                                                   \
        lt_ctx_free(ctx_);                                                                         \
    } while (0)

/* A test of an object, declared as `object`, which `open` makes before it and `close` frees after
 * it. */
#define TEST_WITH(title, object, open, close)                                                      \
    static void test_with_##title(object);                                                         \
    TEST(title)                                                                                    \
    {                                                                                              \
        __auto_type object_ = (open);                                                              \
        CHECK(object_ != NULL);                                                                    \
        test_with_##title(object_);                                                                \
        close(object_);                                                                            \
    }                                                                                              \
    static void test_with_##title(object)
/* The same for a struct; close gets the address of the one that open made. */
#define TEST_WITH_STRUCT(title, object, open, close)                                               \
    static void test_with_##title(object);                                                         \
    TEST(title)                                                                                    \
    {                                                                                              \
        __auto_type object_ = (open);                                                              \
        test_with_##title(object_);                                                                \
        close(&object_);                                                                           \
    }                                                                                              \
    static void test_with_##title(object)
/* A test of a bare context, ctx. */
#define TEST_CTX(title) TEST_WITH(title, lt_ctx *ctx, lt_ctx_new(NULL), CLOSE_CTX)

static inline bool test_wanted(const lt_test *test, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], test->name) == 0)
            return true;
    return argc == 1;
}

int main(int argc, char **argv)
{
    static int passed, failed, skipped; /* static: preserved by longjmp */
    setvbuf(stdout, NULL, _IOLBF, 0);   /* so that a crash loses no line */
    for (lt_test *volatile t = test_first; t; t = t->next) {
        jmp_buf here;
        if (!test_wanted(t, argc, argv))
            continue;
        test_failed = test_skipped = false;
        test_exit = &here;
        if (setjmp(here) == 0)
            t->body();
        *(test_failed ? &failed : test_skipped ? &skipped : &passed) += 1;
        printf("%s %s\n", test_failed ? "FAIL" : test_skipped ? "skip" : "ok", t->name);
    }
    if (passed + failed + skipped < argc - 1) {
        printf("FAIL: unknown test name\n");
        failed++;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}

#endif
