/* set_locale.c - to be preloaded: makes any program one that has called setlocale(LC_ALL, ""). A
 * locale that cannot be had ends the program, so that no test passes without it. */
#include <locale.h>
#include <stdio.h>
#include <unistd.h>

__attribute__((constructor)) static void set_locale(void)
{
    if (setlocale(LC_ALL, ""))
        return;
    dprintf(STDERR_FILENO, "set_locale: the locale of LC_ALL is not here\n");
    _exit(125);
}
