/* net.h - what carries bytes between processes: filled by a plugin, of which this is the whole
 * door, so it stands alone.
 *
 * Messages from one rank to another on one channel come in the order of sending, and each has the
 * bytes that the receiver expects. Nothing but sum() blocks, and several threads may call at once,
 * but not close(). While one is in sum() no request is found done.
 */
#ifndef LT_DIST_NET_H
#define LT_DIST_NET_H

#include <stddef.h>
#include <stdint.h>

typedef struct lt_request { /* one that is under way; the network's own */
    uint64_t word[2];
} lt_request;

enum { LT_NET_DATA, LT_NET_SIDE, LT_NET_CONTROL, LT_NET_NOTICES }; /* channels */

typedef struct lt_net {
    char name[64];        /* "Open MPI 4.1.4" */
    int rank, size;
    int n_node;           /* ranks that are on this one's machine, with it, */
    int *node;            /* in ascending order. The network's */
    void *self;
    /* Start; data belongs to the network until the request is done. 0, or -1: the other is lost. */
    int (*send)(void *self, int to, int channel, const void *data, size_t bytes, lt_request *r);
    int (*receive)(void *self, int from, int channel, void *data, size_t bytes, lt_request *r);
    int (*test)(void *self, lt_request *r); /* 1: it is done; 0: not yet; -1: the other is lost */
    int (*sum)(void *self, const float *from, float *to, size_t count); /* over all ranks, and
                            * blocking: what the network offers itself. 0, or -1; or NULL */
    /* The end, for which all come together; wire->node goes with it. Not after a failure. */
    void (*close)(void *self);
} lt_net;

/* What a plugin exports, as lt_net_open. version is that of the host: another one is an error.
 * Fills wire, new. 0; else text holds a sentence about why not. */
typedef int (*lt_net_open_fn)(const char *version, lt_net *net, char *text, size_t bytes);

#endif
