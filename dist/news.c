/* news.c - see news.h. A receive for the last word of each other node is open from the start. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "core/tensor.h"
#include "dist/news.h"

enum { LAST_SECONDS = 1 };              /* for the last words after a failure */
static const double LATE_SECONDS = 0.3; /* what was sent before a last word may come after it */

typedef struct word { /* travels as it is; status LT_OK: the node has left */
    lt_status status;
    int rank;
    char text[1024];
} word;

typedef struct peer { /* another node */
    lt_request said, heard;
    word word;                /* of the peer */
    bool has_said, has_heard; /* the own word has gone, the peer's has come, */
    double when;              /* at this time */
} peer;

struct lt_news {
    const lt_wire *wire;
    lt_shm *team;
    const int *rank;
    int n, node;
    lt_lifelines *lines;
    pthread_mutex_t lock;     /* guards what follows */
    bool said;
    word word;                /* the own one, when it is said */
    peer peer[];
};

lt_news *lt__news_open(const lt_wire *wire, lt_shm *shm, const int *rank, int n, int node,
                       lt_lifelines *lines)
{
    lt_news *news = calloc(1, sizeof *news + (size_t)n * sizeof *news->peer);
    if (!news) {
        lt_fail(LT_ENOMEM, "out of memory for %d nodes", n);
        return NULL;
    }
    news->wire = wire;
    news->team = shm;
    news->rank = rank;
    news->n = n;
    news->node = node;
    news->lines = lines;
    pthread_mutex_init(&news->lock, NULL);
    for (int i = 0; i < n; i++)
        if (i != node && wire->receive(wire->self, rank[i], LT_WIRE_NEWS, &news->peer[i].word,
                                       sizeof(word), &news->peer[i].heard) != 0) {
            lt_fail(LT_EPEER, "rank %d is gone", rank[i]);
            return NULL; /* other requests point into it, so it stays */
        }
    return news;
}

void lt__news_free(lt_news *news)
{
    if (!news)
        return;
    pthread_mutex_destroy(&news->lock);
    free(news);
}

static void say(lt_news *news)
{
    const lt_wire *w = news->wire;
    word *own = &news->word;
    news->said = true;
    lt__lifelines_part(news->lines);
    lt__shm_failure(news->team, &own->rank, &own->status, own->text, sizeof own->text);
    for (int i = 0; i < news->n; i++)
        if (i != news->node && w->send(w->self, news->rank[i], LT_WIRE_NEWS, own, sizeof *own,
                                       &news->peer[i].said) != 0)
            news->peer[i].has_said = true; /* there is nobody to hear it */
}

void lt__news_say(lt_news *news)
{
    if (!news)
        return;
    pthread_mutex_lock(&news->lock);
    if (!news->said)
        say(news);
    pthread_mutex_unlock(&news->lock);
}

static void hear_of(lt_news *news, peer *p)
{
    const lt_wire *w = news->wire;
    if (news->said && !p->has_said)
        p->has_said = w->test(w->self, &p->said) != 0;
    if (p->has_heard || w->test(w->self, &p->heard) != 1)
        return;
    p->has_heard = true;
    p->when = lt__seconds();
    if (p->word.status != LT_OK)
        lt__shm_fail(news->team, p->word.rank, p->word.status, p->word.text);
}

void lt__news_hear(lt_news *news)
{
    if (!news)
        return;
    pthread_mutex_lock(&news->lock);
    for (int i = 0; i < news->n; i++)
        if (i != news->node)
            hear_of(news, &news->peer[i]);
    pthread_mutex_unlock(&news->lock);
}

bool lt__news_has_left(lt_news *news, int node)
{
    if (!news)
        return false;
    const peer *p = &news->peer[node];
    pthread_mutex_lock(&news->lock);
    bool has_left = p->has_heard && lt__seconds() > p->when + LATE_SECONDS;
    pthread_mutex_unlock(&news->lock);
    return has_left;
}

bool lt__news_part(lt_news *news, double seconds)
{
    double begin = lt__seconds();
    bool open = news != NULL;
    lt__news_say(news);
    while (open) {
        lt__news_hear(news);
        bool failing = lt__shm_has_failed(news->team), all_live = !failing;
        open = false;
        for (int i = 0; i < news->n; i++) {
            const peer *p = &news->peer[i];
            if (i == news->node || (p->has_said && (failing || p->has_heard)))
                continue;
            open = true;
            all_live &= lt__lifeline_holds(news->lines, i);
        }
        if (open && !all_live && lt__seconds() - begin > (failing ? LAST_SECONDS : seconds))
            return false;
        if (open)
            nanosleep(&(struct timespec){.tv_nsec = 200 * 1000}, NULL);
    }
    return true;
}
