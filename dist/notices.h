/* notices.h - final notices between nodes. The first rank of each node sends one notice to the
 * first ranks of all other nodes: its node has left, or it has failed and why. Private to dist.
 */
#ifndef LT_DIST_NOTICES_H
#define LT_DIST_NOTICES_H

#include "dist/liveness.h"
#include "dist/nodes.h"

/* NULL if this rank is not the first of its node; calls then have no effect. */
typedef struct lt_notices lt_notices;

/* Opens the notices of this node. Failures of other nodes are written to shm. All arguments are
 * borrowed until lt__notices_free(). New. NULL with LT_ENOMEM or LT_EPEER. */
lt_notices *lt__notices_open(const lt_net *net, lt_shm *shm, const lt_nodes *nodes,
                             lt_liveness *liveness);
/* Only after lt__notices_finish() has returned true. NULL is allowed. */
void lt__notices_free(lt_notices *notices);

/* Sends the notice of this node, with the failure in shm if there is one. Further calls do nothing.
 * Thread-safe. */
void lt__notices_send(lt_notices *notices);
/* Handles notices that have arrived. Thread-safe. */
void lt__notices_receive(lt_notices *notices);
/* Whether the notice of a node arrived so long ago that none of its other messages is still in
 * transit. Any rank may call it, but only the first rank of its node handles notices. */
bool lt__notices_has_left(const lt_nodes *nodes, int node);
/* Sends the notice of this node and waits until it is sent and the notices of all other nodes have
 * arrived. Waits without limit while all nodes that it waits for are connected, because each may
 * continue for as long as it needs; otherwise for at most `seconds`. After a failure it does not
 * wait for other notices, and at most one second for its own. Returns whether the wait
 * succeeded. */
bool lt__notices_finish(lt_notices *notices, double seconds);

#endif
