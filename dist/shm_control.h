/* shm_control.h - the control block of a shared-memory communicator. Shared by shm.c and
 * shm_failure.c, and by no other file.
 */
#ifndef LT_DIST_SHM_CONTROL_H
#define LT_DIST_SHM_CONTROL_H

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dist/shm.h"

enum { WHERE_WORDS = 8, TEXT_BYTES = 1024 };
enum { SLICE_NS = 100 * 1000 * 1000 }; /* longest sleep: a rank that has died does not wake us */

typedef struct view { /* how other ranks see a rank's data */
    uint64_t handle;
    bool staged; /* it is a copy in the staging buffer, as much as fits */
} view;

typedef struct mailbox {                  /* messages from one rank to another */
    _Alignas(64) atomic_uint sent, taken; /* number of chunks so far */
    size_t bytes;                         /* size of the whole message */
    view view;
} mailbox;

typedef enum state { PRESENT, QUIET, LEFT } state;

typedef struct post {                       /* what one rank has posted in one channel */
    _Alignas(128) atomic_uint posted, done; /* number of collectives so far */
    lt_coll_sig sig;
    double scale;
    view view;
} post;

typedef struct slot {
    post channel[LT_SHM_CHANNELS];
    _Alignas(128) atomic_int state;
    _Atomic int64_t step;
    _Atomic uint64_t where[WHERE_WORDS];     /* text; other ranks may read it at any time */
    atomic_int owner;                        /* 1 + its rank in the job; 0: not known yet */
    atomic_int awaited[LT_SHM_CHANNELS + 1]; /* see lt__shm_set_awaited() */
} slot;

typedef enum failing { FINE, FAILED, WRITING /* + the slot that writes */ } failing;

struct lt_shm_control {
    _Alignas(128) atomic_uint futex; /* number of changes so far */
    atomic_uint sleepers;
    atomic_int reporter;              /* 1 + its slot, or 0 */
    _Alignas(128) atomic_int failing; /* see enum failing */
    int size, failed_rank;
    lt_status failed_code;
    char failed_text[TEXT_BYTES];
    slot slot[]; /* (size), followed by mailboxes (sender, receiver) */
};

/* ==== The futex =============================================================================== */

static inline void wake_all(lt_shm_control *b)
{
    atomic_fetch_add(&b->futex, 1);
    if (atomic_load(&b->sleepers) > 0)
        syscall(SYS_futex, &b->futex, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Sleeps until the futex is no longer at `seen_value`, at most SLICE_NS. Returns whether it slept
 * that long. */
static inline bool sleep_on_futex(lt_shm_control *b, unsigned seen_value)
{
    struct timespec slice = {.tv_nsec = SLICE_NS};
    atomic_fetch_add(&b->sleepers, 1);
    bool over = syscall(SYS_futex, &b->futex, FUTEX_WAIT, seen_value, &slice, NULL, 0) != 0 &&
                errno == ETIMEDOUT;
    atomic_fetch_sub(&b->sleepers, 1);
    return over;
}

/* ==== Ranks and slots ========================================================================= */

static inline lt_shm_control *job_of(const lt_shm *shm)
{
    return shm->job ? shm->job : shm->control;
}
static inline int rank_of(const lt_shm *shm, int who)
{
    return shm->rank_of ? shm->rank_of[who] : who;
}

/* The slot in the job of the rank in slot `who`. */
static inline int slot_of(const lt_shm *shm, int who)
{
    return shm->slot_of ? shm->slot_of[who] : who;
}

static inline slot *in_job(const lt_shm *shm, int who)
{
    return &job_of(shm)->slot[slot_of(shm, who)];
}

/* Whether the process of a slot in the job has died. */
static inline bool has_died(const lt_shm *shm, int which)
{
    return shm->is_alive && !shm->is_alive(shm->ud, which);
}

static inline bool is_lost(const lt_shm *shm, int who) { return has_died(shm, slot_of(shm, who)); }

static inline bool has_left(const lt_shm *shm, int who)
{
    return atomic_load(&in_job(shm, who)->state) == LEFT;
}

/* Records this thread's error as the failure of the job, caused by the rank in slot `who`. */
static inline lt_status fail_with(lt_shm *shm, int who, lt_status code)
{
    lt__shm_fail(shm, rank_of(shm, who), code, lt_errmsg());
    return code;
}

#endif
