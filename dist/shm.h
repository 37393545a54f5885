/* shm.h - ranks that share memory: threads of a process, or processes with a shared mapping.
 * Private to this room.
 *
 * They meet at a control block in that memory. Each rank has a slot there, which it alone writes:
 * it says what collective it wants and how far it has come, and waits until the others have said
 * the same. Then every rank does its part with the data of all, in place. Whoever changes a slot
 * rings the bell, a futex, for those who sleep. A wait ends when the others have come, or when one
 * of them has failed, left, died or is too late.
 */
#ifndef LT_DIST_SHM_H
#define LT_DIST_SHM_H

#include "dist/coll_sig.h"

typedef struct lt_shm_control lt_shm_control;

/* Bytes of a control block for so many ranks. */
size_t lt__shm_control_bytes(int size);
/* Makes one of zeroed memory that is aligned to 128 bytes. Its first failure is not set. */
void lt__shm_control_init(lt_shm_control *control, int size);

/* A slot has two channels, whose collectives take no notice of each other: two threads of a rank,
 * with a view each, may be in one of either. Failures, and who is there, are the same in both. */
enum { LT_SHM_CHANNELS = 2 };

typedef struct lt_shm {  /* one rank's view */
    lt_shm_control *control;
    int rank, size;       /* its slot, and how many there are */
    int channel;
    const int *rank_of;      /* of the rank in each slot, for messages; NULL: the slot's own */
    double timeout;       /* seconds */
    double grace;         /* and a few more, for those who wait for one that waits for others */
    bool spin;            /* there is a CPU to burn */
    uint32_t collectives;      /* collectives so far */
    uint64_t bytes;       /* that others have had of this rank, and it of them */
    /* For processes, which see of each other what lies in shared memory: what lies elsewhere goes
     * over the staging buffer, a piece of it, a part at a time. Threads see everything by its
     * address and live as long as we do: for them this is NULL. */
    uint64_t (*handle_of)(void *ud, const void *data); /* what others find it by; 0: not at all */
    void *(*map)(void *ud, int slot, uint64_t place); /* NULL with LT_ENOMEM */
    bool (*is_alive)(void *ud, int slot);
    void *ud;
    char *staging;
    size_t staging_bytes;   /* a multiple of 64 */
} lt_shm;

lt_status lt__shm_allreduce(lt_shm *shm, const lt_sum *sum);
/* From the rank in slot `root`. */
lt_status lt__shm_broadcast(lt_shm *shm, const char *what, void *data, size_t bytes, int root);
/* All are there, and want the same. */
lt_status lt__shm_match(lt_shm *shm, const lt_coll_sig *sig);
lt_status lt__shm_send(lt_shm *shm, int to, const void *data, size_t bytes);
lt_status lt__shm_receive(lt_shm *shm, int from, void *data, size_t bytes);

/* The first failure of the job: set unless there is one already. rank: its name. */
void lt__shm_fail(lt_shm *shm, int rank, lt_status code, const char *text);
bool lt__shm_failure(const lt_shm *shm, int *rank, lt_status *code, char *text, size_t bytes);
bool lt__shm_has_failed(const lt_shm *shm);
/* LT_OK while nobody has failed; else what those who have not are to say of it. */
lt_status lt__shm_check(const lt_shm *shm);
/* One that has died is a failure, though nobody waits for it. */
void lt__shm_check_liveness(lt_shm *shm);
void lt__shm_set_location(lt_shm *shm, const char *where, int64_t step);
/* Where the rank in a slot said it was: "; it was last seen at train.lua:31, step 7", or "". */
const char *lt__shm_last_seen(const lt_shm *shm, int slot, char text[LT_SEEN_BYTES]);
/* After a failure: whether this rank is the one to tell the user. It is not before the others have
 * no more to say, they are not before it has left; or so many seconds are over. */
bool lt__shm_is_reporter(lt_shm *shm, double seconds);
/* Nobody is to wait for this rank any more. */
void lt__shm_leave(lt_shm *shm);
/* Whether all ranks have. */
bool lt__shm_has_left(const lt_shm *shm);

#endif
