/* nccl.c - connects the stand-in for NCCL to the emulation. The linker (--wrap) redirects calls of
 * lt__nccl_open_library() to this file.
 *
 * The stand-in computes a sum in the last rank that polls. So all work that is queued before the
 * sum in its stream must have run by then.
 */
#include "ops/cuda/nccl.h"
#include "tests/cuda/shim.h"
#include "tests/cuda/shim/enter.h"

static lt_nccl_table nccl;
static int versions_apart;

int __real_lt__nccl_open_library(lt_nccl_table *table, int *version, char *text, size_t bytes);
int __wrap_lt__nccl_open_library(lt_nccl_table *table, int *version, char *text, size_t bytes);

void shim_set_nccl_versions(int apart) { versions_apart = apart; }

static int all_reduce(const void *from, void *to, size_t count, int dtype, int op, void *comm,
                      void *stream)
{
    shim_check_memory(from);
    shim_check_memory(to);
    shim_enter_after(stream);
    shim_leave();
    return nccl.ncclAllReduce(from, to, count, dtype, op, comm, stream);
}

static int poll_comm(void *comm, int *async)
{
    shim_enter_after(NULL);
    int result = nccl.ncclCommGetAsyncError(comm, async);
    shim_leave();
    return result;
}

int __wrap_lt__nccl_open_library(lt_nccl_table *table, int *version, char *text, size_t bytes)
{
    if (shim_hides_library("NCCL", text, bytes))
        return -1;
    int status = __real_lt__nccl_open_library(table, version, text, bytes);
    if (status == 0) {
        nccl = *table;
        *version += versions_apart * shim_device();
        table->ncclAllReduce = all_reduce;
        table->ncclCommGetAsyncError = poll_comm;
    }
    return status;
}
