/* set_locale.c - a preloaded library that calls setlocale(LC_ALL, "") at program start. It ends the
 * program if the locale is missing, so that no test passes without it. */
#include <locale.h>
#include <stdio.h>
#include <unistd.h>

__attribute__((constructor)) static void set_locale(void)
{
    if (setlocale(LC_ALL, ""))
        return;
    dprintf(STDERR_FILENO, "set_locale: the locale of LC_ALL is missing\n");
    _exit(125);
}
