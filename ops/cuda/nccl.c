/* nccl.c - see nccl.h. */
#include "ops/cuda/nccl.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ops/cuda/find_library.h"

#define X(name, arguments) #name,
static const char *const names[] = {LT_NCCL_LIST(X) "ncclGetErrorString", "ncclGetLastError"};
#undef X

/* The table consists only of function pointers, in the order of their names. */
enum { NAMES = sizeof names / sizeof *names };
_Static_assert(sizeof(lt_nccl_table) == NAMES * sizeof(void (*)(void)), "a table");

static int version_of(const lt_nccl_table *table)
{
    int version = 0;
    return table->ncclGetVersion(&version) == LT_NCCL_SUCCESS ? version : 0;
}

/* Versions before 2.9 are encoded like 2804, later ones like 20900. */
const char *lt__nccl_version_text(int v, char text[24])
{
    snprintf(text, 24, "%d.%d.%d", v < 10000 ? v / 1000 : v / 10000,
             v < 10000 ? v % 1000 / 100 : v % 10000 / 100, v % 100);
    return text;
}

static bool will_do(const char *file, const void *table, char *why, size_t bytes)
{
    char text[24];
    int version = version_of(table);
    (void)file;
    if (version < LT_NCCL_OLDEST)
        snprintf(why, bytes, "is version %s", lt__nccl_version_text(version, text));
    return version >= LT_NCCL_OLDEST;
}

int lt__nccl_open_library(lt_nccl_table *table, int *version, char *text, size_t bytes)
{
    static const lt_library library = {.soname = "libnccl.so.2",
                                       .packages = "nccl",
                                       .what = "NCCL 2.18 or later",
                                       .names = names,
                                       .n = NAMES,
                                       .will_do = will_do};
    int rc = lt__cuda_open(&library, table, text, bytes);
    *version = rc == 0 ? version_of(table) : 0;
    return rc;
}

/* Returns LT_OK if a call succeeded or is in progress. */
static lt_status status_of(const lt_nccl *n, const char *call, int result)
{
    if (result == LT_NCCL_SUCCESS || result == LT_NCCL_IN_PROGRESS)
        return LT_OK;
    const char *last = n->comm ? n->calls->ncclGetLastError(n->comm) : NULL;
    return n->env->host->fail(LT_EPEER, "%s: %s: %s%s%.300s", n->env->device->name, call,
                              n->calls->ncclGetErrorString(result), last && *last ? ": " : "",
                              last ? last : "");
}

lt_status lt__nccl_make_id(const lt_nccl *n, char id[LT_NCCL_ID_BYTES])
{
    lt_nccl_id made;
    lt_status status = status_of(n, "ncclGetUniqueId", n->calls->ncclGetUniqueId(&made));
    if (status == LT_OK)
        memcpy(id, made.bytes, sizeof made.bytes);
    return status;
}

lt_status lt__nccl_init(lt_nccl *n, const char id[LT_NCCL_ID_BYTES], int rank, int size)
{
    const int as_it_likes = INT_MIN; /* NCCL_CONFIG_UNDEF_INT */
    lt_nccl_config config = {.size = sizeof config,
                             .magic = (unsigned)LT_NCCL_MAGIC,
                             .version = LT_NCCL_OLDEST,
                             .blocking = 0,
                             .cga_cluster_size = as_it_likes,
                             .min_ctas = as_it_likes,
                             .max_ctas = as_it_likes,
                             .split_share = as_it_likes};
    lt_nccl_id all;
    memcpy(all.bytes, id, sizeof all.bytes);
    int result = n->calls->ncclCommInitRankConfig(&n->comm, size, all, rank, &config);
    return status_of(n, "ncclCommInitRankConfig", result);
}

lt_status lt__nccl_is_ready(lt_nccl *n, bool *ready)
{
    int result = LT_NCCL_SUCCESS;
    int answer = n->calls->ncclCommGetAsyncError(n->comm, &result);
    LT_TRY(status_of(n, "ncclCommGetAsyncError", answer));
    *ready = result == LT_NCCL_SUCCESS;
    n->finalized = n->finalizing && *ready;
    return status_of(n, "an NCCL call", result);
}

static int dtype_of(lt_dtype dtype)
{
    return dtype == LT_F32   ? LT_NCCL_F32
           : dtype == LT_F64 ? LT_NCCL_F64
           : dtype == LT_F16 ? LT_NCCL_F16
                             : LT_NCCL_BF16;
}

/* A started group must be ended even after an error, because NCCL's group state is per thread. */
lt_status lt__nccl_allreduce(lt_nccl *n, void *data, int64_t count, lt_dtype dtype, float *tail,
                             int n_tail, void *stream)
{
    const lt_nccl_table *c = n->calls;
    LT_TRY(status_of(n, "ncclGroupStart", c->ncclGroupStart()));
    int result =
        c->ncclAllReduce(data, data, (size_t)count, dtype_of(dtype), LT_NCCL_SUM, n->comm, stream);
    lt_status status = status_of(n, "ncclAllReduce", result);
    if (status == LT_OK && n_tail > 0)
        status = status_of(n, "ncclAllReduce",
                           c->ncclAllReduce(tail, tail, (size_t)n_tail, LT_NCCL_F32, LT_NCCL_SUM,
                                            n->comm, stream));
    result = c->ncclGroupEnd();
    return status == LT_OK ? status_of(n, "ncclGroupEnd", result) : status;
}

lt_status lt__nccl_finalize(lt_nccl *n)
{
    n->finalizing = true;
    return status_of(n, "ncclCommFinalize", n->calls->ncclCommFinalize(n->comm));
}

void lt__nccl_destroy(lt_nccl *n)
{
    if (n->comm)
        (void)(n->finalized ? n->calls->ncclCommDestroy : n->calls->ncclCommAbort)(n->comm);
    n->comm = NULL; /* if freeing it failed, the communicator is leaked */
}

/* ==== Closing with a deadline ================================================================= */

typedef struct closer {
    void (*close)(void *ud);
    void *ud;
    atomic_bool closed;
    atomic_bool left; /* one of the two threads no longer needs this; the other one frees it */
} closer;

static void leave(closer *c)
{
    if (atomic_exchange(&c->left, true))
        free(c);
}

static void *run_closer(void *ud)
{
    closer *c = ud;
    c->close(c->ud);
    atomic_store(&c->closed, true);
    leave(c);
    return NULL;
}

/* Counts sleeps instead of reading a clock, so that time in which the whole job is suspended does
 * not count. */
bool lt__nccl_close(void (*close)(void *ud), void *ud, double seconds)
{
    pthread_t thread;
    bool closed = false;
    closer *c = malloc(sizeof *c);
    if (!c)
        return false;
    *c = (closer){.close = close, .ud = ud};
    if (pthread_create(&thread, NULL, run_closer, c) != 0) {
        free(c);
        return false;
    }
    pthread_detach(thread);
    for (int64_t ms = 0; !(closed = atomic_load(&c->closed)) && ms < seconds * 1000; ms++)
        nanosleep(&(struct timespec){.tv_nsec = 1000 * 1000}, NULL);
    leave(c);
    return closed;
}
