/* group.c - the part of a group that does not depend on its transport: argument checks, the
 * background thread, and the order between that thread and the rank's own.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/queue.h"
#include "core/tensor.h"
#include "dist/group.h"
#include "dist/sum.h"

enum { MAX_WAITING = 64 };

typedef struct task {
    lt_status (*fn)(void *ud);
    void *ud;
} task;

struct lt_group {
    const lt_transport *transport;
    lt_endpoint *self;
    lt_group *job; /* the group that this is a part of; or this group itself */
    lt_part part;  /* its members, if it is a part */
    int rank, size;
    int threads;     /* number of threads that compute; 0 if unknown */
    lt_queue *tasks; /* NULL until the first lt_group_start() */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t idle;
    atomic_bool awaited; /* the rank's thread is in lt_group_wait() and computes nothing */
    int open;            /* number of tasks that are started and not done */
    lt_status status;    /* status of the first task that failed */
    char message[1024];  /* its error message */
};

lt_group *lt__group_new(const lt_transport *transport, lt_endpoint *self, int rank, int size)
{
    lt_group *g = lt__calloc(1, sizeof *g, "for a group");
    if (!g) {
        transport->close(self);
        return NULL;
    }
    *g = (lt_group){.transport = transport, .self = self, .rank = rank, .size = size};
    g->job = g;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->idle, NULL);
    return g;
}

lt_status lt_group_leave(lt_group *g)
{
    if (g->tasks)
        LT_TRY(lt_group_wait(g));
    return g->transport->leave && g->job == g ? g->transport->leave(g->self) : LT_OK;
}

void lt_group_close(lt_group *g)
{
    if (!g)
        return;
    if (g->tasks) {
        lt__queue_close(g->tasks);
        pthread_join(g->thread, NULL);
        lt__queue_free(g->tasks);
    }
    g->transport->close(g->self);
    pthread_cond_destroy(&g->idle);
    pthread_mutex_destroy(&g->lock);
    free(g->part.rank);
    free(g);
}

int lt_group_rank(const lt_group *g) { return g->rank; }
int lt_group_size(const lt_group *g) { return g->size; }
bool lt_group_is_elastic(const lt_group *g) { return g->transport->is_elastic; }
lt_endpoint *lt__group_endpoint(const lt_group *g) { return g->self; }
double lt__group_timeout(const lt_group *g) { return g->self->shm[0].timeout; }
bool lt__group_has_processes(const lt_group *g) { return g->transport->has_processes; }
void lt_group_set_threads(lt_group *g, int threads) { g->threads = threads; }

int lt_group_cpus(const lt_group *g) { return LT_MAX(g->job->self->cpus, 1); }
int lt_group_local_rank(const lt_group *g) { return g->job->self->local_rank; }
uint64_t lt_group_bytes(const lt_group *g) { return g->self->shm[0].bytes + g->self->shm[1].bytes; }

lt_mail *lt__group_mail(lt_group *g)
{
    lt_endpoint *job = g->job->self;
    if (!job->mail)
        job->mail = g->transport->open_mail(job);
    return job->mail;
}

int lt__group_rank_in_job(const lt_group *g, int rank)
{
    return g->part.rank ? g->part.rank[rank] : rank;
}

int lt__group_size_of_job(const lt_group *g) { return g->job->size; }

bool lt__group_alloc_shared(lt_group *g, size_t bytes, lt_external_memory *memory)
{
    return g->transport->alloc_shared && g->transport->alloc_shared(g->self, bytes, memory);
}

lt_status lt__group_add_as_tree(lt_group *g)
{
    return g->transport->add_as_tree ? g->transport->add_as_tree(g->self) : LT_OK;
}

/* ==== In the background ======================================================================= */

static void *work(void *ud)
{
    lt_group *g = ud;
    pthread_mutex_lock(&g->lock); /* wait until begin_work() has written g->thread */
    pthread_mutex_unlock(&g->lock);
    for (task *t; (t = lt__queue_take(g->tasks));) {
        lt_status status = t->fn(t->ud);
        free(t);
        pthread_mutex_lock(&g->lock);
        if (status != LT_OK && g->status == LT_OK) {
            g->status = status;
            strncpy(g->message, lt_errmsg(), sizeof g->message - 1);
        }
        if (--g->open == 0)
            pthread_cond_broadcast(&g->idle);
        pthread_mutex_unlock(&g->lock);
    }
    return NULL;
}

static lt_status begin_work(lt_group *g)
{
    if (g->tasks)
        return LT_OK;
    if (!(g->tasks = lt__queue_new(MAX_WAITING)))
        return lt_errcode();
    pthread_mutex_lock(&g->lock);
    bool made = pthread_create(&g->thread, NULL, work, g) == 0;
    pthread_mutex_unlock(&g->lock);
    if (made)
        return LT_OK;
    lt__queue_free(g->tasks);
    g->tasks = NULL;
    return lt_fail(LT_ENOMEM, "the system cannot start a thread for communication");
}

lt_status lt_group_start(lt_group *g, lt_status (*fn)(void *ud), void *ud)
{
    LT_TRY(begin_work(g));
    task *t;
    LT_TRY(LT_CALLOC(t, 1, "for a group"));
    *t = (task){fn, ud};
    pthread_mutex_lock(&g->lock);
    g->open++;
    pthread_mutex_unlock(&g->lock);
    lt__queue_put(g->tasks, t);
    return LT_OK;
}

lt_status lt_group_wait(lt_group *g)
{
    pthread_mutex_lock(&g->lock);
    atomic_store(&g->awaited, true);
    while (g->open > 0)
        pthread_cond_wait(&g->idle, &g->lock);
    atomic_store(&g->awaited, false);
    lt_status status = g->status;
    pthread_mutex_unlock(&g->lock);
    return status == LT_OK ? LT_OK : lt_fail(status, "%s", g->message);
}

/* ==== Communication =========================================================================== */

/* Whether a waiting thread may spin. beside: it needs a CPU in addition to the computing threads;
 * otherwise it takes the place of one. */
static bool may_spin(const lt_group *g, bool beside)
{
    return g->threads > 0 && g->threads + beside <= g->job->self->cpus;
}

/* Before a collective, send or receive: the rank's thread waits for all started tasks; the
 * background thread runs one of them, so it does not wait. */
static lt_status take_turn(lt_group *g)
{
    bool behind = g->tasks && pthread_equal(pthread_self(), g->thread);
    if (g->tasks && !behind)
        LT_TRY(lt_group_wait(g));
    g->self->shm[0].spin = may_spin(g, behind && !atomic_load(&g->awaited));
    return LT_OK;
}

static lt_status check_rank(const lt_group *g, const char *who, int rank)
{
    if (rank < 0 || rank >= g->size)
        return lt_fail(LT_EINVAL, "%s: rank %d is out of range 0 to %d", who, rank, g->size - 1);
    return LT_OK;
}

static lt_status check_other(const lt_group *g, const char *who, int rank)
{
    LT_TRY(check_rank(g, who, rank));
    return rank == g->rank ? lt_fail(LT_EINVAL, "%s: rank %d is this rank", who, rank) : LT_OK;
}

static lt_status check_sum(const lt_sum *s)
{
    if (!lt__sum_supports(s->dtype) || s->count < 0)
        return lt_fail(LT_EINVAL, "allreduce: cannot sum %lld %s", (long long)s->count,
                       lt_dtype_name(s->dtype));
    bool half = s->wire == LT_F16 || s->wire == LT_BF16;
    if (s->wire != s->dtype && !(s->dtype == LT_F32 && half))
        return lt_fail(LT_EINVAL, "allreduce: %s cannot travel as %s", lt_dtype_name(s->dtype),
                       lt_dtype_name(s->wire));
    if (s->dtype == LT_I64 && s->scale != 1)
        return lt_fail(LT_EINVAL, "allreduce: integers cannot be scaled");
    return LT_OK;
}

lt_status lt_group_allreduce(lt_group *g, const lt_sum *sum)
{
    LT_TRY(check_sum(sum));
    LT_TRY(take_turn(g));
    return g->transport->allreduce(&g->self->shm[0], sum);
}

lt_status lt_group_allreduce_side(lt_group *g, const lt_sum *sum)
{
    LT_TRY(check_sum(sum));
    pthread_mutex_lock(&g->lock);
    bool beside = g->open > 0; /* the background thread may be running, too */
    pthread_mutex_unlock(&g->lock);
    g->self->shm[1].spin = may_spin(g, beside);
    return g->transport->allreduce(&g->self->shm[1], sum);
}

lt_status lt_group_broadcast(lt_group *g, const char *what, void *data, size_t bytes, int root)
{
    LT_TRY(check_rank(g, "broadcast", root));
    LT_TRY(take_turn(g));
    return g->transport->broadcast(&g->self->shm[0], what, data, bytes, root);
}

lt_status lt_group_barrier(lt_group *g, const char *what)
{
    LT_TRY(take_turn(g));
    return g->transport->barrier(&g->self->shm[0], what);
}

lt_status lt_group_send(lt_group *g, int to, const void *data, size_t bytes)
{
    LT_TRY(check_other(g, "send", to));
    LT_TRY(take_turn(g));
    return g->transport->send(&g->self->shm[0], to, data, bytes);
}

lt_status lt_group_receive(lt_group *g, int from, void *data, size_t bytes)
{
    LT_TRY(check_other(g, "receive", from));
    LT_TRY(take_turn(g));
    return g->transport->receive(&g->self->shm[0], from, data, bytes);
}

/* The length of the line at `at`, without its newline. */
static int line_bytes(const char *at) { return (int)strcspn(at, "\n"); }

/* How many bytes to omit at the beginning of two lines that differ: a long common prefix, except
 * its last bytes, which show the context. */
static int bytes_to_skip(const char *first, const char *own)
{
    enum { SHOWN = 100, BEFORE = 20 };
    int same = 0, bytes = LT_MIN(line_bytes(first), line_bytes(own));
    while (same < bytes && first[same] == own[same])
        same++;
    return same > SHOWN ? same - BEFORE : 0;
}

/* Fails with LT_EDESYNC and the first line in which this rank's text differs from rank 0's. */
static lt_status name_difference(const lt_group *g, const char *what, const char *first,
                                 const char *own)
{
    while (*first && line_bytes(first) == line_bytes(own) &&
           memcmp(first, own, (size_t)line_bytes(own)) == 0) {
        first += line_bytes(first);
        own += line_bytes(own);
        first += *first == '\n';
        own += *own == '\n';
    }
    enum { MOST = 300 };
    int skip = bytes_to_skip(first, own);
    const char *dots = skip > 0 ? "..." : "";
    int first_bytes = line_bytes(first += skip), own_bytes = line_bytes(own += skip);
    return lt_fail(LT_EDESYNC, "the ranks disagree: %s: rank %d has '%s%.*s', rank %d has '%s%.*s'",
                   what, lt__group_rank_in_job(g, 0), dots, LT_MIN(first_bytes, MOST), first,
                   lt__group_rank_in_job(g, g->rank), dots, LT_MIN(own_bytes, MOST), own);
}

lt_status lt_group_compare(lt_group *g, const char *what, const char *text)
{
    size_t own = strlen(text) + 1, bytes = own;
    LT_TRY(lt_group_broadcast(g, what, &bytes, sizeof bytes, 0));
    char *first;
    LT_TRY(LT_CALLOC(first, bytes, "for a comparison"));
    if (g->rank == 0)
        memcpy(first, text, bytes);
    lt_status status = lt_group_broadcast(g, what, first, bytes, 0);
    if (status == LT_OK && strcmp(first, text) != 0) {
        status = name_difference(g, what, first, text);
        lt_group_fail(g);
    }
    free(first);
    return status == LT_OK ? lt_group_barrier(g, what) : status;
}

/* Whether two numbers differ by at most `max`. nan equals nan, and inf equals inf. */
static bool is_near(double a, double b, double max)
{
    return a == b || (isnan(a) && isnan(b)) || fabs(a - b) <= max;
}

lt_status lt_group_compare_numbers(lt_group *g, const char *what, const double *numbers, int n,
                                   double tolerance)
{
    double *first, largest = 0;
    LT_TRY(LT_CALLOC(first, n, "for a comparison"));
    memcpy(first, numbers, (size_t)n * sizeof *first);
    lt_status status = lt_group_broadcast(g, what, first, (size_t)n * sizeof *first, 0);
    int i = 0;
    for (int k = 0; k < n; k++)
        if (isfinite(first[k]))
            largest = fmax(largest, fabs(first[k]));
    while (i < n && is_near(first[i], numbers[i], tolerance * largest))
        i++;
    if (status == LT_OK && i < n) {
        status = lt_fail(LT_EDESYNC,
                         "the ranks disagree: %s: number %d is %.9g on rank %d and %.9g "
                         "on rank %d",
                         what, i + 1, first[i], lt__group_rank_in_job(g, 0), numbers[i],
                         lt__group_rank_in_job(g, g->rank));
        lt_group_fail(g);
    }
    free(first);
    return status == LT_OK ? lt_group_barrier(g, what) : status;
}

/* ==== Parts =================================================================================== */

static lt_status find_members(const lt_group *g, const int64_t *colors, lt_part *part)
{
    LT_TRY(LT_CALLOC(part->rank, g->size, "for %d ranks", g->size));
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank)
            part->index = part->size;
        if (colors[rank] == colors[g->rank])
            part->rank[part->size++] = rank;
    }
    return LT_OK;
}

/* Makes this rank's part. all (size): zeros; memory for the colors, then the handles, of all
 * ranks. */
static lt_status make_part(lt_group *g, int color, int64_t *all, lt_part *part, lt_group **to)
{
    lt_endpoint *self;
    lt_sum sum = {"the split of the ranks", all, g->size, LT_I64, LT_I64, 1};
    all[g->rank] = color;
    LT_TRY(lt_group_allreduce(g, &sum));
    LT_TRY(find_members(g, all, part));
    memset(all, 0, (size_t)g->size * sizeof *all);
    LT_TRY(g->transport->offer(g->self, part, &all[g->rank]));
    LT_TRY(lt_group_allreduce(g, &sum));
    LT_TRY(g->transport->join(g->self, part, all, &self));
    if (!(*to = lt__group_new(g->transport, self, part->index, part->size)))
        return lt_errcode();
    (*to)->job = g;
    (*to)->threads = g->threads;
    return LT_OK;
}

/* At the end, waits until all ranks have joined: one that closes its part may free memory that the
 * others join with. */
lt_status lt__group_split(lt_group *g, int color, lt_group **to)
{
    if (g->job != g)
        return lt_fail(LT_EUSAGE, "a part of a group cannot be split");
    lt_part part = {0};
    lt_group *made = NULL;
    int64_t *all;
    lt_status status = LT_CALLOC(all, g->size, "for %d ranks", g->size);
    if (status == LT_OK)
        status = make_part(g, color, all, &part, &made);
    free(all);
    if (status != LT_OK)
        lt_group_fail(g);
    else
        status = lt_group_barrier(g, "the parts of the split");
    if (made)
        made->part = part;
    else
        free(part.rank);
    if (status != LT_OK)
        lt_group_close(made);
    else
        *to = made;
    return status;
}

/* ==== For benchmarks ========================================================================== */

static lt_status time_sums(lt_group *g, const lt_sum *sum, float *mpi, double *seconds, int n)
{
    for (int i = 0; i < n; i++) {
        LT_TRY(lt_group_barrier(g, sum->what));
        double before = lt__seconds();
        if (mpi)
            LT_TRY(g->transport->mpi_allreduce(g->self, sum->data, mpi, (size_t)sum->count));
        else
            LT_TRY(lt_group_allreduce(g, sum));
        seconds[i] = lt__seconds() - before;
    }
    return LT_OK;
}

/* MPI gets a second array, because MPI_Allreduce is slower in place. */
lt_status lt_group_time_allreduce(lt_group *g, int64_t count, lt_dtype wire, bool by_mpi,
                                  double *seconds, int n)
{
    if (by_mpi && !g->transport->mpi_allreduce)
        return lt_fail(LT_EENV, "ranks in one process do not use MPI");
    if (by_mpi && g->job != g)
        return lt_fail(LT_EENV, "MPI_Allreduce needs all ranks of the job, not a part of them");
    size_t bytes = ((size_t)count + 1) * sizeof(float);
    lt_external_memory memory = {0};
    bool is_shared = lt__group_alloc_shared(g, bytes, &memory);
    float *own = is_shared ? NULL : malloc(bytes), *mpi = by_mpi ? malloc(bytes) : NULL;
    lt_sum sum = {"a timed allreduce", is_shared ? memory.data : own, count, LT_F32, wire,
                  1.0 / g->size};
    lt_status status = sum.data && (mpi || !by_mpi)
                           ? LT_OK
                           : lt_fail(LT_ENOMEM, "out of memory for an allreduce of %lld elements",
                                     (long long)count);
    for (int64_t i = 0; status == LT_OK && i < count; i++) {
        ((float *)sum.data)[i] = 1; /* until written, all pages map to one page of zeros */
        if (mpi)
            mpi[i] = 1;
    }
    if (status == LT_OK)
        status = time_sums(g, &sum, mpi, seconds, n);
    if (is_shared)
        memory.deleter(memory.ud, memory.data);
    free(own);
    free(mpi);
    return status;
}

/* ==== Failure ================================================================================= */

static lt_shm *shm_of(const lt_group *g) { return &g->job->self->shm[0]; }

void lt__group_blame(lt_group *g, int rank)
{
    lt__shm_fail(shm_of(g), rank, lt_errcode(), lt_errmsg());
}

void lt_group_fail(lt_group *g) { lt__group_blame(g, g->job->rank); }

bool lt_group_failure(const lt_group *g, int *rank, lt_status *code, char *text, size_t bytes)
{
    lt_shm *shm = shm_of(g);
    if (shm->poll) /* looks for failures of other nodes */
        shm->poll(shm->ud);
    return lt__shm_failure(shm, rank, code, text, bytes);
}

bool lt__group_has_failed(const lt_group *g)
{
    char text[8];
    lt_status code;
    int rank;
    return lt_group_failure(g, &rank, &code, text, sizeof text);
}

lt_status lt__group_check(const lt_group *g)
{
    char text[512];
    lt_status code;
    int rank;
    return lt_group_failure(g, &rank, &code, text, sizeof text)
               ? lt_fail(LT_EPEER, "rank %d failed: %s", rank, text)
               : LT_OK;
}

void lt__group_set_awaited(lt_group *g, int rank)
{
    lt__shm_set_awaited(shm_of(g), LT_SHM_CHANNELS, rank);
}

int lt__group_find_hung(const lt_group *g, int rank, char seen[LT_SEEN_BYTES])
{
    return lt__shm_find_hung(shm_of(g), rank, seen);
}

bool lt__group_has_left(const lt_group *g, int rank)
{
    return g->transport->has_left && g->transport->has_left(g->job->self, rank);
}

void lt_group_set_location(lt_group *g, const char *where, int64_t step)
{
    lt__shm_set_location(shm_of(g), where, step);
}

bool lt_group_is_reporter(lt_group *g, double seconds)
{
    return lt__shm_is_reporter(shm_of(g), seconds);
}
