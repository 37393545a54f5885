/* shm.h - the shared-memory communicator, for ranks that are threads of a process or processes with
 * a shared mapping. Private to dist.
 *
 * The ranks synchronize through a control block in shared memory. Each rank has a slot in it, which
 * only that rank writes. A rank posts the signature of a collective in its slot and waits until all
 * others have posted the same. Then each rank does its part of the work in place, on the data of
 * all ranks. After changing a slot, a rank wakes sleeping ranks with a futex. A wait ends when the
 * other ranks have arrived, or when one of them has failed, left, died or timed out.
 */
#ifndef LT_DIST_SHM_H
#define LT_DIST_SHM_H

#include "dist/coll_sig.h"

typedef struct lt_shm_control lt_shm_control;

/* The size in bytes of a control block for `size` ranks. */
size_t lt__shm_control_bytes(int size);
/* Initializes a control block in zeroed memory that is aligned to 128 bytes. */
void lt__shm_control_init(lt_shm_control *control, int size);

/* The ranks of a job may also form smaller communicators: the parts of a split, see
 * lt__group_split(). A part has a control block of its own for its collectives and messages.
 * Failures, the state of ranks and their locations are only in the control block of the job. A
 * failure does not wake the sleeping ranks of a part, but they look for one ten times a second. */

/* A slot has two channels, whose collectives are independent: two threads of a rank may be in a
 * collective at once, each in its own channel and with its own lt_shm. Failures and the state of
 * ranks are common to both. */
enum { LT_SHM_CHANNELS = 2 };

typedef struct lt_shm { /* one rank's view of the communicator */
    lt_shm_control *control;
    int rank, size; /* the slot of this rank; number of slots */
    int channel;
    const int *rank_of;     /* (size) rank of each slot in the job; NULL if they are equal */
    lt_shm_control *job;    /* the control block of the job, for a part of it; or NULL */
    const int *slot_of;     /* for a part: (size) each slot's slot in the job; or NULL */
    double timeout;         /* seconds until a wait fails */
    double grace;           /* extra seconds, for a rank that may itself be waiting for others */
    bool spin;              /* waits may spin before they sleep */
    uint32_t collectives;   /* number of collectives so far */
    _Atomic uint64_t bytes; /* bytes exchanged with other ranks so far */
    /* For ranks that are processes; NULL for threads. A process can access the memory of another
     * process only if it is shared. Data elsewhere is copied through the staging buffer, one chunk
     * at a time. Threads access all data by its address and do not die alone. `slot` is a slot in
     * the job. */
    uint64_t (*handle_of)(void *ud, const void *data); /* 0 if data is not in shared memory */
    void *(*map)(void *ud, int slot, uint64_t place);  /* address of a handle; NULL with LT_EENV */
    bool (*is_alive)(void *ud, int slot);
    /* Called ten times a second while a wait sleeps; looks for failures elsewhere. May be NULL */
    void (*poll)(void *ud);
    void *ud;
    char *staging;
    size_t staging_bytes; /* a multiple of 64 */
} lt_shm;

/* Collectives of all slots. LT_EDESYNC, LT_EPEER, or the code with which `map` failed. */
lt_status lt__shm_allreduce(lt_shm *shm, const lt_sum *sum);
/* From the rank in slot `root`. */
lt_status lt__shm_broadcast(lt_shm *shm, const char *what, void *data, size_t bytes, int root);
/* A barrier that also checks that all ranks have the same signature. */
lt_status lt__shm_match(lt_shm *shm, const lt_coll_sig *sig);
/* `to` and `from` are slots. lt__shm_send() returns when the receiver has copied data. */
lt_status lt__shm_send(lt_shm *shm, int to, const void *data, size_t bytes);
lt_status lt__shm_receive(lt_shm *shm, int from, void *data, size_t bytes);

/* Sets the failure of the job; does nothing if there is one already. rank: number in the group. */
void lt__shm_fail(lt_shm *shm, int rank, lt_status code, const char *text);
/* The first failure; arguments and result as in lt_group_failure(). */
bool lt__shm_failure(const lt_shm *shm, int *rank, lt_status *code, char *text, size_t bytes);
bool lt__shm_has_failed(const lt_shm *shm);
/* LT_OK if there is no failure; otherwise the error that the other ranks report. */
lt_status lt__shm_check(const lt_shm *shm);
/* Records a failure if a rank has died, even if no rank waits for it. */
void lt__shm_check_liveness(lt_shm *shm);
void lt__shm_set_location(lt_shm *shm, const char *where, int64_t step);
/* Writes the last location of a rank of the job to text, for the end of a message: "; it was last
 * seen at train.lua:31, step 7", or "" if it is not known here. Returns text. */
const char *lt__shm_last_seen(const lt_shm *shm, int rank, char text[LT_SEEN_BYTES]);
/* Tells the other ranks of this node that this rank waits for `rank`, a rank of the job, so that
 * they can name the rank that holds them all up; -1: the wait is over. channel: of the collective,
 * or LT_SHM_CHANNELS if it waits for a message. */
void lt__shm_set_awaited(lt_shm *shm, int channel, int rank);
/* The rank of the job that holds up `rank`: the last one in the chain of ranks in which each waits
 * for the next. `rank` itself if it is not known to wait, or if the chain is a cycle. seen: where
 * the result was last seen, as by lt__shm_last_seen(). */
int lt__shm_find_hung(const lt_shm *shm, int rank, char seen[LT_SEEN_BYTES]);
/* Like lt_group_is_reporter(), for the ranks of this communicator. */
bool lt__shm_is_reporter(lt_shm *shm, double seconds);
/* Declares that this rank takes no further part, so that others do not wait for it. */
void lt__shm_leave(lt_shm *shm);
/* Whether all ranks have left. */
bool lt__shm_has_left(const lt_shm *shm);
/* Whether this rank of the job, which may have no slot, has left. */
bool lt__shm_rank_has_left(const lt_shm *shm, int rank);

#endif
