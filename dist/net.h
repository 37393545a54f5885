/* net.h - the network that carries bytes between processes. A plugin implements it. This header is
 * the whole interface of that plugin, so it includes no other header of luatrain.
 *
 * Messages from one rank to another on one channel arrive in the order of sending. The caller
 * ensures that each has the number of bytes that the receiver expects. Several threads may make
 * calls at the same time, except close(). Only sum() and close() block. But while a thread is in
 * sum(), send() and receive() wait until it returns, and test() returns 0.
 */
#ifndef LT_DIST_NET_H
#define LT_DIST_NET_H

#include <stddef.h>
#include <stdint.h>

typedef struct lt_request { /* a pending send or receive; only the network reads its contents */
    uint64_t word[2];
} lt_request;

/* Channels. The first three belong to the group of all ranks. Each split of that group into parts
 * adds three more, from LT_NET_PARTS on. */
enum {
    LT_NET_DATA,
    LT_NET_SIDE,
    LT_NET_CONTROL,
    LT_NET_OF_GROUP,
    LT_NET_NOTICES = LT_NET_OF_GROUP,
    LT_NET_MAIL,
    LT_NET_PARTS
};

typedef struct lt_net {
    char name[64]; /* "Open MPI v4.1.4" */
    int rank, size;
    int n_node; /* number of ranks on this machine, this one included */
    int *node;  /* (n_node) these ranks, in ascending order. Owned by the network */
    void *self; /* the first argument of all calls */
    /* Start a send or receive of `bytes` bytes. The network uses data until the request is done.
     * Return 0, or -1 if the other rank is lost. */
    int (*send)(void *self, int to, int channel, const void *data, size_t bytes, lt_request *r);
    int (*receive)(void *self, int from, int channel, void *data, size_t bytes, lt_request *r);
    int (*test)(void *self, lt_request *r); /* 1 if done, 0 if not, -1 if the other rank is lost */
    /* The network's own allreduce: to (count) = the sum of from (count) over all ranks. All ranks
     * must call it; it blocks. Returns 0 or -1. May be NULL. */
    int (*sum)(void *self, const float *from, float *to, size_t count);
    /* Closes the network and frees self and node. All ranks must call it; it waits for them. Not
     * allowed after a failure. */
    void (*close)(void *self);
} lt_net;

/* The type of lt_net_open(), the function that a plugin exports. All processes must call it.
 * version is the caller's version of luatrain; the plugin must have the same version. Fills *net,
 * new, and returns 0. On failure returns non-zero and writes the reason to text, which has `bytes`
 * bytes. */
typedef int (*lt_net_open_fn)(const char *version, lt_net *net, char *text, size_t bytes);

#endif
