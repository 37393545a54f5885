/* group.h - the inside of groups, for transports. Private to this room. */
#ifndef LT_DIST_GROUP_H
#define LT_DIST_GROUP_H

#include "dist/dist.h"
#include "dist/net.h"

/* What a transport must supply. All calls come from one thread at a time, but fail, failure, at
 * and speaks, which may come from any, and allreduce_aside, which comes from one at a time while
 * another is in any of the others. self is the transport's state for one rank. */
typedef struct lt_transport {
    const char *name;
    lt_status (*allreduce)(void *self, const lt_sum *sum);
    lt_status (*allreduce_side)(void *self, const lt_sum *sum, bool spin);
    lt_status (*broadcast)(void *self, const char *what, void *data, size_t bytes, int root);
    lt_status (*barrier)(void *self, const char *what);
    lt_status (*send)(void *self, int to, const void *data, size_t bytes);
    lt_status (*receive)(void *self, int from, void *data, size_t bytes);
    lt_status (*add_as_tree)(void *self); /* or NULL: it always does */
    uint64_t (*bytes)(const void *self);
    void (*fail)(void *self, lt_status code, const char *text);
    bool (*failure)(const void *self, int *rank, lt_status *code, char *text, size_t bytes);
    void (*set_location)(void *self, const char *where, int64_t step);
    bool (*alloc_shared)(void *self, size_t bytes, lt_external_memory *memory); /* or NULL */
    /* MPI's own, to compare with; or NULL. */
    lt_status (*mpi_allreduce)(void *self, const float *from, float *to, size_t count);
    bool (*is_reporter)(void *self, double seconds);
    void (*set_spin)(void *self, bool spin); /* whether the next waits may burn a CPU,
                                              * but those aside, which say so themselves */
    int (*cpus)(const void *self); /* 0: there are fewer than ranks */
    int (*local_rank)(const void *self);
    lt_status (*leave)(void *self); /* or NULL */
    void (*close)(void *self);  /* leaves, and frees self */
} lt_transport;

/* A group of this rank, in which others are waited for so many seconds; self is taken, also on
 * failure. New. NULL with LT_ENOMEM. */
lt_group *lt__group_new(const lt_transport *transport, void *self, int rank, int size,
                        double timeout);
double lt__group_timeout(const lt_group *group);

/* From now on sums are those of a balanced tree over the ranks, on however many nodes. All ranks
 * ask for it. LT_EUSAGE when the nodes do not have as many ranks, in a row. */
LT_MUST lt_status lt__group_add_as_tree(lt_group *group);

/* Zeros that the others of the node can see, so that sums in them are done in place. False: there
 * is no need, or no such memory. The memory may outlive the group. */
bool lt__group_alloc_shared(lt_group *group, size_t bytes, lt_external_memory *memory);

/* The group of the processes at a network, which is taken, also on failure. New. */
lt_status lt__mpi_open_over(const lt_net *net, const lt_group_config *config, lt_group **group);
/* The network of the MPI plugin. LT_EENV when it is not there or not ours. */
lt_status lt__net_open(lt_net *net);

#endif
