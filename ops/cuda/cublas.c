/* cublas.c - matrix products with cuBLASLt.
 *
 * cuBLASLt is column-major: a matrix that we store as (rows, columns) is its transpose to cuBLASLt.
 * So we compute out^T = b^T a^T: its A is our b, its B is our a, and its rows are our columns.
 *
 * A plan is the descriptors of one product and the algorithms that the heuristic proposes. Plans
 * are cached by product, and so are failures to find an algorithm. cuBLASLt may still refuse to run
 * an algorithm. Then the next proposal runs, and is used from then on. If all are refused, our own
 * kernel computes this product from then on.
 */
#include "ops/cuda/cublas.h"
#include "ops/backend/plan_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { A = LT_CUBLAS_A, B, OUT, SIDE };
enum { MAX_MATRICES = 65535, CHOICES = 4 };

typedef struct plan {
    lt_plan cached;
    lt_cublas_product product;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout[OUT + 1];
    cublasLtMatmulHeuristicResult_t found[CHOICES]; /* none needs more workspace than the first */
    int n, at; /* number of algorithms, 0 if our own kernel must run; index of the one to run */
} plan;

struct lt_cublas {
    lt_cublaslt_table t;
    const lt_cuda_env *env;
    lt_cublas_config config;
    cublasLtHandle_t handle;
    lt_plan_cache plans;
    bool warned;
};

/* ==== Failures ================================================================================ */

#define BLAS_TRY(expr)                                                                             \
    do {                                                                                           \
        cublasStatus_t blas_try_ = (expr);                                                         \
        if (blas_try_ != CUBLAS_STATUS_SUCCESS)                                                    \
            return blas_try_;                                                                      \
    } while (0)

static lt_status failed(const lt_cublas *d, cublasStatus_t status)
{
    char version[24];
    if (status == CUBLAS_STATUS_ALLOC_FAILED)
        return d->env->host->fail(LT_ENOMEM, "out of memory in cuBLASLt; try a smaller batch");
    return d->env->host->fail(LT_EENV, "cuBLASLt %s failed: %s",
                              lt__version_text(d->t.cublasLtGetVersion(), version),
                              d->t.cublasLtGetStatusString(status));
}

/* Logs that cuBLASLt refuses a product: a warning the first time. Fails if the cause is an earlier
 * kernel that failed, or if `added`: a part of the product may be added to the result. Also fails
 * if memory is short: our own kernel could run, but all later products would be slow too, and a
 * smaller batch mends that. */
static lt_status refused(lt_cublas *d, lt_ctx *ctx, const lt_cublas_product *o,
                         cublasStatus_t status, bool added)
{
    char version[24];
    LT_TRY(d->env->device->sync(d->env->device));
    if (added || status == CUBLAS_STATUS_ALLOC_FAILED)
        return failed(d, status);
    d->env->host->log(
        ctx, d->warned ? LT_LOG_DEBUG : LT_LOG_WARN,
        "%s: cuBLASLt %s refuses a product of %lld x %lld and %lld x %lld in %s: %s; luatrain "
        "tries other algorithms, then its own kernel, which is slow",
        d->env->device->name, lt__version_text(d->t.cublasLtGetVersion(), version), (long long)o->m,
        (long long)o->k, (long long)o->k, (long long)o->n, lt__cuda_dtype_name((int)o->dtype),
        d->t.cublasLtGetStatusString(status));
    d->warned = true;
    return LT_OK;
}

/* ==== Making a plan =========================================================================== */

static cudaDataType_t type_of(int64_t dtype)
{
    return dtype == LT_F16 ? CUDA_R_16F : dtype == LT_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static cublasStatus_t set_desc(lt_cublas *d, plan *p, cublasLtMatmulDescAttributes_t name,
                               const void *value, size_t bytes)
{
    return d->t.cublasLtMatmulDescSetAttribute(p->desc, name, value, bytes);
}

static cublasStatus_t make_desc(lt_cublas *d, plan *p)
{
    const lt_cublas_product *o = &p->product;
    const bool fast = o->dtype == LT_F32 && d->config.tf32;
    const cublasOperation_t turn = CUBLAS_OP_T, as_it_is = CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = o->side == LT_CUBLAS_BIAS       ? CUBLASLT_EPILOGUE_BIAS
                                        : o->side == LT_CUBLAS_ROW_SUMS ? CUBLASLT_EPILOGUE_BGRADB
                                                                        : CUBLASLT_EPILOGUE_DEFAULT;
    const int32_t side_type = type_of(o->out_dtype);
    BLAS_TRY(d->t.cublasLtMatmulDescCreate(
        &p->desc, fast ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
    BLAS_TRY(
        set_desc(d, p, CUBLASLT_MATMUL_DESC_TRANSA, o->trans_b ? &turn : &as_it_is, sizeof turn));
    BLAS_TRY(
        set_desc(d, p, CUBLASLT_MATMUL_DESC_TRANSB, o->trans_a ? &turn : &as_it_is, sizeof turn));
    BLAS_TRY(set_desc(d, p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (o->side == LT_CUBLAS_NO_EPILOGUE)
        return CUBLAS_STATUS_SUCCESS;
    return set_desc(d, p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &side_type, sizeof side_type);
}

/* Makes a layout for (rows, cols) in our row-major view. */
static cublasStatus_t make_layout(lt_cublas *d, plan *p, int which, int64_t dtype, int64_t rows,
                                  int64_t cols, int64_t step)
{
    const int32_t batch = (int32_t)p->product.batch;
    cublasLtMatrixLayout_t *layout = &p->layout[which];
    BLAS_TRY(d->t.cublasLtMatrixLayoutCreate(layout, type_of(dtype), (uint64_t)cols, (uint64_t)rows,
                                             cols));
    if (batch == 1)
        return CUBLAS_STATUS_SUCCESS;
    BLAS_TRY(d->t.cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                   &batch, sizeof batch));
    return d->t.cublasLtMatrixLayoutSetAttribute(
        *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
}

static cublasStatus_t make_layouts(lt_cublas *d, plan *p)
{
    const lt_cublas_product *o = &p->product;
    BLAS_TRY(make_layout(d, p, A, o->dtype, o->trans_a ? o->k : o->m, o->trans_a ? o->m : o->k,
                         o->a_step));
    BLAS_TRY(make_layout(d, p, B, o->dtype, o->trans_b ? o->n : o->k, o->trans_b ? o->k : o->n,
                         o->b_step));
    return make_layout(d, p, OUT, o->out_dtype, o->m, o->n, o->out_step);
}

static cublasStatus_t set_preference(lt_cublas *d, cublasLtMatmulPreference_t preference,
                                     const plan *p)
{
    const uint64_t workspace = d->config.workspace;
    const uint32_t in_f32 = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* for any result type */
    const cublasLtMatmulPreferenceAttributes_t names[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const int64_t *align = p->product.align;
    const uint32_t bytes[] = {(uint32_t)align[B], (uint32_t)align[A], (uint32_t)align[OUT],
                              (uint32_t)align[OUT]};
    BLAS_TRY(d->t.cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    BLAS_TRY(d->t.cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &in_f32, sizeof in_f32));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        BLAS_TRY(d->t.cublasLtMatmulPreferenceSetAttribute(preference, names[i], &bytes[i],
                                                           sizeof bytes[i]));
    return CUBLAS_STATUS_SUCCESS;
}

/* Whether the status means that cuBLASLt does not support a product. */
static bool is_refusal(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
}

static cublasStatus_t choose(lt_cublas *d, plan *p)
{
    cublasLtMatmulPreference_t preference;
    int n = 0;
    BLAS_TRY(d->t.cublasLtMatmulPreferenceCreate(&preference));
    cublasStatus_t status = set_preference(d, preference, p);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = d->t.cublasLtMatmulAlgoGetHeuristic(d->handle, p->desc, p->layout[B], p->layout[A],
                                                     p->layout[OUT], p->layout[OUT], preference,
                                                     CHOICES, p->found, &n);
    d->t.cublasLtMatmulPreferenceDestroy(preference);
    for (int i = 0; i < n && status == CUBLAS_STATUS_SUCCESS; i++)
        if (p->found[i].state == CUBLAS_STATUS_SUCCESS &&
            (p->n == 0 || p->found[i].workspaceSize <= p->found[0].workspaceSize))
            p->found[p->n++] = p->found[i];
    return is_refusal(status) ? CUBLAS_STATUS_SUCCESS : status;
}

/* Fills p for its product. p->n stays 0 if no algorithm supports it. */
static cublasStatus_t complete(lt_cublas *d, plan *p)
{
    BLAS_TRY(make_desc(d, p));
    BLAS_TRY(make_layouts(d, p));
    return choose(d, p);
}

/* ==== Plans =================================================================================== */

static void plan_free(lt_cublas *d, plan *p)
{
    for (int i = A; i <= OUT; i++)
        if (p->layout[i])
            d->t.cublasLtMatrixLayoutDestroy(p->layout[i]);
    if (p->desc)
        d->t.cublasLtMatmulDescDestroy(p->desc);
    free(p);
}

static void plans_free(lt_cublas *d)
{
    for (lt_plan *p; (p = lt__plan_pop(&d->plans));)
        plan_free(d, (plan *)p);
}

/* Sets *found to the plan of a product, which is made if needed. Borrowed until the next call. */
static lt_status plan_for(lt_cublas *d, lt_ctx *ctx, const lt_cublas_product *o, plan **found)
{
    plan *p = (plan *)lt__plan_find(&d->plans, o);
    if ((*found = p))
        return LT_OK;
    if (lt__plan_cache_is_full(&d->plans))
        plans_free(d);
    if (!(p = calloc(1, sizeof *p)))
        return d->env->host->fail(LT_ENOMEM, "out of memory for cuBLASLt plans");
    p->product = *o;
    cublasStatus_t status = complete(d, p);
    if (status != CUBLAS_STATUS_SUCCESS) {
        lt_status failure = refused(d, ctx, o, status, false);
        p->n = 0;
        if (failure != LT_OK) {
            plan_free(d, p);
            return failure;
        }
    }
    lt__plan_add(&d->plans, &p->cached, &p->product);
    *found = p;
    return LT_OK;
}

/* ==== Products ================================================================================ */

static bool is_half(int64_t dtype) { return dtype == LT_F16 || dtype == LT_BF16; }

/* Whether to try cuBLASLt for the product. For more than MAX_MATRICES matrices it may propose an
 * algorithm and then refuse to run it. */
static bool is_asked(const lt_cublas_product *o)
{
    if (o->dtype != LT_F32 && !is_half(o->dtype))
        return false;
    return (o->out_dtype == o->dtype || o->out_dtype == LT_F32) && o->batch <= MAX_MATRICES;
}

/* Whether the result has no elements or is all zeros. */
static bool is_empty(const lt_cublas_product *o)
{
    return o->batch == 0 || o->m == 0 || o->n == 0 ||
           (o->k == 0 && o->side == LT_CUBLAS_NO_EPILOGUE);
}

lt_status lt__cublas_plan(lt_cublas *d, lt_ctx *ctx, const lt_cublas_product *o, size_t *workspace)
{
    plan *p;
    *workspace = 0;
    if (!is_asked(o))
        return LT_EUNSUPPORTED;
    if (is_empty(o) && o->side != LT_CUBLAS_ROW_SUMS)
        return LT_OK;
    if (is_empty(o) || o->k == 0)
        return LT_EUNSUPPORTED;
    LT_TRY(plan_for(d, ctx, o, &p));
    *workspace = p->found[0].workspaceSize;
    return p->n > 0 ? LT_OK : LT_EUNSUPPORTED;
}

static lt_status fill_zeros(lt_cublas *d, const lt_cublas_product *o, void *out)
{
    lt_device *device = d->env->device;
    const size_t bytes = lt__cuda_dtype_bytes((lt_dtype)o->out_dtype);
    const int64_t each = o->m * o->n;
    for (int64_t i = 0; i < o->batch && each > 0 && !o->add; i++)
        LT_TRY(device->fill(device, (char *)out + (size_t)(i * o->out_step) * bytes,
                            (lt_dtype)o->out_dtype, (size_t)each, 0));
    return LT_OK;
}

static cublasStatus_t run_plan(lt_cublas *d, plan *p, void *const operand[LT_CUBLAS_OPERANDS],
                               void *workspace)
{
    const float one = 1, beta = p->product.add ? 1 : 0;
    if (p->product.side != LT_CUBLAS_NO_EPILOGUE)
        BLAS_TRY(set_desc(d, p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &operand[SIDE],
                          sizeof operand[SIDE]));
    return d->t.cublasLtMatmul(d->handle, p->desc, &one, operand[B], p->layout[B], operand[A],
                               p->layout[A], &beta, operand[OUT], p->layout[OUT], operand[OUT],
                               p->layout[OUT], &p->found[p->at].algo, workspace,
                               p->found[0].workspaceSize, (cudaStream_t)d->env->stream);
}

/* Whether the status shows that the call has enqueued no kernel. After other failures a part of the
 * result may be written, which is harmless unless the product is added to the result. */
static bool has_run_nothing(cublasStatus_t status)
{
    return is_refusal(status) || status == CUBLAS_STATUS_NOT_INITIALIZED ||
           status == CUBLAS_STATUS_ARCH_MISMATCH || status == CUBLAS_STATUS_LICENSE_ERROR;
}

static lt_status run_any(lt_cublas *d, lt_ctx *ctx, plan *p,
                         void *const operand[LT_CUBLAS_OPERANDS], void *workspace)
{
    for (; p->at < p->n; p->at++) {
        cublasStatus_t status = run_plan(d, p, operand, workspace);
        if (status == CUBLAS_STATUS_SUCCESS)
            return LT_OK;
        LT_TRY(refused(d, ctx, &p->product, status, p->product.add && !has_run_nothing(status)));
    }
    p->n = 0;
    return LT_EUNSUPPORTED;
}

lt_status lt__cublas_run(lt_cublas *d, lt_ctx *ctx, const lt_cublas_product *o,
                         void *const operand[LT_CUBLAS_OPERANDS], void *workspace, size_t bytes)
{
    size_t wanted;
    plan *p;
    LT_TRY(lt__cublas_plan(d, ctx, o, &wanted));
    if (is_empty(o))
        return fill_zeros(d, o, operand[OUT]);
    LT_TRY(plan_for(d, ctx, o, &p));
    return wanted <= bytes ? run_any(d, ctx, p, operand, workspace) : LT_EUNSUPPORTED;
}

/* ==== Creation and release ==================================================================== */

const lt_cuda_env *lt__cublas_env(const lt_cublas *d) { return d->env; }

lt_cublas *lt__cublas_new(const lt_cublaslt_table *table, const lt_cuda_env *env,
                          const lt_cublas_config *config, char *text, size_t bytes)
{
    char version[24];
    lt_cublas *d = calloc(1, sizeof *d);
    if (!d) {
        snprintf(text, bytes, "out of memory for cuBLASLt");
        return NULL;
    }
    d->t = *table;
    d->env = env;
    d->config = *config;
    d->plans.key_bytes = sizeof(lt_cublas_product);
    if (d->config.workspace == 0)
        d->config.workspace = LT_CUBLAS_WORKSPACE;
    cublasStatus_t status = d->t.cublasLtCreate(&d->handle);
    if (status == CUBLAS_STATUS_SUCCESS)
        return d;
    snprintf(text, bytes, "cuBLASLt %s cannot be used: %s",
             lt__version_text(table->cublasLtGetVersion(), version),
             table->cublasLtGetStatusString(status));
    free(d);
    return NULL;
}

void lt__cublas_free(lt_cublas *d)
{
    if (!d)
        return;
    plans_free(d);
    d->t.cublasLtDestroy(d->handle);
    free(d);
}
