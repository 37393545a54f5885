/* stand_in_cublaslt.c - a libcublasLt.so that computes on the CPU, in plain loops over host memory.
 * It has the functions that ops/cuda/cublas.c calls and is at least as strict as the library.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(default) /* the library exports the declarations below */
#include <cublasLt.h>

#include "tests/cuda/stand_in.h"
extern stand_in stand_in_state;
#pragma GCC visibility pop
#include "tests/cuda/stand_in_float.h"

stand_in stand_in_state = {.engines = {{{.number = 1, .note = -1}}}};

typedef struct matrix { /* column-major */
    cudaDataType_t type;
    int64_t rows, cols, ld, step;
    int32_t batch;
} matrix;

typedef struct product {
    cublasComputeType_t compute;
    cublasOperation_t turn[2];
    cublasLtEpilogue_t epilogue;
    void *side;
    int32_t side_type;
} product;

enum { A, B, C, D, MATRICES };

typedef struct preferences {
    uint64_t workspace;
    uint32_t align[MATRICES], schemes;
} preferences;

/* What the heuristics write into a cublasLtMatmulAlgo_t, and a run reads. */
typedef struct algorithm {
    char magic[8];
    uint64_t workspace;
    uint32_t align[MATRICES];
} algorithm;
_Static_assert(sizeof(algorithm) <= sizeof(cublasLtMatmulAlgo_t),
               "an algorithm must fit into NVIDIA's type");

/* Returns from the calling function if the test has this call refused. */
#define BEGIN()                                                                                    \
    do {                                                                                           \
        const cublasStatus_t begin_ = (cublasStatus_t)stand_in_call(&stand_in_state, false);       \
        if (begin_ != CUBLAS_STATUS_SUCCESS)                                                       \
            return begin_;                                                                         \
    } while (0)

static cublasStatus_t make(void **made, size_t bytes)
{
    BEGIN();
    stand_in_state.live++;
    *made = calloc(1, bytes);
    return *made ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

static cublasStatus_t end(const void *made)
{
    stand_in_state.live--;
    free((void *)made);
    return (cublasStatus_t)stand_in_call(&stand_in_state, false);
}

/* *to = value, if the given size is that of *to. */
static cublasStatus_t set(void *to, size_t bytes, const void *value, size_t given)
{
    BEGIN();
    if (given != bytes || !value)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void)
{
    return stand_in_state.version ? (size_t)stand_in_state.version : 130100;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    static char text[32];
    snprintf(text, sizeof text, "status %d", (int)status);
    return text;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return make((void **)handle, 1); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return end(handle); }

/* ==== Descriptors ============================================================================= */

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    if (scale != CUDA_R_32F)
        return CUBLAS_STATUS_INVALID_VALUE;
    cublasStatus_t status = make((void **)desc, sizeof(product));
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    product *p = (product *)*desc;
    *p = (product){.compute = compute, .epilogue = CUBLASLT_EPILOGUE_DEFAULT, .side_type = -1};
    return status;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return end(desc); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes)
{
    product *p = (product *)desc;
    switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(&p->turn[A], sizeof p->turn[A], value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(&p->turn[B], sizeof p->turn[B], value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(&p->epilogue, sizeof p->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(&p->side, sizeof p->side, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return set(&p->side_type, sizeof p->side_type, value, bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    if (rows == 0 || cols == 0 || ld < (int64_t)rows)
        return CUBLAS_STATUS_INVALID_VALUE;
    cublasStatus_t status = make((void **)layout, sizeof(matrix));
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    *(matrix *)*layout =
        (matrix){.type = type, .rows = (int64_t)rows, .cols = (int64_t)cols, .ld = ld, .batch = 1};
    return status;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return end(layout); }

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t name,
                                                const void *value, size_t bytes)
{
    matrix *m = (matrix *)layout;
    if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        return set(&m->batch, sizeof m->batch, value, bytes);
    if (name == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)
        return set(&m->step, sizeof m->step, value, bytes);
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made)
{
    cublasStatus_t status = make((void **)made, sizeof(preferences));
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    *(preferences *)*made =
        (preferences){.align = {256, 256, 256, 256}, .schemes = CUBLASLT_REDUCTION_SCHEME_MASK};
    return status;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made)
{
    return end(made);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t made,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void *value, size_t bytes)
{
    static const cublasLtMatmulPreferenceAttributes_t aligns[MATRICES] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    preferences *w = (preferences *)made;
    for (int i = A; i < MATRICES; i++)
        if (name == aligns[i])
            return set(&w->align[i], sizeof w->align[i], value, bytes);
    if (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return set(&w->workspace, sizeof w->workspace, value, bytes);
    if (name == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        return set(&w->schemes, sizeof w->schemes, value, bytes);
    return CUBLAS_STATUS_INVALID_VALUE;
}

/* ==== Heuristics ============================================================================== */

/* Computes m, n and k of D = op(A) op(B). False if the shapes do not fit. */
static bool sizes(const product *p, const matrix *of[MATRICES], int64_t *m, int64_t *n, int64_t *k)
{
    const bool trans_a = p->turn[A] == CUBLAS_OP_T, trans_b = p->turn[B] == CUBLAS_OP_T;
    *m = trans_a ? of[A]->cols : of[A]->rows;
    *k = trans_a ? of[A]->rows : of[A]->cols;
    *n = trans_b ? of[B]->rows : of[B]->cols;
    return *k == (trans_b ? of[B]->cols : of[B]->rows) && of[D]->rows == *m && of[D]->cols == *n;
}

static bool types_fit(const product *p, const matrix *of[MATRICES])
{
    const cudaDataType_t in = of[A]->type, out = of[D]->type;
    const bool fast = p->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (in != of[B]->type || (out != in && out != CUDA_R_32F) || of[C]->type != out)
        return false;
    if (p->compute != CUBLAS_COMPUTE_32F && !(fast && in == CUDA_R_32F))
        return false;
    return p->epilogue == CUBLASLT_EPILOGUE_DEFAULT || p->side_type == (int32_t)out;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int capacity,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *n_results)
{
    const product *p = (const product *)desc;
    const matrix *of[] = {(matrix *)a, (matrix *)b, (matrix *)c, (matrix *)d};
    const preferences *w = (const preferences *)preference;
    int64_t m, n, k;
    BEGIN();
    *n_results = 0;
    stand_in_state.queries[0]++;
    if (!handle || capacity < 1 || !sizes(p, of, &m, &n, &k) || !types_fit(p, of))
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = A; i < MATRICES; i++)
        if (of[i]->batch != of[D]->batch || (i >= C && of[i]->batch > 1 && of[i]->step < m * n))
            return CUBLAS_STATUS_INVALID_VALUE;
    if (stand_in_state.fail_query) {
        cublasStatus_t status = (cublasStatus_t)stand_in_state.fail_query;
        stand_in_state.fail_query = 0;
        return status;
    }
    if ((int)p->epilogue == stand_in_state.unsupported)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < STAND_IN_ENGINES && *n_results < capacity; i++) {
        const stand_in_engine *engine = &stand_in_state.engines[0][i];
        algorithm algo = {.magic = "stand-in", .workspace = (uint64_t)engine->workspace};
        if (engine->number == 0 || engine->fails || algo.workspace > w->workspace)
            continue;
        memcpy(algo.align, w->align, sizeof algo.align);
        memset(&results[*n_results], 0, sizeof *results);
        memcpy(&results[*n_results].algo, &algo, sizeof algo);
        results[(*n_results)++].workspaceSize = (size_t)engine->workspace;
    }
    stand_in_state.built += *n_results > 0;
    return *n_results > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ==== Running ================================================================================= */

static double element(const void *at, cudaDataType_t type, int64_t i)
{
    return type == CUDA_R_32F   ? ((const float *)at)[i]
           : type == CUDA_R_16F ? of_f16(((const uint16_t *)at)[i])
                                : of_bf16(((const uint16_t *)at)[i]);
}

static void set_element(void *at, cudaDataType_t type, int64_t i, double value)
{
    if (type == CUDA_R_32F)
        ((float *)at)[i] = (float)value;
    else
        ((uint16_t *)at)[i] = (type == CUDA_R_16F ? to_f16 : to_bf16)((float)value);
}

/* Element (row, col) of op(matrix i of the batch). */
static double of_matrix(const matrix *m, const void *at, cublasOperation_t turn, int64_t i,
                        int64_t row, int64_t col)
{
    int64_t r = turn == CUBLAS_OP_T ? col : row, c = turn == CUBLAS_OP_T ? row : col;
    return element(at, m->type, i * m->step + c * m->ld + r);
}

static void multiply(const product *p, const matrix *of[MATRICES], const void *a, const void *b,
                     const float *alpha, const float *beta, void *d)
{
    int64_t m, n, k;
    (void)sizes(p, of, &m, &n, &k);
    for (int64_t i = 0; i < of[D]->batch * m * n; i++) {
        int64_t row = i % m, col = i / m % n, each = i / m / n;
        int64_t at = each * of[D]->step + col * of[D]->ld + row;
        double sum = *beta != 0 ? *beta * element(d, of[D]->type, at) : 0;
        for (int64_t j = 0; j < k; j++)
            sum += *alpha * of_matrix(of[A], a, p->turn[A], each, row, j) *
                   of_matrix(of[B], b, p->turn[B], each, j, col);
        if (p->epilogue == CUBLASLT_EPILOGUE_BIAS)
            sum += element(p->side, of[D]->type, row);
        set_element(d, of[D]->type, at, sum);
    }
    for (int64_t col = 0; col < n && p->epilogue == CUBLASLT_EPILOGUE_BGRADB; col++) {
        double sum = 0;
        for (int64_t j = 0; j < k; j++)
            sum += of_matrix(of[B], b, p->turn[B], 0, j, col);
        set_element(p->side, of[D]->type, col, sum);
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t bytes, cudaStream_t stream)
{
    const product *p = (const product *)desc;
    const matrix *of[] = {(matrix *)a_layout, (matrix *)b_layout, (matrix *)c_layout,
                          (matrix *)d_layout};
    const void *at[] = {a, b, c, d};
    algorithm how;
    memcpy(&how, algo, sizeof how);
    if (!handle || !stream || /* the default stream, which the backend never waits for */
        memcmp(how.magic, "stand-in", sizeof how.magic) != 0 || bytes < how.workspace ||
        (how.workspace > 0 && !workspace) || c != d)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = A; i < MATRICES; i++)
        if (!at[i] || (uintptr_t)at[i] % how.align[i] != 0)
            return CUBLAS_STATUS_INVALID_VALUE;
    if (p->epilogue != CUBLASLT_EPILOGUE_DEFAULT && !p->side)
        return CUBLAS_STATUS_INVALID_VALUE;
    cublasStatus_t status = (cublasStatus_t)stand_in_call(&stand_in_state, true);
    if (stand_in_state.fail_run)
        status = (cublasStatus_t)stand_in_state.fail_run;
    stand_in_state.fail_run = 0;
    if (how.workspace > 0)
        memset(workspace, 0xff, how.workspace);
    if (status == CUBLAS_STATUS_EXECUTION_FAILED || status == CUBLAS_STATUS_INTERNAL_ERROR ||
        status == CUBLAS_STATUS_MAPPING_ERROR) /* a part of the result is written */
        set_element(d, of[D]->type, 0, 777);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    multiply(p, of, a, b, alpha, beta, d);
    stand_in_state.run++;
    return CUBLAS_STATUS_SUCCESS;
}
