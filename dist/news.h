/* news.h - the last words of nodes: the first rank of each tells those of the others, once, that
 * its node has left or what has failed. Private to this room.
 */
#ifndef LT_DIST_NEWS_H
#define LT_DIST_NEWS_H

#include "dist/lifeline.h"
#include "dist/shm.h"
#include "dist/wire.h"

typedef struct lt_news lt_news; /* NULL: this rank is not the first, and says and hears nothing */

/* Of node `node` among those whose first ranks are rank[0..n). Their failures become those of
 * team. What is handed over is borrowed. New. NULL with LT_ENOMEM or LT_EPEER. */
lt_news *lt__news_open(const lt_wire *wire, lt_shm *shm, const int *rank, int n, int node,
                       lt_lifelines *lines);
/* Only once they have parted. */
void lt__news_free(lt_news *news);

/* Both safe in any thread. Says the last word, of team's failure if there is one; takes in what has
 * come of the others'. */
void lt__news_say(lt_news *news);
void lt__news_hear(lt_news *news);
/* Whether a node has said its last word, so long ago that nothing else of it is on its way. */
bool lt__news_has_left(lt_news *news, int node);
/* Until the last word has gone and, unless something has failed, those of the others have come, but
 * no longer than so many seconds for one to which there is no lifeline: who lives may go on by
 * itself for as long as it likes. Whether that is so. */
bool lt__news_part(lt_news *news, double seconds);

#endif
