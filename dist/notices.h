/* notices.h - the last words of nodes: the first rank of each tells those of the others, once, that
 * its node has left or what has failed. Private to this room.
 */
#ifndef LT_DIST_NOTICES_H
#define LT_DIST_NOTICES_H

#include "dist/liveness.h"
#include "dist/shm.h"
#include "dist/net.h"

typedef struct lt_notices
    lt_notices; /* NULL: this rank is not the first, and says and hears nothing */

/* Of node `node` among those whose first ranks are rank[0..n). Their failures become those of
 * shm. What is handed over is borrowed. New. NULL with LT_ENOMEM or LT_EPEER. */
lt_notices *lt__notices_open(const lt_net *net, lt_shm *shm, const int *rank, int n, int node,
                       lt_liveness *liveness);
/* Only once they have parted. */
void lt__notices_free(lt_notices *notices);

/* Both safe in any thread. Says the last word, of shm's failure if there is one; takes in what has
 * come of the others'. */
void lt__notices_send(lt_notices *notices);
void lt__notices_receive(lt_notices *notices);
/* Whether a node has said its last word, so long ago that nothing else of it is on its way. */
bool lt__notices_has_left(lt_notices *notices, int node);
/* Until the last word has gone and, unless something has failed, those of the others have come, but
 * no longer than so many seconds for one to which there is no connection: who lives may go on by
 * itself for as long as it likes. Whether that is so. */
bool lt__notices_finish(lt_notices *notices, double seconds);

#endif
