/* liveness.h - detects processes that have died on other nodes. Private to dist.
 *
 * The first ranks of any two nodes keep a TCP connection. After a handshake, nothing is sent on it
 * until one of them leaves. The system closes it when a process ends, for whatever reason. MPI over
 * TCP does not notice that a process was killed on another machine; its messages just do not
 * arrive. If a connection cannot be made, for example because of a firewall or without IPv4, a lost
 * process is only detected by the timeout of the group.
 */
#ifndef LT_DIST_LIVENESS_H
#define LT_DIST_LIVENESS_H

#include "dist/ring.h"

/* The connections of this process, one member of a ring, to the other members. */
typedef struct lt_liveness lt_liveness;

/* Connects this member of a ring to all others. A collective of the ring. Connecting takes at most
 * 2 seconds or half of the ring's timeout, whichever is less, because other ranks may be waiting
 * for the members. New. LT_ENOMEM, or the failure of the ring. */
lt_status lt__liveness_open(lt_ring *ring, lt_liveness **to);
/* NULL is allowed. */
void lt__liveness_close(lt_liveness *liveness);

/* The functions below are thread-safe. */
/* Announces to the other members that this process leaves, so that its end does not count as a
 * loss. */
void lt__liveness_leave(lt_liveness *liveness);
/* Whether the process of a member ended without leaving, and this was noticed at least `seconds`
 * ago. */
bool lt__liveness_is_lost(lt_liveness *liveness, int member, double seconds);
/* Whether there is a connection to a member and the member is not lost. */
bool lt__liveness_is_connected(lt_liveness *liveness, int member);

#endif
