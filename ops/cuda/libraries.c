/* libraries.c - fills the tables of functions of cuDNN and cuBLASLt. */
#include "ops/cuda/libraries.h"

#include <stdio.h>
#include <string.h>

/* Formats 90800 as "9.8.0" in the caller's buffer. */
static const char *dotted(size_t version, char text[24])
{
    snprintf(text, 24, "%zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return text;
}

#define X(name) #name,
static const char *const cudnn_names[] = {LT_CUDNN_LIST(X)};
static const char *const cublaslt_names[] = {LT_CUBLASLT_LIST(X)};
#undef X

/* A table consists only of function pointers, in the order of its names. */
enum {
    CUDNN_NAMES = sizeof cudnn_names / sizeof *cudnn_names,
    CUBLASLT_NAMES = sizeof cublaslt_names / sizeof *cublaslt_names
};
_Static_assert(sizeof(lt_cudnn_table) == CUDNN_NAMES * sizeof(void (*)(void)), "a table");
_Static_assert(sizeof(lt_cublaslt_table) == CUBLASLT_NAMES * sizeof(void (*)(void)), "a table");

static int check_version(const char *name, size_t version, size_t oldest, char *text, size_t bytes)
{
    char is[24], wanted[24];
    if (version >= oldest)
        return 0;
    snprintf(text, bytes, "%s is version %s, but luatrain requires %s or later", name,
             dotted(version, is), dotted(oldest, wanted));
    return -1;
}

int lt__cublaslt_open(lt_cublaslt_table *table, char *text, size_t bytes)
{
    void (*functions[CUBLASLT_NAMES])(void);
    if (!lt__cuda_open(LT_CUBLASLT_SONAME, "cu" LT_CUDA_MAJOR ":cublas",
                       "cuBLAS " LT_CUDA_MAJOR ".0", cublaslt_names, functions, CUBLASLT_NAMES,
                       text, bytes))
        return -1;
    memcpy(table, functions, sizeof *table);
    return check_version("cuBLASLt", table->cublasLtGetVersion(), LT_CUBLASLT_OLDEST, text, bytes);
}

int lt__cudnn_open_library(lt_cudnn_table *table, char *text, size_t bytes)
{
    void (*functions[CUDNN_NAMES])(void);
    if (!lt__cuda_open("libcudnn.so.9", "cudnn", "cuDNN 9.8", cudnn_names, functions, CUDNN_NAMES,
                       text, bytes))
        return -1;
    memcpy(table, functions, sizeof *table);
    return check_version("cuDNN", table->cudnnGetVersion(), LT_CUDNN_OLDEST, text, bytes);
}
