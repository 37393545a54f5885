/* fake_net.h - a network of pipes in memory, shared by threads or forked processes. Include it in
 * one file of a test. */
#ifndef LT_TESTS_DIST_FAKE_NET_H
#define LT_TESTS_DIST_FAKE_NET_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "dist/net.h"

enum { FAKE_MOST = 8, FAKE_CHANNELS = LT_NET_PARTS + 2 * LT_NET_OF_GROUP, FAKE_PIPE = 1 << 19 };

typedef struct fake_pipe {
    _Alignas(64) _Atomic size_t in, out; /* bytes so far */
    char data[FAKE_PIPE];
} fake_pipe;

typedef struct fake_hub {         /* in shared memory */
    atomic_bool ended[FAKE_MOST]; /* set by the parent of a process that has ended */
    fake_pipe pipe[FAKE_MOST][FAKE_MOST][FAKE_CHANNELS];
} fake_hub;

static inline fake_hub *fake_hub_new(void)
{
    return mmap(NULL, sizeof(fake_hub), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static inline void fake_hub_free(fake_hub *hub) { munmap(hub, sizeof *hub); }

typedef struct fake_op {
    struct fake_op *next;
    char *data;
    size_t left;
    bool is_send;
    int other, channel;
} fake_op;

typedef struct fake { /* the network of one rank */
    fake_hub *hub;
    int rank, node[FAKE_MOST];
    pthread_mutex_t lock;                        /* guards the queues */
    fake_op *queue[2][FAKE_MOST][FAKE_CHANNELS]; /* [0]: receives in order; [1]: sends */
} fake;

static inline int fake_start(fake *f, bool is_send, int other, int channel, const void *data,
                             size_t bytes, lt_request *r)
{
    fake_op *op = malloc(sizeof *op), **end = &f->queue[is_send][other][channel];
    *op = (fake_op){NULL, (char *)data, bytes, is_send, other, channel};
    pthread_mutex_lock(&f->lock);
    while (*end)
        end = &(*end)->next;
    *end = op;
    pthread_mutex_unlock(&f->lock);
    r->word[0] = (uintptr_t)op;
    return 0;
}

static inline int fake_send(void *self, int to, int channel, const void *data, size_t bytes,
                            lt_request *r)
{
    return fake_start(self, true, to, channel, data, bytes, r);
}

static inline int fake_receive(void *self, int from, int channel, void *data, size_t bytes,
                               lt_request *r)
{
    return fake_start(self, false, from, channel, data, bytes, r);
}

/* Moves as many bytes of the op as possible in one memcpy(). Returns whether there were any. */
static inline bool fake_move(fake *f, fake_op *op)
{
    int from = op->is_send ? f->rank : op->other, to = op->is_send ? op->other : f->rank;
    fake_pipe *p = &f->hub->pipe[from][to][op->channel];
    _Atomic size_t *mine = op->is_send ? &p->in : &p->out;
    size_t full = atomic_load(&p->in) - atomic_load(&p->out), at = atomic_load(mine) % FAKE_PIPE;
    size_t n = op->is_send ? FAKE_PIPE - full : full;
    n = n < op->left ? n : op->left;
    n = n < FAKE_PIPE - at ? n : FAKE_PIPE - at;
    memcpy(op->is_send ? p->data + at : op->data, op->is_send ? op->data : p->data + at, n);
    op->data += n;
    op->left -= n;
    atomic_fetch_add(mine, n);
    return n > 0;
}

static inline int fake_progress(fake *f, const lt_request *r)
{
    fake_op *op = (fake_op *)(uintptr_t)r->word[0];
    fake_op **first = &f->queue[op->is_send][op->other][op->channel];
    bool ended =
        atomic_load(&f->hub->ended[op->other]); /* read before the last check of the pipe */
    if (*first != op)
        return 0;
    while (fake_move(f, op))
        ;
    if (op->left > 0)
        return ended ? -1 : 0;
    *first = op->next;
    free(op);
    return 1;
}

static inline int fake_test(void *self, lt_request *r)
{
    fake *f = self;
    pthread_mutex_lock(&f->lock);
    int status = fake_progress(f, r);
    pthread_mutex_unlock(&f->lock);
    return status;
}

static inline void fake_close(void *self)
{
    fake *f = self;
    fake_op **queue = &f->queue[0][0][0];
    for (size_t i = 0; i < sizeof f->queue / sizeof *queue; i++)
        for (fake_op *op; (op = queue[i]); free(op))
            queue[i] = op->next;
    pthread_mutex_destroy(&f->lock);
    free(f);
}

/* The network of a rank. node_of[r]: the node of rank r. */
static inline lt_net fake_net_new(fake_hub *hub, int rank, int size, const int *node_of)
{
    fake *f = calloc(1, sizeof *f);
    f->hub = hub;
    f->rank = rank;
    pthread_mutex_init(&f->lock, NULL);
    lt_net w = {.name = "a fake wire",
                .rank = rank,
                .size = size,
                .node = f->node,
                .self = f,
                .send = fake_send,
                .receive = fake_receive,
                .test = fake_test,
                .close = fake_close};
    for (int r = 0; r < size; r++)
        if (node_of[r] == node_of[rank])
            f->node[w.n_node++] = r;
    return w;
}

#endif
