/* libraries.h - NVIDIA's libraries, opened at run time: tables of the functions that the plugin
 * calls. Building the plugin needs their headers, but not the libraries.
 */
#ifndef LT_OPS_CUDA_LIBRARIES_H
#define LT_OPS_CUDA_LIBRARIES_H

#include <cublasLt.h>
#include <stdbool.h> /* needed by cudnn.h */
#include <cudnn.h>
#include <stdio.h>

#include "ops/cuda/find_library.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "13": the major version of CUDA, of the headers */
#define LT_CUDA_MAJOR LT_CUDA_MAJOR_OF(CUBLAS_VER_MAJOR)
#define LT_CUDA_MAJOR_OF(major) LT_CUDA_MAJOR_TEXT(major)
#define LT_CUDA_MAJOR_TEXT(major) #major

#define LT_CUBLASLT_SONAME "libcublasLt.so." LT_CUDA_MAJOR

/* oldest supported versions; cuDNN 9.8 is the first that can plan for a device described by
 * properties (tools/cuda.cmake has it, too) */
#define LT_CUDNN_OLDEST 90800
#define LT_CUBLASLT_OLDEST (10000 * CUBLAS_VER_MAJOR)

/* clang-format off */
#define LT_CUDNN_LIST(X)                                                                           \
    X(cudnnGetVersion) X(cudnnGetCudartVersion) X(cudnnGetErrorString)                             \
    X(cudnnGetLastErrorString) X(cudnnCreate) X(cudnnDestroy) X(cudnnSetStream)                    \
    X(cudnnBackendCreateDescriptor) X(cudnnBackendDestroyDescriptor) X(cudnnBackendSetAttribute)   \
    X(cudnnBackendGetAttribute) X(cudnnBackendFinalize) X(cudnnBackendExecute)
/* clang-format on */

/* clang-format off */
#define LT_CUBLASLT_LIST(X)                                                                        \
    X(cublasLtGetVersion) X(cublasLtGetStatusString) X(cublasLtCreate) X(cublasLtDestroy)          \
    X(cublasLtMatmulDescCreate) X(cublasLtMatmulDescDestroy) X(cublasLtMatmulDescSetAttribute)     \
    X(cublasLtMatrixLayoutCreate) X(cublasLtMatrixLayoutDestroy)                                   \
    X(cublasLtMatrixLayoutSetAttribute) X(cublasLtMatmulPreferenceCreate)                          \
    X(cublasLtMatmulPreferenceDestroy) X(cublasLtMatmulPreferenceSetAttribute)                     \
    X(cublasLtMatmulAlgoGetHeuristic) X(cublasLtMatmul)
/* clang-format on */

#define X(name) __typeof__(name) *name;
typedef struct lt_cudnn_table {
    LT_CUDNN_LIST(X)
} lt_cudnn_table;
typedef struct lt_cublaslt_table {
    LT_CUBLASLT_LIST(X)
} lt_cublaslt_table;
#undef X

/* Writes "9.19.0" for 91900. Returns text. */
static inline const char *lt__version_text(size_t v, char text[24])
{
    snprintf(text, 24, "%zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
    return text;
}

/* Fill a table, and write to text which file is used, or why no file will do: see
 * lt__cuda_open().
 * Return 0, or -1 if no file will do. Open cuBLASLt first: cuDNN loads it by its soname. */
int lt__cublaslt_open(lt_cublaslt_table *table, char *text, size_t bytes);
int lt__cudnn_open_library(lt_cudnn_table *table, char *text, size_t bytes);
/* Loads the other files of this cuDNN, which takes 0.2 s, so that cuDNN does not load files of
 * another version. */
void lt__cudnn_load_parts(const lt_cudnn_table *table);

#ifdef __cplusplus
}
#endif
#endif
