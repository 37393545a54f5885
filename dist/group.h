/* group.h - the interface between a group and its transport. Private to dist. */
#ifndef LT_DIST_GROUP_H
#define LT_DIST_GROUP_H

#include "dist/dist.h"
#include "dist/mail/mail.h"
#include "dist/net.h"
#include "dist/shm.h"

/* The members of a part: see lt__group_split(). */
typedef struct lt_part {
    int *rank; /* (size) their ranks in the job, ascending */
    int size;
    int index; /* index of this rank among them */
} lt_part;

/* The state of a rank in a transport begins with this. For a part, only shm is set: the group uses
 * the other fields of the job. */
typedef struct lt_endpoint {
    lt_shm shm[LT_SHM_CHANNELS]; /* its view of the control block, for each channel */
    lt_mail *mail;               /* NULL until lt__group_mail() opens it. Closed by the transport */
    int cpus;                    /* CPUs of this rank; 0 if there are fewer CPUs than ranks */
    int local_rank;              /* see lt_group_local_rank() */
} lt_endpoint;

/* The functions of a transport; see dist.h for what they do. shm is a channel of this rank's
 * endpoint, and self the endpoint. Only one thread at a time calls them, with one exception:
 * one thread may call allreduce in channel 1 while another thread is in any other function. Waits
 * may spin if shm->spin is set. */
typedef struct lt_transport {
    bool has_processes; /* ranks are processes, not threads */
    bool is_elastic;    /* workers join and leave: see lt_serve_open() */
    lt_status (*allreduce)(lt_shm *shm, const lt_sum *sum);
    lt_status (*broadcast)(lt_shm *shm, const char *what, void *data, size_t bytes, int root);
    lt_status (*barrier)(lt_shm *shm, const char *what);
    lt_status (*send)(lt_shm *shm, int to, const void *data, size_t bytes);
    lt_status (*receive)(lt_shm *shm, int from, void *data, size_t bytes);
    lt_status (*add_as_tree)(void *self);         /* NULL if it always sums as a tree */
    bool (*has_left)(const void *self, int rank); /* see lt__group_has_left(); or NULL */
    lt_mail *(*open_mail)(void *self);            /* NULL if the mailbox is open from the start */
    bool (*alloc_shared)(void *self, size_t bytes, lt_external_memory *memory); /* or NULL */
    /* MPI_Allreduce, for comparison in benchmarks; or NULL */
    lt_status (*mpi_allreduce)(void *self, const float *from, float *to, size_t count);
    /* The two steps of lt__group_split(); self is the endpoint of the job. offer() may set *handle
     * to memory for the part. join() gets the handles of all ranks of the job and makes *of_part,
     * the endpoint in the part. part->rank is borrowed until that is closed. For a part, the group
     * does not call has_left, open_mail and leave: it calls the functions of the job. */
    lt_status (*offer)(void *self, const lt_part *part, int64_t *handle);
    lt_status (*join)(void *self, const lt_part *part, const int64_t *handles,
                      lt_endpoint **of_part);
    lt_status (*leave)(void *self); /* or NULL */
    void (*close)(void *self);      /* leaves, and frees self */
} lt_transport;

/* Makes the group of this rank. self is taken. New. NULL with LT_ENOMEM. */
lt_group *lt__group_new(const lt_transport *transport, lt_endpoint *self, int rank, int size);
double lt__group_timeout(const lt_group *group);        /* seconds */
lt_endpoint *lt__group_endpoint(const lt_group *group); /* borrowed */
/* Whether the process of another rank has left the group without a failure. Threads instead send
 * LT_MAIL_LOST. */
bool lt__group_has_left(const lt_group *group, int rank);
/* Tells the other ranks that this one waits for a message from a rank of the job; -1: the wait is
 * over. Collectives announce their waits themselves. */
void lt__group_set_awaited(lt_group *group, int rank);
/* The rank of the job that holds up `rank`, as far as the ranks on this node know: see
 * lt__shm_find_hung(). */
int lt__group_find_hung(const lt_group *group, int rank, char seen[LT_SEEN_BYTES]);
/* Like lt_group_fail(), but names another rank of the job as the cause. */
void lt__group_blame(lt_group *group, int rank);
bool lt__group_has_processes(const lt_group *group); /* its ranks are processes, not threads */
/* Whether lt_group_failure() returns a failure. */
bool lt__group_has_failed(const lt_group *group);
/* LT_OK if the job has not failed; otherwise LT_EPEER, and the message names the failed rank. */
LT_NODISCARD lt_status lt__group_check(const lt_group *group);

/* Splits the group of a job into parts: the ranks with the same color form a group, in the order of
 * their ranks. A collective. *part is the group of this rank, new. Close it before `group`; after a
 * failure it may stay open. Its memory is partly freed with `group`.
 *
 * Collectives of the part need only its ranks. They are independent of other groups, so other
 * threads of the rank may be in their collectives at the same time. The part has its own background
 * thread. Everything else belongs to the job. A failure, the exit or the loss of any rank ends the
 * waits of all groups. Messages, lt_group_failure(), lt_group_is_reporter() and
 * lt_group_set_location() are about ranks of the job. lt__group_mail() is the mailbox of the job,
 * with the ranks of the job. lt_group_local_rank() and lt_group_cpus() are as in the job.
 *
 * LT_EUSAGE if `group` is a part itself. After any other error the job has failed: LT_ENOMEM,
 * LT_EENV, or an error of a collective. */
LT_NODISCARD lt_status lt__group_split(lt_group *group, int color, lt_group **part);
/* The rank in the job of rank `rank` of a group, for messages. */
int lt__group_rank_in_job(const lt_group *group, int rank);
int lt__group_size_of_job(const lt_group *group);

/* The mailbox of this rank, opened by the first call. Borrowed until the group is closed. NULL with
 * LT_ENOMEM or LT_EPEER. */
lt_mail *lt__group_mail(lt_group *group);

/* Makes all further sums tree sums over the ranks, so that their bits do not depend on the number
 * of nodes. All ranks must call it. LT_EUSAGE unless all nodes have the same number of ranks, with
 * consecutive numbers. */
LT_NODISCARD lt_status lt__group_add_as_tree(lt_group *group);

/* Allocates zeroed memory that the other ranks of this node can map, so that data in it is summed
 * in place. The caller owns it and frees it with memory->deleter; it may outlive the group. Returns
 * false if that is not necessary or not possible. */
bool lt__group_alloc_shared(lt_group *group, size_t bytes, lt_external_memory *memory);

/* Opens the group of all processes of a network; all must call it. *net is taken. config may be
 * NULL. New. Returns the same errors as lt_mpi_open(). */
lt_status lt__mpi_open_over(const lt_net *net, const lt_group_config *config, lt_group **group);
/* Opens the network of the MPI plugin; all processes must call it. *net is new. LT_EENV for the
 * same reasons as lt_mpi_open(). */
lt_status lt__net_open(lt_net *net);

#endif
