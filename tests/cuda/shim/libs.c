/* libs.c - connects the stand-ins for cuDNN and cuBLASLt to the emulation. A stand-in computes on
 * the host, inside the call. To keep the order of the stream, the functions below first run
 * everything that is queued in the stream of the call, and open device memory for its duration.
 * They also check that the thread's device owns the memory that the call uses.
 *
 * The linker (--wrap) redirects calls of lt__cudnn_open_library() and lt__cublaslt_open() to this
 * file. They find no library that $SHIM_HIDES names: a test that needs it to be missing would
 * otherwise find the real one. They find neither if the ops are reference kernels.
 */
#include "ops/cuda/libraries.h"
#include "tests/cuda/shim/enter.h"
#include "tests/cuda/stand_in.h"

static __typeof__(cudnnBackendExecute) *run_plan;
static __typeof__(cudnnBackendSetAttribute) *set_attribute;
static __typeof__(cublasLtMatmul) *run_product;

int __real_lt__cudnn_open_library(lt_cudnn_table *table, char *text, size_t bytes);
int __real_lt__cublaslt_open(lt_cublaslt_table *table, char *text, size_t bytes);
int __wrap_lt__cudnn_open_library(lt_cudnn_table *table, char *text, size_t bytes);
int __wrap_lt__cublaslt_open(lt_cublaslt_table *table, char *text, size_t bytes);

static cudnnStatus_t set(cudnnBackendDescriptor_t desc, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t n, const void *values)
{
    for (int64_t i = 0; i < n && type == CUDNN_TYPE_VOID_PTR; i++)
        shim_check_memory(((void *const *)values)[i]);
    return set_attribute(desc, name, type, n, values);
}

static cudnnStatus_t execute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                             cudnnBackendDescriptor_t pack)
{
    if (shim_skips_call())
        return CUDNN_STATUS_SUCCESS;
    shim_enter_after(handle->stream);
    cudnnStatus_t status = shim_has_failed() ? CUDNN_STATUS_EXECUTION_FAILED
                                             : run_plan(handle, plan, pack);
    shim_leave();
    return status;
}

static cublasStatus_t multiply(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                               const void *alpha, const void *a, cublasLtMatrixLayout_t of_a,
                               const void *b, cublasLtMatrixLayout_t of_b, const void *beta,
                               const void *c, cublasLtMatrixLayout_t of_c, void *d,
                               cublasLtMatrixLayout_t of_d, const cublasLtMatmulAlgo_t *algo,
                               void *workspace, size_t bytes, cudaStream_t stream)
{
    const void *const memory[] = {a, b, c, d, workspace};
    for (int i = 0; i < 5; i++)
        shim_check_memory(memory[i]);
    if (shim_skips_call())
        return CUBLAS_STATUS_SUCCESS;
    shim_enter_after(stream);
    cublasStatus_t status = CUBLAS_STATUS_EXECUTION_FAILED;
    if (!shim_has_failed())
        status = run_product(handle, desc, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algo,
                             workspace, bytes, stream);
    shim_leave();
    return status;
}

int __wrap_lt__cudnn_open_library(lt_cudnn_table *table, char *text, size_t bytes)
{
    if (shim_hides_library("cuDNN", text, bytes))
        return -1;
    int status = __real_lt__cudnn_open_library(table, text, bytes);
    if (status == 0) {
        run_plan = table->cudnnBackendExecute;
        set_attribute = table->cudnnBackendSetAttribute;
        table->cudnnBackendExecute = execute;
        table->cudnnBackendSetAttribute = set;
    }
    return status;
}

int __wrap_lt__cublaslt_open(lt_cublaslt_table *table, char *text, size_t bytes)
{
    if (shim_hides_library("cuBLASLt", text, bytes))
        return -1;
    int status = __real_lt__cublaslt_open(table, text, bytes);
    if (status == 0) {
        run_product = table->cublasLtMatmul;
        table->cublasLtMatmul = multiply;
    }
    return status;
}
