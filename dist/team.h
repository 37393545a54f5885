/* team.h - ranks that share memory: threads of a process, or processes with a shared mapping.
 * Private to this room.
 *
 * They meet at a board in that memory. Each rank has a seat there, which it alone writes: it says
 * what collective it wants and how far it has come, and waits until the others have said the same.
 * Then every rank does its part with the data of all, in place. Whoever changes a seat rings the
 * bell, a futex, for those who sleep. A wait ends when the others have come, or when one of them
 * has failed, left, died or is too late.
 */
#ifndef LT_DIST_TEAM_H
#define LT_DIST_TEAM_H

#include "dist/wish.h"

typedef struct lt_board lt_board;

/* Bytes of a board for so many ranks. */
size_t lt__board_bytes(int size);
/* Makes one of zeroed memory that is aligned to 128 bytes. Its first failure is not set. */
void lt__board_init(lt_board *board, int size);

/* A seat has two lanes, whose collectives take no notice of each other: two threads of a rank, with
 * a view each, may be in one of either. Failures, and who is there, are the same in both. */
enum { LT_LANES = 2 };

typedef struct lt_team {  /* one rank's view */
    lt_board *board;
    int rank, size;       /* its seat, and how many there are */
    int lane;
    const int *name;      /* of the rank in each seat, for messages; NULL: the seat's own */
    double timeout;       /* seconds */
    double grace;         /* and a few more, for those who wait for one that waits for others */
    bool spin;            /* there is a CPU to burn */
    uint32_t wishes;      /* collectives so far */
    uint64_t bytes;       /* that others have had of this rank, and it of them */
    /* For processes, which see of each other what lies in shared memory: what lies elsewhere goes
     * over the stage, a piece of it, a part at a time. Threads see everything by its address and
     * live as long as we do: for them this is NULL. */
    uint64_t (*place)(void *ud, const void *data);     /* what others find it by; 0: not at all */
    void *(*find)(void *ud, int seat, uint64_t place); /* NULL with LT_ENOMEM */
    bool (*lives)(void *ud, int seat);
    void *ud;
    char *stage;
    size_t stage_bytes;   /* a multiple of 64 */
} lt_team;

lt_status lt__team_allreduce(lt_team *team, const lt_sum *sum);
/* From the rank in seat `root`. */
lt_status lt__team_broadcast(lt_team *team, const char *what, void *data, size_t bytes, int root);
/* All are there, and want the same. */
lt_status lt__team_agree(lt_team *team, const lt_wish *wish);
lt_status lt__team_send(lt_team *team, int to, const void *data, size_t bytes);
lt_status lt__team_receive(lt_team *team, int from, void *data, size_t bytes);

/* The first failure of the job: set unless there is one already. rank: its name. */
void lt__team_fail(lt_team *team, int rank, lt_status code, const char *text);
bool lt__team_failure(const lt_team *team, int *rank, lt_status *code, char *text, size_t bytes);
bool lt__team_is_failing(const lt_team *team);
/* LT_OK while nobody has failed; else what those who have not are to say of it. */
lt_status lt__team_check(const lt_team *team);
/* One that has died is a failure, though nobody waits for it. */
void lt__team_watch(lt_team *team);
void lt__team_at(lt_team *team, const char *where, int64_t step);
/* Where the rank in a seat said it was: "; it was last seen at train.lua:31, step 7", or "". */
const char *lt__team_last_seen(const lt_team *team, int seat, char text[LT_SEEN_BYTES]);
/* After a failure: whether this rank is the one to tell the user. It is not before the others have
 * no more to say, they are not before it has left; or so many seconds are over. */
bool lt__team_speaks(lt_team *team, double seconds);
/* Nobody is to wait for this rank any more. */
void lt__team_leave(lt_team *team);
/* Whether all ranks have. */
bool lt__team_has_left(const lt_team *team);

#endif
