/* active_clock.c - a clock that does not count suspended time; see active_clock.h. */
#include <time.h>

#include "core/tensor.h"
#include "dist/async/active_clock.h"

static const double LONGEST_SECONDS = 1; /* longest time between calls without CPU use */

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

double lt__active_seconds(lt_active_clock *c)
{
    double now = lt__seconds(), cpu = cpu_seconds();
    double idle = c->now > 0 ? now - c->now - (cpu - c->cpu) : 0;
    if (idle > LONGEST_SECONDS)
        c->suspended += idle;
    c->now = now;
    c->cpu = cpu;
    return now - c->suspended;
}
