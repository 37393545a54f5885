/* liveness.h - a connection between the first ranks of each two nodes, over which nothing is sent
 * before they part: the system closes it when a process ends, however that comes. Private to this
 * room.
 *
 * MPI over TCP does not miss a process that was killed on another machine: what was to come from it
 * is only late. A connection that cannot be made is none, as behind a firewall or without IPv4, and
 * --timeout remains.
 */
#ifndef LT_DIST_LIVENESS_H
#define LT_DIST_LIVENESS_H

#include "dist/ring.h"

typedef struct lt_liveness lt_liveness; /* NULL: there are none */

/* From this member of a ring to all others: a collective, which takes 2 seconds at most, or half of
 * the ring's timeout, as others may wait for those who are at it. New.
 * LT_ENOMEM, or why the members did not come together. */
lt_status lt__liveness_open(lt_ring *ring, lt_liveness **liveness);
void lt__liveness_close(lt_liveness *liveness);

/* Both safe in any thread. When this process ends, others are not to miss it. */
void lt__liveness_leave(lt_liveness *liveness);
/* Whether the process of a member has ended and did not part, and this was known so many seconds
 * ago. */
bool lt__liveness_is_lost(lt_liveness *liveness, int member, double seconds);
/* Whether there is one, and it is not cut. */
bool lt__liveness_is_connected(lt_liveness *liveness, int member);

#endif
