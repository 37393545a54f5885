/* notices.c - final notices between nodes; see notices.h. A receive for the notice of each other
 * node is pending from the start.
 */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "core/tensor.h"
#include "dist/notices.h"

enum { LAST_SECONDS = 1 };               /* time to send the notices after a failure */
static const double DELAY_SECONDS = 0.3; /* messages sent before a notice may arrive after it */

typedef struct notice { /* sent as raw bytes; status is LT_OK if the node has left */
    lt_status status;
    int rank;
    char text[1024];
} notice;

typedef struct peer { /* another node */
    lt_request sending, receiving;
    notice notice;               /* notice of the peer */
    bool has_sent, has_received; /* this node's notice is sent; the peer's has arrived */
} peer;

struct lt_notices {
    const lt_net *net;
    lt_shm *shm;
    const lt_nodes *nodes;
    lt_liveness *liveness;
    pthread_mutex_t lock; /* guards the fields below */
    bool is_sent;         /* lt__notices_send() was called */
    notice notice;        /* notice of this node, once is_sent */
    peer peer[];
};

lt_notices *lt__notices_open(const lt_net *net, lt_shm *shm, const lt_nodes *nodes,
                             lt_liveness *liveness)
{
    lt_notices *notices = lt__calloc(1, sizeof *notices + (size_t)nodes->n * sizeof *notices->peer,
                                     "for %d nodes", nodes->n);
    if (!notices)
        return NULL;
    *notices = (lt_notices){.net = net, .shm = shm, .nodes = nodes, .liveness = liveness};
    pthread_mutex_init(&notices->lock, NULL);
    for (int i = 0; i < nodes->n; i++)
        if (i != nodes->own &&
            net->receive(net->self, nodes->first[i], LT_NET_NOTICES, &notices->peer[i].notice,
                         sizeof(notice), &notices->peer[i].receiving) != 0) {
            lt_fail(LT_EPEER, "rank %d was lost", nodes->first[i]);
            return NULL; /* it is not freed, because pending requests point into it */
        }
    return notices;
}

void lt__notices_free(lt_notices *notices)
{
    if (!notices)
        return;
    pthread_mutex_destroy(&notices->lock);
    free(notices);
}

static void send_notice(lt_notices *notices)
{
    const lt_net *w = notices->net;
    const lt_nodes *nodes = notices->nodes;
    notice *own = &notices->notice;
    notices->is_sent = true;
    lt__liveness_leave(notices->liveness);
    lt__shm_failure(notices->shm, &own->rank, &own->status, own->text, sizeof own->text);
    for (int i = 0; i < nodes->n; i++)
        if (i != nodes->own && w->send(w->self, nodes->first[i], LT_NET_NOTICES, own, sizeof *own,
                                       &notices->peer[i].sending) != 0)
            notices->peer[i].has_sent = true; /* the peer is lost and needs no notice */
}

void lt__notices_send(lt_notices *notices)
{
    if (!notices)
        return;
    pthread_mutex_lock(&notices->lock);
    if (!notices->is_sent)
        send_notice(notices);
    pthread_mutex_unlock(&notices->lock);
}

static void receive_from(lt_notices *notices, int i)
{
    const lt_net *w = notices->net;
    peer *p = &notices->peer[i];
    if (notices->is_sent && !p->has_sent)
        p->has_sent = w->test(w->self, &p->sending) != 0;
    if (p->has_received || w->test(w->self, &p->receiving) != 1)
        return;
    p->has_received = true;
    atomic_store(&notices->nodes->noticed[i], lt__seconds());
    if (p->notice.status != LT_OK)
        lt__shm_fail(notices->shm, p->notice.rank, p->notice.status, p->notice.text);
}

void lt__notices_receive(lt_notices *notices)
{
    if (!notices)
        return;
    pthread_mutex_lock(&notices->lock);
    for (int i = 0; i < notices->nodes->n; i++)
        if (i != notices->nodes->own)
            receive_from(notices, i);
    pthread_mutex_unlock(&notices->lock);
}

bool lt__notices_has_left(const lt_nodes *nodes, int node)
{
    double when = atomic_load(&nodes->noticed[node]);
    return when != 0 && lt__seconds() > when + DELAY_SECONDS;
}

bool lt__notices_finish(lt_notices *notices, double seconds)
{
    double begin = lt__seconds();
    bool open = notices != NULL;
    lt__notices_send(notices);
    while (open) {
        lt__notices_receive(notices);
        bool failing = lt__shm_has_failed(notices->shm), all_live = !failing;
        open = false;
        for (int i = 0; i < notices->nodes->n; i++) {
            const peer *p = &notices->peer[i];
            if (i == notices->nodes->own || (p->has_sent && (failing || p->has_received)))
                continue;
            open = true;
            all_live &= lt__liveness_is_connected(notices->liveness, i);
        }
        if (open && !all_live && lt__seconds() - begin > (failing ? LAST_SECONDS : seconds))
            return false;
        if (open)
            nanosleep(&(struct timespec){.tv_nsec = 200 * 1000}, NULL);
    }
    return true;
}
