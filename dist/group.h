/* group.h - the interface between a group and its transport. Private to this room. */
#ifndef LT_DIST_GROUP_H
#define LT_DIST_GROUP_H

#include "dist/dist.h"
#include "dist/net.h"

/* What a transport implements. self is its state for one rank. Calls come from one thread at a
 * time, with two exceptions: fail, failure, set_location and is_reporter may come from any thread,
 * and allreduce_side, from one thread at a time, while another thread is in one of the others. */
typedef struct lt_transport {
    const char *name;
    lt_status (*allreduce)(void *self, const lt_sum *sum);
    lt_status (*allreduce_side)(void *self, const lt_sum *sum, bool spin);
    lt_status (*broadcast)(void *self, const char *what, void *data, size_t bytes, int root);
    lt_status (*barrier)(void *self, const char *what);
    lt_status (*send)(void *self, int to, const void *data, size_t bytes);
    lt_status (*receive)(void *self, int from, void *data, size_t bytes);
    lt_status (*add_as_tree)(void *self); /* NULL if it always sums as a tree */
    uint64_t (*bytes)(const void *self);
    void (*fail)(void *self, lt_status code, const char *text);
    bool (*failure)(const void *self, int *rank, lt_status *code, char *text, size_t bytes);
    void (*set_location)(void *self, const char *where, int64_t step);
    bool (*alloc_shared)(void *self, size_t bytes, lt_external_memory *memory); /* or NULL */
    /* MPI_Allreduce, for comparison in benchmarks; or NULL. */
    lt_status (*mpi_allreduce)(void *self, const float *from, float *to, size_t count);
    bool (*is_reporter)(void *self, double seconds);
    /* whether the next waits may spin; allreduce_side has its own parameter for this */
    void (*set_spin)(void *self, bool spin);
    int (*cpus)(const void *self); /* of this rank; 0 if there are fewer CPUs than ranks */
    int (*local_rank)(const void *self);
    lt_status (*leave)(void *self); /* or NULL */
    void (*close)(void *self);      /* leaves, and frees self */
} lt_transport;

/* Makes the group of this rank. timeout: seconds to wait for another rank. self is taken, also on
 * failure. New. NULL with LT_ENOMEM. */
lt_group *lt__group_new(const lt_transport *transport, void *self, int rank, int size,
                        double timeout);
double lt__group_timeout(const lt_group *group);

/* Makes all further sums tree sums over the ranks, so that their bits do not depend on the number
 * of nodes. All ranks must call it. LT_EUSAGE unless all nodes have the same number of ranks, with
 * consecutive numbers. */
LT_MUST lt_status lt__group_add_as_tree(lt_group *group);

/* Allocates zeroed memory that the other ranks of this node can see, so that data in it is summed
 * in place. False if that is not necessary or not possible. The memory may outlive the group. */
bool lt__group_alloc_shared(lt_group *group, size_t bytes, lt_external_memory *memory);

/* Opens the group of all processes of a network, which is taken, also on failure. New. */
lt_status lt__mpi_open_over(const lt_net *net, const lt_group_config *config, lt_group **group);
/* Opens the network of the MPI plugin. LT_EENV if the plugin is missing, has another version, or
 * sees a different number of processes than were started. */
lt_status lt__net_open(lt_net *net);

#endif
