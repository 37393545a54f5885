/* locale.h - a locale with decimal commas for C tests. */
#ifndef TESTS_LOCALE_H
#define TESTS_LOCALE_H

#include <limits.h>
#include <locale.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/lt_test.h"

/* Sets the locale de_DE.UTF-8 from tests/locale in the build folder, or skips the test. */
static inline void use_commas(void)
{
    char path[PATH_MAX + 8];
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX);
    CHECK(n > 0);
    path[n] = '\0';
    for (int up = 0; up < 2; up++) /* from tests/MODULE/test_x */
        *strrchr(path, '/') = '\0';
    strcat(path, "/locale");
    setenv("LOCPATH", path, 1);
    if (!setlocale(LC_ALL, "de_DE.UTF-8"))
        SKIP("a locale with decimal commas: %s has none (tools/setup installs its sources)", path);
    CHECK_STR(localeconv()->decimal_point, ",");
}

static inline void use_c_locale(void) { setlocale(LC_ALL, "C"); }

#endif
