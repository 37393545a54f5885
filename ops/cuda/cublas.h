/* cublas.h - matrix products with cuBLASLt. Only cublas.c calls cuBLASLt; cublas_calls.c turns
 * calls of matmul and linear into products. Only libluatrain-cuda.so contains these files.
 *
 * Matrices are dense and row-major. Both factors have the same dtype: f32, f16 or bf16. The result
 * has that dtype or f32. Sums are in f32. LT_EUNSUPPORTED means that our own kernel must compute
 * the product. No result that is to be added to has changed then. This applies to
 *   - f64, integers, and factors of different dtypes
 *   - batches of more than 65535 matrices
 *   - products with k = 0 and a side vector (see lt_cublas_epilogue)
 *   - products for which cuBLASLt's heuristic finds no algorithm within the workspace limit
 *   - products for which cuBLASLt refuses to run any algorithm; the first refusal is a warning
 */
#ifndef LT_OPS_CUDA_CUBLAS_H
#define LT_OPS_CUDA_CUBLAS_H

#include "ops/cuda/env.h"
#include "ops/cuda/libraries.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_cublas_config {
    bool tf32;        /* f32 factors may be rounded to 10 mantissa bits, for tensor cores */
    size_t workspace; /* maximum bytes of workspace per product; 0 means LT_CUBLAS_WORKSPACE */
} lt_cublas_config;

#define LT_CUBLAS_WORKSPACE ((size_t)32 << 20) /* NVIDIA's recommendation for Hopper */

/* A cuBLASLt handle and its plan cache, for one device and one stream. Not thread-safe. */
typedef struct lt_cublas lt_cublas;

/* Returns a new object, or NULL with a message in text. Table and config are copied; env is
 * borrowed. */
lt_cublas *lt__cublas_new(const lt_cublaslt_table *table, const lt_cuda_env *env,
                          const lt_cublas_config *config, char *text, size_t bytes);
void lt__cublas_free(lt_cublas *d);                    /* NULL is allowed */
const lt_cuda_env *lt__cublas_env(const lt_cublas *d); /* borrowed */

/* ==== Products ================================================================================ */

/* The epilogue of a product: how its side vector is used. */
typedef enum lt_cublas_epilogue {
    LT_CUBLAS_NO_EPILOGUE,
    LT_CUBLAS_BIAS, /* side (n) is added to each row of the result */
    /* side (m) receives the sums of a's rows (of the factor, not of the result) */
    LT_CUBLAS_ROW_SUMS
} lt_cublas_epilogue;

enum { LT_CUBLAS_A, LT_CUBLAS_B, LT_CUBLAS_OUT, LT_CUBLAS_SIDE, LT_CUBLAS_OPERANDS };

/* out[i] (m, n) = a[i] (m, k) b[i] (k, n) for i < batch, written or added. All members are 64-bit
 * words, so that equal products have equal bytes. */
typedef struct lt_cublas_product {
    int64_t dtype, out_dtype; /* lt_dtype of a and b; of out and side */
    int64_t batch, m, n, k;
    int64_t trans_a, trans_b; /* 1 if a is stored as (k, m); 1 if b is stored as (n, k) */
    /* elements between matrices of the batch; a_step or b_step 0 means one shared matrix */
    int64_t a_step, b_step, out_step;
    int64_t side, add;                /* lt_cublas_epilogue; 1 to add to the values in out */
    int64_t align[LT_CUBLAS_OUT + 1]; /* alignment of the addresses of a, b and out, in bytes */
} lt_cublas_product;

/* Finds an algorithm for o and sets *workspace to the bytes it needs. Fails with LT_EUNSUPPORTED,
 * LT_ENOMEM, or the failure of an earlier kernel. Plans are cached, and so is LT_EUNSUPPORTED.
 * Without a side vector, empty products and products with k = 0 need no workspace. Refusals are
 * logged to ctx. */
lt_status lt__cublas_plan(lt_cublas *d, lt_ctx *ctx, const lt_cublas_product *o, size_t *workspace);
/* Enqueues the product in the stream. operand contains device addresses, indexed by LT_CUBLAS_A
 * etc. workspace has `bytes` bytes. Also LT_EENV, if cuBLASLt fails and may have changed a result
 * that is added to. */
lt_status lt__cublas_run(lt_cublas *d, lt_ctx *ctx, const lt_cublas_product *o,
                         void *const operand[LT_CUBLAS_OPERANDS], void *workspace, size_t bytes);

/* ==== Calls of ops ============================================================================ */

/* Bytes of call->scratch. LT_SCRATCH_FAILED if planning failed with an error other than
 * LT_EUNSUPPORTED. */
size_t lt__cublas_linear_scratch(lt_cublas *d, const lt_call *c, bool backward);
lt_status lt__cublas_linear_fwd(lt_cublas *d, lt_call *c);
/* Computes the gradient of input i, which is 0 (x) or 1 (w). *summed = whether it has computed that
 * of b too. The gradient of w may be f32 when the inputs are f16 or bf16; it is not rounded to 16
 * bits then. */
lt_status lt__cublas_linear_grad(lt_cublas *d, lt_call *c, int i, bool *summed);

size_t lt__cublas_matmul_scratch(lt_cublas *d, const lt_call *c, bool backward);
lt_status lt__cublas_matmul_fwd(lt_cublas *d, lt_call *c);
/* Computes the gradient of input i. */
lt_status lt__cublas_matmul_grad(lt_cublas *d, lt_call *c, int i);

#ifdef __cplusplus
}
#endif
#endif
