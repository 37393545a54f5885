/* nccl.h - NCCL, opened at run time: allreduce between GPUs.
 *
 * NCCL's header is not needed for the build. This file declares only what we call, copied from
 * nccl.h of NCCL 2.28. A test compares the declarations with nccl.h where that is installed. Names
 * in brackets are sections of NVIDIA's NCCL User Guide.
 */
#ifndef LT_OPS_CUDA_NCCL_H
#define LT_OPS_CUDA_NCCL_H

#include "ops/cuda/env.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LT_NCCL_OLDEST = 21800, LT_NCCL_ID_BYTES = 128, LT_NCCL_MAGIC = (int)0xcafebeef };
enum { LT_NCCL_SUCCESS = 0, LT_NCCL_IN_PROGRESS = 7 };            /* ncclResult_t */
enum { LT_NCCL_F16 = 6, LT_NCCL_F32, LT_NCCL_F64, LT_NCCL_BF16 }; /* ncclDataType_t */
enum { LT_NCCL_SUM = 0 };                                         /* ncclRedOp_t */

typedef struct lt_nccl_id {
    char bytes[LT_NCCL_ID_BYTES];
} lt_nccl_id; /* ncclUniqueId */

/* The members that ncclConfig_t had in NCCL 2.18. Later versions read as many bytes as `size` says
 * and use defaults for newer members. [Communicator Creation] */
typedef struct lt_nccl_config {
    size_t size;
    unsigned magic, version; /* the NCCL version whose struct this is */
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} lt_nccl_config;

/* X(name, arguments): all functions return an ncclResult_t. */
/* clang-format off */
#define LT_NCCL_LIST(X)                                                                            \
    X(ncclGetVersion, (int *version))                                                              \
    X(ncclGetUniqueId, (lt_nccl_id *id))                                                           \
    X(ncclCommInitRankConfig, (void **comm, int size, lt_nccl_id id, int rank,                     \
                               lt_nccl_config *config))                                            \
    X(ncclCommGetAsyncError, (void *comm, int *result))                                            \
    X(ncclCommFinalize, (void *comm))                                                              \
    X(ncclCommDestroy, (void *comm))                                                               \
    X(ncclCommAbort, (void *comm))                                                                 \
    X(ncclGroupStart, (void))                                                                      \
    X(ncclGroupEnd, (void))                                                                        \
    X(ncclAllReduce, (const void *from, void *to, size_t count, int dtype, int op, void *comm,     \
                      void *stream))
/* clang-format on */

typedef struct lt_nccl_table {
#define X(name, arguments) int(*name) arguments;
    LT_NCCL_LIST(X)
#undef X
    const char *(*ncclGetErrorString)(int result);
    const char *(*ncclGetLastError)(void *comm);
} lt_nccl_table;

/* Fills a table and sets *version, which is 22809 for NCCL 2.28.9. Writes to text which file is
 * used, or why no file will do: see lt__cuda_open(). Returns 0, or -1 if no file will do. */
int lt__nccl_open_library(lt_nccl_table *table, int *version, char *text, size_t bytes);
/* Writes "2.28.9" for 22809. Returns text. */
const char *lt__nccl_version_text(int version, char text[24]);

/* ==== A communicator ========================================================================== */

/* A nonblocking communicator. After a call that starts an operation, poll lt__nccl_is_ready(). The
 * functions fail with LT_EPEER and NCCL's message. */
typedef struct lt_nccl {
    const lt_nccl_table *calls; /* borrowed */
    const lt_cuda_env *env;     /* borrowed */
    void *comm;                 /* NCCL's communicator, or NULL */
    bool finalizing, finalized;
} lt_nccl;

/* Makes the id of a new communicator. One rank calls this and sends the id to the others. */
lt_status lt__nccl_make_id(const lt_nccl *n, char id[LT_NCCL_ID_BYTES]);
/* Starts joining the communicator of all ranks that use this id. [Creating a communicator with
 * options] */
lt_status lt__nccl_init(lt_nccl *n, const char id[LT_NCCL_ID_BYTES], int rank, int size);
/* *ready = whether the last operation is complete. A sum counts as complete once it is enqueued. */
lt_status lt__nccl_is_ready(lt_nccl *n, bool *ready);
/* Allreduces data (count elements) and tail (n_tail floats) in place, both in device memory. The
 * sums are enqueued in `stream`, a cudaStream_t, once the communicator is ready again. [Group
 * Calls: Group Operation Ordering Semantics, Nonblocking Group Operation] */
lt_status lt__nccl_allreduce(lt_nccl *n, void *data, int64_t count, lt_dtype dtype, float *tail,
                             int n_tail, void *stream);
/* Starts finalizing the communicator. [Finalizing a communicator] */
lt_status lt__nccl_finalize(lt_nccl *n);
/* Frees the communicator, and aborts it first if it is not finalized. May never return: see
 * lt__nccl_close(). [Destroying a communicator, Error handling and communicator abort] */
void lt__nccl_destroy(lt_nccl *n);
/* Calls close(ud), which destroys a communicator, in a detached thread, and waits for it for at
 * most `seconds`. A thread is needed because ncclCommAbort() may never return: it waits for another
 * thread of NCCL, which may wait for another rank (NVIDIA/nccl#1777). Returns false if close()
 * still runs; it then owns ud. Without memory or a thread, does nothing and returns false. */
bool lt__nccl_close(void (*close)(void *ud), void *ud, double seconds);

#ifdef __cplusplus
}
#endif
#endif
