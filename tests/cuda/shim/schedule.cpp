/* schedule.cpp - when the work in the emulated streams runs. */
#include <stdio.h>
#include <stdlib.h>

#include <random>

#include "shim.h"

shim_schedule shim_when;
static std::minstd_rand numbers;

size_t shim_draw(size_t n) { return numbers() % n; }

extern "C" void shim_set_schedule(const char *schedule)
{
    unsigned seed = 0;
    bool is_random = sscanf(schedule, "random:%u", &seed) == 1;
    shim_when = is_random ? SHIM_RANDOM : strcmp(schedule, "eager") == 0 ? SHIM_EAGER : SHIM_LAZY;
    shim_is_null = strcmp(schedule, "null") == 0;
    if (shim_when == SHIM_LAZY && !shim_is_null && strcmp(schedule, "lazy") != 0) {
        fprintf(stderr, "the schedule must be lazy, eager, random:SEED or null, not '%s'\n",
                schedule);
        abort();
    }
    numbers.seed(seed);
    shim_set_order(is_random ? 2 + (int)seed : 0);
}

/* The variable SHIM sets the schedule of a program. */
static const bool is_scheduled = getenv("SHIM") && (shim_set_schedule(getenv("SHIM")), true);
