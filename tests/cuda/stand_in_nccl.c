/* stand_in_nccl.c - a libnccl.so.2 for ranks that are threads, in plain loops over host memory. It
 * has the functions that ops/cuda/nccl.c calls and is at least as strict as the library. It has no
 * streams: the operands of a sum must be complete when its group ends, and the last rank that polls
 * computes the sum.
 *
 * Like the library, it adds in the given dtype and rounds after each addition. It adds in the order
 * of a tree, as ranks on the CPU do.
 */
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ops/cuda/nccl.h"
#include "tests/cuda/stand_in_float.h"
#include "tests/cuda/stand_in_nccl.h"

#pragma GCC visibility push(default) /* the library exports the declarations below */
extern stand_in_nccl stand_in_nccl_state;
#define X(name, arguments) int name arguments;
LT_NCCL_LIST(X)
#undef X
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(void *comm);
#pragma GCC visibility pop

enum { MAX_RANKS = 8, MAX_OPS = 2 };
enum { REMOTE = 6, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

stand_in_nccl stand_in_nccl_state;

typedef struct op {
    const void *from;
    void *to;
    size_t count;
    int dtype;
} op;

typedef struct comm {
    struct job *job;
    int rank, slow, error;
    int posted, done; /* groups posted, groups completed */
    op op[MAX_OPS];   /* of the last group */
    int n_ops;
    bool finalized;
    int calls; /* for this communicator */
} comm;

typedef struct job {
    lt_nccl_id id;
    int size, joined, refs;
    comm *rank[MAX_RANKS];
    struct job *next;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static job *jobs;
static int ids;
static _Thread_local struct {
    int depth;
    comm *comm;
} group;
static _Thread_local char last[160];

static int wrong(const char *what)
{
    snprintf(last, sizeof last, "%s", what);
    return INVALID_USAGE;
}

int ncclGetVersion(int *version)
{
    *version = stand_in_nccl_state.version ? stand_in_nccl_state.version : 22809;
    return LT_NCCL_SUCCESS;
}

const char *ncclGetErrorString(int result)
{
    return result == REMOTE          ? "remote process exited or there was a network error"
           : result == INVALID_USAGE ? "invalid usage"
                                     : "invalid argument";
}

const char *ncclGetLastError(void *c)
{
    (void)c;
    return last;
}

/* Counts a call for a communicator. Returns the error that the test has set for it, or 0. */
static int refused(comm *c)
{
    const stand_in_nccl *s = &stand_in_nccl_state;
    return c->rank == s->refuse_rank && ++c->calls == s->refuse_at ? s->refuse_with : 0;
}

/* Returns from the calling function if the test has this call fail. */
#define BEGIN(c)                                                                                   \
    do {                                                                                           \
        const int begin_ = refused(c);                                                             \
        if (begin_ != LT_NCCL_SUCCESS)                                                             \
            return begin_;                                                                         \
    } while (0)

/* ==== Communicators =========================================================================== */

int ncclGetUniqueId(lt_nccl_id *id)
{
    pthread_mutex_lock(&lock);
    memset(id, 0x5a, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "job %d", ++ids);
    pthread_mutex_unlock(&lock);
    return LT_NCCL_SUCCESS;
}

static job *job_of(const lt_nccl_id *id, int size)
{
    job *j = jobs;
    while (j && memcmp(&j->id, id, sizeof *id) != 0)
        j = j->next;
    if (!j && (j = calloc(1, sizeof *j))) {
        *j = (job){.id = *id, .size = size, .next = jobs};
        jobs = j;
    }
    return j;
}

/* Counts a job, or takes it back by -1, if some ranks have posted a sum and others have not. A rank
 * posts no sum before the last one is complete. */
static void count_unfinished(const job *j, int by)
{
    int most = 0, least = INT_MAX;
    for (int r = 0; r < j->size; r++)
        if (j->rank[r]) {
            most = j->rank[r]->posted > most ? j->rank[r]->posted : most;
            least = j->rank[r]->posted < least ? j->rank[r]->posted : least;
        }
    __atomic_fetch_add(&stand_in_nccl_state.unfinished, most > least ? by : 0, __ATOMIC_SEQ_CST);
}

static int release(comm *c)
{
    pthread_mutex_lock(&lock);
    job *j = c->job, **at = &jobs;
    count_unfinished(j, -1);
    if (j->rank[c->rank] == c)
        j->rank[c->rank] = NULL;
    count_unfinished(j, 1);
    if (--j->refs == 0) {
        while (*at != j)
            at = &(*at)->next;
        *at = j->next;
        free(j);
    }
    int result = refused(c);
    free(c);
    stand_in_nccl_state.live--;
    pthread_mutex_unlock(&lock);
    return result;
}

int ncclCommInitRankConfig(void **out, int size, lt_nccl_id id, int rank, lt_nccl_config *config)
{
    if (config->size != sizeof *config || config->magic != (unsigned)LT_NCCL_MAGIC ||
        config->version != LT_NCCL_OLDEST || config->blocking != 0 || id.bytes[127] != 0x5a)
        return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    job *j = job_of(&id, size);
    comm *c = calloc(1, sizeof *c);
    bool fits = j->size == size && rank >= 0 && rank < size && !j->rank[rank];
    *c = (comm){.job = j,
                .rank = rank,
                .slow = stand_in_nccl_state.slow,
                .error = fits && !stand_in_nccl_state.refuses ? 0 : wrong("no such rank")};
    int result = refused(c);
    j->rank[rank] = fits ? c : j->rank[rank];
    j->joined += result == LT_NCCL_SUCCESS;
    j->refs++;
    stand_in_nccl_state.live++;
    pthread_mutex_unlock(&lock);
    if (result != LT_NCCL_SUCCESS)
        release(c);
    *out = result == LT_NCCL_SUCCESS ? c : NULL;
    return result == LT_NCCL_SUCCESS ? LT_NCCL_IN_PROGRESS : result;
}

int ncclCommFinalize(void *comm_)
{
    comm *c = comm_;
    BEGIN(c);
    if (c->posted > c->done || c->finalized)
        return wrong("a sum is in progress, or the communicator was finalized already");
    c->finalized = true;
    c->slow = stand_in_nccl_state.slow;
    return LT_NCCL_IN_PROGRESS;
}

int ncclCommDestroy(void *comm_)
{
    comm *c = comm_;
    return c->finalized ? release(c) : wrong("the communicator was not finalized");
}

int ncclCommAbort(void *comm_)
{
    pthread_mutex_lock(&lock);
    stand_in_nccl_state.aborted++;
    pthread_mutex_unlock(&lock);
    while (*(volatile bool *)&stand_in_nccl_state.stuck)
        nanosleep(&(struct timespec){.tv_nsec = 1000 * 1000}, NULL);
    return release(comm_);
}

/* ==== Sums ==================================================================================== */

static size_t bytes_of(int dtype)
{
    return dtype == LT_NCCL_F64 ? 8 : dtype == LT_NCCL_F32 ? 4 : 2;
}

static double get(const void *from, int dtype, size_t i)
{
    return dtype == LT_NCCL_F64   ? ((const double *)from)[i]
           : dtype == LT_NCCL_F32 ? ((const float *)from)[i]
           : dtype == LT_NCCL_F16 ? of_f16(((const uint16_t *)from)[i])
                                  : of_bf16(((const uint16_t *)from)[i]);
}

static void put(void *to, int dtype, size_t i, double value)
{
    if (dtype == LT_NCCL_F64)
        ((double *)to)[i] = value;
    else if (dtype == LT_NCCL_F32)
        ((float *)to)[i] = (float)value;
    else
        ((uint16_t *)to)[i] = dtype == LT_NCCL_F16 ? to_f16((float)value) : to_bf16((float)value);
}

static bool is_same(const job *j, int k)
{
    for (int r = 0; r < j->size; r++)
        if (j->rank[r]->n_ops != j->rank[0]->n_ops ||
            j->rank[r]->op[k].count != j->rank[0]->op[k].count ||
            j->rank[r]->op[k].dtype != j->rank[0]->op[k].dtype)
            return false;
    return true;
}

static void sum(job *j, int k)
{
    const op *o = &j->rank[0]->op[k];
    char *part[MAX_RANKS];
    size_t bytes = o->count * bytes_of(o->dtype);
    for (int r = 0; r < j->size; r++)
        part[r] = memcpy(malloc(bytes + 1), j->rank[r]->op[k].from, bytes);
    for (int by = 1; by < j->size; by *= 2)
        for (int r = 0; r + by < j->size; r += 2 * by)
            for (size_t i = 0; i < o->count; i++)
                put(part[r], o->dtype, i,
                    get(part[r], o->dtype, i) + get(part[r + by], o->dtype, i));
    for (int r = 0; r < j->size; r++)
        memcpy(j->rank[r]->op[k].to, part[0], bytes);
    for (int r = 0; r < j->size; r++)
        free(part[r]);
}

/* Computes the sums of the current group once all ranks have posted it. */
static int sum_group(job *j)
{
    for (int r = 0; r < j->size; r++)
        if (!j->rank[r] || j->rank[r]->posted != j->rank[0]->posted ||
            j->rank[r]->posted == j->rank[r]->done)
            return LT_NCCL_IN_PROGRESS;
    for (int k = 0; k < j->rank[0]->n_ops; k++)
        if (!is_same(j, k))
            return wrong("the sums of the ranks differ");
    for (int k = 0; k < j->rank[0]->n_ops; k++)
        sum(j, k);
    for (int r = 0; r < j->size; r++)
        j->rank[r]->done++;
    return LT_NCCL_SUCCESS;
}

/* Whether the test has set that the current sum never completes. If it is to fail, it does so on
 * the rank that the test has set. */
static bool is_stuck(comm *c)
{
    const stand_in_nccl *s = &stand_in_nccl_state;
    if (c->posted == c->done || (c->posted != s->fail && c->posted != s->hang))
        return false;
    if (c->posted == s->fail && c->rank == s->rank) {
        snprintf(last, sizeof last, "socket closed by 10.0.0.2");
        c->error = REMOTE;
    }
    return true;
}

static int progress(comm *c)
{
    if (c->slow > 0 && c->slow-- > 0)
        return LT_NCCL_IN_PROGRESS;
    if (c->error || is_stuck(c))
        return c->error ? c->error : LT_NCCL_IN_PROGRESS;
    if (c->job->joined < c->job->size)
        return LT_NCCL_IN_PROGRESS;
    return c->posted > c->done ? sum_group(c->job) : LT_NCCL_SUCCESS;
}

int ncclCommGetAsyncError(void *comm_, int *result)
{
    BEGIN((comm *)comm_);
    pthread_mutex_lock(&lock);
    *result = progress(comm_);
    pthread_mutex_unlock(&lock);
    return LT_NCCL_SUCCESS;
}

int ncclGroupStart(void)
{
    group.depth++;
    return LT_NCCL_SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int what, void *comm_,
                  void *stream)
{
    comm *c = comm_;
    BEGIN(c);
    if (group.depth != 1 || what != LT_NCCL_SUM || !stream || c->finalized || c->posted > c->done ||
        (group.comm && group.comm != c))
        return wrong("the communicator is not ready for a sum");
    if (!group.comm)
        c->n_ops = 0;
    group.comm = c;
    if (c->n_ops == MAX_OPS)
        return wrong("too many sums at once");
    c->op[c->n_ops++] = (op){from, to, count, dtype};
    return LT_NCCL_IN_PROGRESS;
}

int ncclGroupEnd(void)
{
    comm *c = group.comm;
    if (--group.depth > 0 || !c)
        return LT_NCCL_SUCCESS;
    group.comm = NULL;
    BEGIN(c);
    pthread_mutex_lock(&lock);
    count_unfinished(c->job, -1);
    c->posted++;
    count_unfinished(c->job, 1);
    c->slow = stand_in_nccl_state.slow;
    stand_in_nccl_state.sums++;
    pthread_mutex_unlock(&lock);
    return LT_NCCL_IN_PROGRESS;
}
