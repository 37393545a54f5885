/* notices.h - final notices between nodes. The first rank of each node notifies the first ranks of
 * all other nodes once: that its node has left, or that it has failed and why. Private to this
 * room.
 */
#ifndef LT_DIST_NOTICES_H
#define LT_DIST_NOTICES_H

#include "dist/liveness.h"
#include "dist/shm.h"
#include "dist/net.h"

typedef struct lt_notices
    lt_notices; /* NULL if this rank is not the first of its node; calls then have no effect */

/* Opens the notices of node `node`. rank[0..n) are the first ranks of all nodes. Failures of other
 * nodes are written to shm. All arguments are borrowed until lt__notices_free(). New. NULL with
 * LT_ENOMEM or LT_EPEER. */
lt_notices *lt__notices_open(const lt_net *net, lt_shm *shm, const int *rank, int n, int node,
                             lt_liveness *liveness);
/* Only after lt__notices_finish() has returned true. NULL is fine. */
void lt__notices_free(lt_notices *notices);

/* Both are safe in any thread. The first one sends the notice of this node, with the failure in shm
 * if there is one; further calls do nothing. The second one handles notices that have arrived. */
void lt__notices_send(lt_notices *notices);
void lt__notices_receive(lt_notices *notices);
/* Whether the notice of a node arrived so long ago that no other message of it is in transit. */
bool lt__notices_has_left(lt_notices *notices, int node);
/* Sends the notice of this node and waits until it is sent and, unless something has failed, the
 * notices of all other nodes have arrived. Waits without limit for nodes that are connected, since
 * they may continue alone for as long as they need. If one is not connected, waits at most
 * `seconds`, and about one second after a failure. Returns whether everything was sent and
 * received. */
bool lt__notices_finish(lt_notices *notices, double seconds);

#endif
