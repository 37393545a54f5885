/* numbers.h - a source of numbers, for tests of batches. */
#ifndef TESTS_DATA_NUMBERS_H
#define TESTS_DATA_NUMBERS_H

#include <signal.h>
#include <unistd.h>

#include "data/source.h"
#include "tests/lt_test.h"

/* A source of 1x1x1 images whose byte and label are the image's number. Reading an image takes
 * `pause` microseconds, and fails from number fail_at on. */
typedef struct numbers {
    lt_source base;
    int64_t fail_at;
    unsigned pause;
    atomic_int reads;
    atomic_bool open_to_signals, freed;
} numbers;

static inline lt_status read_number(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                                    lt_image *image, int64_t *label)
{
    numbers *s = (numbers *)source;
    sigset_t blocked;
    *label = i;
    if (!image)
        return LT_OK;
    uint8_t *pixel = lt__bytes_reserve(&buffers->decoded, 1);
    s->reads++;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (!sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGTERM))
        s->open_to_signals = true;
    if (s->pause > 0)
        usleep(s->pause);
    if (i >= s->fail_at)
        return lt_fail(LT_EDATA, "number %d is bad", (int)i);
    *pixel = (uint8_t)i;
    *image = (lt_image){pixel, LT_U8, 1, 1, 1};
    return LT_OK;
}

static inline void free_numbers(lt_source *source) { ((numbers *)source)->freed = true; }

static inline numbers numbers_to(int64_t count)
{
    return (numbers){.base = {.refs = 1,
                              .count = count,
                              .h = 1,
                              .w = 1,
                              .c = 1,
                              .dtype = LT_U8,
                              .in_files = true,
                              .read = read_number,
                              .free = free_numbers},
                     .fail_at = count};
}

#endif
