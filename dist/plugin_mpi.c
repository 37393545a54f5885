/* plugin_mpi.c - libluatrain-mpi.so: a network based on MPI. It calls no function of luatrain; its
 * interface is net.h.
 *
 * A lock admits one thread at a time to MPI, so MPI_THREAD_SERIALIZED is enough. If the program has
 * initialized MPI itself, the program also finalizes it.
 */
#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "dist/net.h"

_Static_assert(sizeof(MPI_Request) <= sizeof(lt_request), "MPI_Request fits in lt_request");

typedef struct mpi {
    MPI_Comm world; /* a duplicate, which keeps our messages apart from the program's own */
    pthread_mutex_t lock;
    atomic_bool sums; /* a thread holds the lock for a whole allreduce */
    int *node;        /* becomes lt_net.node */
    int is_ours;      /* MPI was initialized here, so it is finalized here */
} mpi;

static int started(int status, MPI_Request request, lt_request *r)
{
    memcpy(r, &request, sizeof request);
    return status == MPI_SUCCESS ? 0 : -1;
}

static int start_send(void *self, int to, int channel, const void *data, size_t bytes,
                      lt_request *r)
{
    mpi *m = self;
    MPI_Request request = MPI_REQUEST_NULL;
    pthread_mutex_lock(&m->lock);
    int status = MPI_Isend(data, (int)bytes, MPI_BYTE, to, channel, m->world, &request);
    pthread_mutex_unlock(&m->lock);
    return started(status, request, r);
}

static int start_receive(void *self, int from, int channel, void *data, size_t bytes, lt_request *r)
{
    mpi *m = self;
    MPI_Request request = MPI_REQUEST_NULL;
    pthread_mutex_lock(&m->lock);
    int status = MPI_Irecv(data, (int)bytes, MPI_BYTE, from, channel, m->world, &request);
    pthread_mutex_unlock(&m->lock);
    return started(status, request, r);
}

static int test(void *self, lt_request *r)
{
    mpi *m = self;
    MPI_Request request;
    int done = 0;
    if (atomic_load(&m->sums))
        return 0;
    memcpy(&request, r, sizeof request);
    pthread_mutex_lock(&m->lock);
    int status = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    pthread_mutex_unlock(&m->lock);
    memcpy(r, &request, sizeof request);
    return status != MPI_SUCCESS ? -1 : done != 0;
}

static int sum(void *self, const float *from, float *to, size_t count)
{
    mpi *m = self;
    int status = MPI_SUCCESS;
    atomic_store(&m->sums, true);
    pthread_mutex_lock(&m->lock);
    for (size_t n; count > 0 && status == MPI_SUCCESS; from += n, to += n, count -= n) {
        n = count < INT_MAX ? count : INT_MAX; /* MPI counts are int */
        status = MPI_Allreduce(from, to, (int)n, MPI_FLOAT, MPI_SUM, m->world);
    }
    pthread_mutex_unlock(&m->lock);
    atomic_store(&m->sums, false);
    return status == MPI_SUCCESS ? 0 : -1;
}

static void end(void *self)
{
    mpi *m = self;
    MPI_Comm_free(&m->world);
    if (m->is_ours)
        MPI_Finalize();
    pthread_mutex_destroy(&m->lock);
    free(m->node);
    free(m);
}

/* The beginning of the version text of MPI, up to a comma or newline: "Open MPI v4.1.4". */
static void name_library(char *name, size_t bytes)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int n = 0;
    if (MPI_Get_library_version(text, &n) != MPI_SUCCESS)
        n = 0;
    text[n] = '\0';
    snprintf(name, bytes, "%.*s", (int)strcspn(text, ",\n"), text);
}

/* Finds the ranks on this machine. Returns whether that worked. */
static int find_node(mpi *m, lt_net *w)
{
    MPI_Comm here;
    MPI_Group group_here, group_world;
    int ok = MPI_Comm_split_type(m->world, MPI_COMM_TYPE_SHARED, w->rank, MPI_INFO_NULL, &here) ==
             MPI_SUCCESS;
    if (!ok)
        return 0;
    MPI_Comm_size(here, &w->n_node);
    m->node = malloc((size_t)w->n_node * sizeof *m->node);
    int *place = malloc((size_t)w->n_node * sizeof *place);
    ok = m->node && place;
    for (int i = 0; ok && i < w->n_node; i++)
        place[i] = i;
    MPI_Comm_group(here, &group_here);
    MPI_Comm_group(m->world, &group_world);
    ok = ok && MPI_Group_translate_ranks(group_here, w->n_node, place, group_world, m->node) ==
                   MPI_SUCCESS;
    MPI_Group_free(&group_here);
    MPI_Group_free(&group_world);
    MPI_Comm_free(&here);
    free(place);
    w->node = m->node;
    return ok;
}

/* Writes the reason to text and frees m, which is no longer used. MPI stays initialized. */
static int fail(mpi *m, char *text, size_t bytes, const char *why)
{
    snprintf(text, bytes, "%s", why);
    if (m) {
        pthread_mutex_destroy(&m->lock);
        free(m->node);
        free(m);
    }
    return -1;
}

LT_API int lt_net_open(const char *version, lt_net *net, char *text, size_t bytes)
{
    int is_up = 0, granted = MPI_THREAD_SINGLE;
    if (strcmp(version, LT_VERSION) != 0) {
        snprintf(
            text, bytes,
            "the MPI plugin is from luatrain %s, but this is luatrain %s; install both from one "
            "build",
            LT_VERSION, version);
        return -1;
    }
    mpi *m = calloc(1, sizeof *m);
    if (!m)
        return fail(NULL, text, bytes, "out of memory for MPI");
    pthread_mutex_init(&m->lock, NULL);
    MPI_Initialized(&is_up);
    m->is_ours = !is_up;
    if (is_up)
        MPI_Query_thread(&granted);
    else if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &granted) != MPI_SUCCESS)
        return fail(m, text, bytes, "MPI_Init_thread failed");
    if (granted < MPI_THREAD_SERIALIZED)
        return fail(
            m, text, bytes,
            "MPI allows calls from one thread only, but luatrain requires MPI_THREAD_SERIALIZED");
    if (MPI_Comm_dup(MPI_COMM_WORLD, &m->world) != MPI_SUCCESS)
        return fail(m, text, bytes, "MPI_Comm_dup failed");
    MPI_Comm_set_errhandler(m->world, MPI_ERRORS_RETURN);
    *net = (lt_net){.self = m,
                    .send = start_send,
                    .receive = start_receive,
                    .test = test,
                    .sum = sum,
                    .close = end};
    MPI_Comm_rank(m->world, &net->rank);
    MPI_Comm_size(m->world, &net->size);
    name_library(net->name, sizeof net->name);
    return find_node(m, net) ? 0
                             : fail(m, text, bytes, "MPI cannot list the ranks on this machine");
}
