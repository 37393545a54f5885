/* product.h - matrix products and column sums, the building blocks of matmul, linear and conv2d.
 *
 * A product is described by strides, so that transposed factors, rows of images and taps of kernels
 * need no copies. There are two implementations: oneDNN for dense products in f32 and bf16, and
 * portable C in f32 and f64 for the rest. The portable code sums in the element type: 256 terms at
 * a time in registers, then these partial sums. It makes training without oneDNN possible. In f64
 * it runs at half the speed and is the reference for f32. Each element is summed by one thread in
 * an order that depends only on the sizes, so that the bits depend neither on the number of threads
 * nor on the instruction set.
 */
#ifndef LT_OPS_CPU_PRODUCT_H
#define LT_OPS_CPU_PRODUCT_H

#include "ops/kernel.h"

/* out[i] (m, n) = a[i] (m, k) b[i] (k, n) for i < batch. Strides are in elements: element (r, s)
 * of a[i] is a[i * a_batch + r * a_row + s * a_col]. */
typedef struct lt_product {
    int64_t batch, m, n, k;
    int64_t a_batch, a_row, a_col;
    int64_t b_batch, b_row, b_col;
    int64_t out_batch, out_row, out_col;
} lt_product;

/* A product of dense matrices. trans_a: a is stored as (k, m); trans_b: b is stored as (n, k). */
static inline lt_product lt__product_of(int64_t batch, int64_t m, int64_t n, int64_t k,
                                        bool trans_a, bool trans_b)
{
    return (lt_product){.batch = batch,
                        .m = m,
                        .n = n,
                        .k = k,
                        .a_batch = m * k,
                        .a_row = trans_a ? 1 : k,
                        .a_col = trans_a ? m : 1,
                        .b_batch = k * n,
                        .b_row = trans_b ? 1 : n,
                        .b_col = trans_b ? k : 1,
                        .out_batch = m * n,
                        .out_row = n,
                        .out_col = 1};
}

/* An array with its dtype, for kernels that accept several dtypes. */
typedef struct lt_operand {
    void *data;
    lt_dtype dtype;
} lt_operand;

/* The elements of x, starting at `offset`. data is NULL if x is NULL. */
static inline lt_operand lt__operand(const lt_tensor *x, int64_t offset)
{
    if (!x)
        return (lt_operand){.data = NULL};
    lt_dtype dtype = (lt_dtype)x->dtype;
    return (lt_operand){(char *)x->data + offset * (int64_t)lt_dtype_bytes(dtype), dtype};
}

/* Computes the product p, which must be from lt__product_of(), on the threads of the call, and
 * writes it to out or adds it. bias (n) is added to each row; its data must be NULL if `add` is
 * set, and may be NULL otherwise. fast: try oneDNN first. A product in bf16 that oneDNN does not
 * compute fails with LT_EUNSUPPORTED before anything is written. lt__product_ready() reports this
 * beforehand, for fast = true. */
lt_status lt__product(const lt_call *c, bool fast, const lt_product *p, lt_operand a, lt_operand b,
                      lt_operand bias, lt_operand out, bool add);
lt_status lt__product_ready(const lt_call *c, const lt_product *p, lt_operand a, lt_operand b,
                            lt_operand bias, lt_operand out);

/* Whether the fast kernels can compute gradient i, x or w, of the linear() or pointwise conv2d() c:
 * lt__product_ready() of its product. In matmul.c. */
lt_status lt__linear_ready(const lt_call *c, int i);

/* out += a b with portable code in the calling thread, for kernels that divide the work themselves.
 * Strides are arbitrary; batch is ignored. */
void lt__product_add(lt_dtype dtype, const lt_product *p, const void *a, const void *b, void *out);

/* out (cols) = the sum over the rows of x (rows, cols), written or added. Sums are in double; for
 * f32 and bf16, 64 rows at a time are first summed in f32. */
void lt__sum_rows(const lt_call *c, int64_t rows, int64_t cols, lt_operand x, lt_operand out,
                  bool add);

#endif
