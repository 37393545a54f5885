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

#include "dist/dist.h"

typedef struct lt_board lt_board;

/* Bytes of a board for so many ranks. */
size_t lt__board_bytes(int size);
/* Makes one of zeroed memory that is aligned to 128 bytes. Its first failure is not set. */
void lt__board_init(lt_board *board, int size);

typedef struct lt_team {  /* one rank's view */
    lt_board *board;
    int rank, size;
    double timeout;       /* seconds */
    bool spin;            /* there is a core for each thread */
    uint32_t wishes;      /* collectives so far */
    uint64_t bytes;       /* that others have had of this rank, and it of them */
    /* Where rank's data is that it has called `place`; NULL: place is the address itself, for
     * threads. */
    void *(*find)(void *ud, int rank, uint64_t place);
    bool (*lives)(void *ud, int rank); /* NULL for threads, which live as long as we do */
    void *ud;
} lt_team;

lt_status lt__team_allreduce(lt_team *team, const lt_sum *sum);
lt_status lt__team_broadcast(lt_team *team, const char *what, void *data, size_t bytes, int root);
lt_status lt__team_barrier(lt_team *team, const char *what);
lt_status lt__team_send(lt_team *team, int to, const void *data, size_t bytes);
lt_status lt__team_receive(lt_team *team, int from, void *data, size_t bytes);

/* The first failure of the job: set unless there is one already. */
void lt__team_fail(lt_team *team, int rank, lt_status code, const char *text);
bool lt__team_failure(const lt_team *team, int *rank, lt_status *code, char *text, size_t bytes);
void lt__team_at(lt_team *team, const char *where, int64_t step);
/* Nobody is to wait for this rank any more. */
void lt__team_leave(lt_team *team);

#endif
