/* server_sum.h - the allreduce of a synchronous parameter server. Private to dist.
 *
 * Rank 0 is the server: every other rank sends its array to rank 0, which adds all of them and
 * sends the sum back to each. It is a baseline: rank 0 sends and receives size - 1 arrays, where
 * each rank of a ring sends less than two.
 */
#ifndef LT_DIST_SERVER_SUM_H
#define LT_DIST_SERVER_SUM_H

#include "dist/dist.h"

typedef struct lt_server_sum { /* all zeros: no memory yet */
    char *memory; /* on rank 0: the arrays of the others; and an array in the wire dtype */
    size_t capacity;
} lt_server_sum;

/* Like lt_group_allreduce(), with the same bits as a sum of ranks on one node. The errors of
 * lt_group_send(); LT_ENOMEM. */
LT_NODISCARD lt_status lt__server_sum(lt_server_sum *server, lt_group *group, const lt_sum *sum);
void lt__server_sum_free(lt_server_sum *server);

#endif
