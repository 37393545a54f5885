/* cublas.h - matrix products by cuBLASLt. cublas.c alone calls it; cublas_calls.c makes products of
 * the calls of matmul and linear. Part of libluatrain-cuda.so, and of no other library.
 *
 * Matrices are dense and row-major; factors are f32, f16 or bf16, both the same, and the result is
 * of that type or f32. Sums are in f32. LT_EUNSUPPORTED comes before anything is written: cuBLASLt
 * has nothing for that, and an own kernel has to do it. Those are
 *   - f64, and integers
 *   - sums of no terms that get a bias
 *   - what its heuristics refuse, know no algorithm for, or none with so much workspace
 */
#ifndef LT_OPS_CUDA_CUBLAS_H
#define LT_OPS_CUDA_CUBLAS_H

#include "ops/cuda/env.h"
#include "ops/cuda/libraries.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_cublas_config {
    bool tf32;          /* f32 factors may be rounded to 10 bits, on tensor cores */
    size_t workspace;   /* bytes that a product may want; 0: LT_CUBLAS_WORKSPACE */
} lt_cublas_config;

#define LT_CUBLAS_WORKSPACE ((size_t)32 << 20) /* what NVIDIA advises for Hopper */

/* A handle, and plans by product, for one device and one stream. For one thread at a time. */
typedef struct lt_cublas lt_cublas;

/* table is copied, env borrowed. New. NULL with a sentence in text. */
lt_cublas *lt__cublas_new(const lt_cublaslt_table *table, const lt_cuda_env *env,
                          const lt_cublas_config *config, char *text, size_t bytes);
void lt__cublas_free(lt_cublas *d); /* NULL is fine */
const lt_cuda_env *lt__cublas_env(const lt_cublas *d); /* borrowed */

/* ==== Products ================================================================================ */

/* What goes with a product, in a vector. */
typedef enum lt_cublas_side {
    LT_CUBLAS_NO_SIDE,
    LT_CUBLAS_BIAS,      /* side (n) is added to each row of the result */
    LT_CUBLAS_ROW_SUMS   /* side (m) gets the sums of a's rows: of the terms, not of the result */
} lt_cublas_side;

enum { LT_CUBLAS_A, LT_CUBLAS_B, LT_CUBLAS_OUT, LT_CUBLAS_SIDE, LT_CUBLAS_OPERANDS };

/* out[i] (m, n) = a[i] (m, k) b[i] (k, n) for i < batch, written or added. All members are 64-bit
 * words: equal products have equal bytes. */
typedef struct lt_cublas_product {
    int64_t dtype, out_dtype;    /* lt_dtype of a and b; of out and side */
    int64_t batch, m, n, k;
    int64_t turn_a, turn_b;      /* 1: a is stored as (k, m), b as (n, k) */
    int64_t a_step, b_step, out_step; /* elements from one matrix of the batch to the next; 0: one
                                       * for all, not of out */
    int64_t side, add;           /* lt_cublas_side; 1: to what is in out */
    int64_t align[LT_CUBLAS_OUT + 1]; /* bytes that addresses of a, b and out are multiples of */
} lt_cublas_product;

/* LT_OK and how many bytes of workspace it wants; LT_EUNSUPPORTED; LT_ENOMEM; LT_EENV. Plans are
 * kept, answers of LT_EUNSUPPORTED too. Products without elements or terms want none. */
lt_status lt__cublas_plan(lt_cublas *d, const lt_cublas_product *p, size_t *workspace);
/* Puts it into the stream. operand: addresses on the device, by LT_CUBLAS_A and so on. */
lt_status lt__cublas_run(lt_cublas *d, const lt_cublas_product *p,
                         void *const operand[LT_CUBLAS_OPERANDS], void *workspace);

/* ==== Calls of ops ============================================================================ */

/* Bytes of call->scratch. LT_NO_SCRATCH when a plan has failed otherwise than by
 * LT_EUNSUPPORTED. */
size_t lt__cublas_linear_scratch(lt_cublas *d, const lt_call *c, bool backward);
lt_status lt__cublas_linear_fwd(lt_cublas *d, lt_call *c);
/* All gradients. Those of w and b may be f32 beside halves, and are not rounded then. */
lt_status lt__cublas_linear_bwd(lt_cublas *d, lt_call *c);

size_t lt__cublas_matmul_scratch(lt_cublas *d, const lt_call *c, bool backward);
lt_status lt__cublas_matmul_fwd(lt_cublas *d, lt_call *c);
lt_status lt__cublas_matmul_bwd(lt_cublas *d, lt_call *c);

#ifdef __cplusplus
}
#endif
#endif
