/* mpi_transport.h - the state of a rank in the MPI transport. Shared by mpi_transport.c and
 * mpi_part.c, and by no other file.
 */
#ifndef LT_DIST_MPI_TRANSPORT_H
#define LT_DIST_MPI_TRANSPORT_H

#include <pthread.h>

#include "dist/group.h"
#include "dist/liveness.h"
#include "dist/nodes.h"
#include "dist/notices.h"
#include "dist/ring.h"

typedef struct mpi_transport {
    lt_endpoint at;
    struct mpi_transport *job; /* the transport of the job, which may be this one */
    const int *member;         /* for a part: (size) the rank in the job of each rank; or NULL */
    int *slot_of;              /* for a part: see lt_shm */
    int size;                  /* number of ranks */
    lt_net net;                /* its rank is the rank in the job */
    lt_mappings *mappings;
    lt_ring ring[LT_SHM_CHANNELS]; /* one for each channel */
    lt_nodes nodes;                /* nodes with ranks of this group, by their numbers in the job */
    /* notices and liveness of other nodes; NULL unless this rank is the first of its node in the
     * job */
    lt_notices *notices;
    lt_liveness *liveness;
    lt_group_config config;
    /* The fields below are only for the job. */
    int *pidfd;     /* (slots); -1 if the system has no pidfds */
    int splits;     /* number of splits so far */
    void **offered; /* (n_offered) control blocks of parts that this rank has made */
    int n_offered;
    pthread_mutex_t lock;       /* guards the field below */
    char before[LT_SEEN_BYTES]; /* location of the previous node: see lt__ring_last_seen() */
} mpi_transport;

/* mpi_part.c: opens the side channel of a job or part, as a copy of the other one, which is
 * complete. */
lt_status lt__mpi_open_side(mpi_transport *c);
/* Closes the rings of both channels, and frees their staging memory. */
void lt__mpi_close_channels(mpi_transport *c);
/* Parts of the job; see lt_transport. */
lt_status lt__mpi_offer(void *self, const lt_part *part, int64_t *handle);
lt_status lt__mpi_join(void *self, const lt_part *part, const int64_t *handles,
                       lt_endpoint **of_part);
void lt__mpi_close_part(mpi_transport *c);

#endif
