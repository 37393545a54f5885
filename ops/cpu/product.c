/* product.c - portable matrix products and column sums.
 *
 * The kernel keeps a tile of ROWS rows and one vector of columns in registers and runs over at most
 * DEPTH terms. It first copies the columns of b to a panel, which makes them dense for any stride
 * and pads them with zeros. So the inner loop has no edge cases; elements beyond the edge are
 * computed and not stored. The vectors are GCC's generic ones: 64 bytes are one register or
 * several, depending on the instruction set, and the bits of the sums are the same.
 */
#include "ops/cpu/dnnl.h"
#include "ops/cpu/loops.h"
#include "ops/cpu/product.h"
#include "ops/cpu/simd.h"

enum { ROWS = 4, DEPTH = 256, VECTOR_BYTES = 64 };
enum { TILE = 64 };               /* rows and columns per task of lt__product() */
enum { STRIP = 256, PARTS = 16 }; /* lt__sum_rows(): columns at a time; parts of the rows */
enum { RUN = 64 };                /* rows of f32 and bf16 that are summed in f32 */

LT_SIMD static void add_product(lt_dtype dtype, const lt_product *p, const void *a, const void *b,
                                void *out)
{
    LT_FLOATS(dtype, T,
        enum { COLS = VECTOR_BYTES / sizeof(T) };
        typedef T vector __attribute__((vector_size(VECTOR_BYTES)));
        vector panel[DEPTH];
        for (int64_t col = 0; col < p->n; col += COLS) {
            int cols = (int)lt__min(COLS, p->n - col);
            for (int64_t first = 0; first < p->k; first += DEPTH) {
                int depth = (int)lt__min(DEPTH, p->k - first);
                for (int s = 0; s < depth; s++) {
                    const T *from = (const T *)b + (first + s) * p->b_row + col * p->b_col;
                    if (cols == COLS && p->b_col == 1)
                        memcpy(&panel[s], from, sizeof panel[s]);
                    else
                        for (int j = 0; j < COLS; j++)
                            panel[s][j] = j < cols ? from[j * p->b_col] : 0;
                }
                for (int64_t row = 0; row < p->m; row += ROWS) {
                    int rows = (int)lt__min(ROWS, p->m - row);
                    const T *from[ROWS]; /* rows beyond the edge repeat the first one */
                    vector sum[ROWS] = {{0}};
                    for (int i = 0; i < ROWS; i++)
                        from[i] = (const T *)a + (row + (i < rows ? i : 0)) * p->a_row +
                                  first * p->a_col;
                    for (int s = 0; s < depth; s++)
                        for (int i = 0; i < ROWS; i++)
                            sum[i] += from[i][s * p->a_col] * panel[s];
                    for (int i = 0; i < rows; i++) {
                        T *to = (T *)out + (row + i) * p->out_row + col * p->out_col;
                        for (int j = 0; j < cols; j++)
                            to[j * p->out_col] += sum[i][j];
                    }
                }
            }
        }
    );
}

/* A function of its own, because GCC exports a function that is compiled for several CPUs. */
void lt__product_add(lt_dtype dtype, const lt_product *p, const void *a, const void *b, void *out)
{
    add_product(dtype, p, a, b, out);
}

/* Sets rows [0, m) of out to the bias, or to zero. */
static void begin_rows(lt_dtype dtype, const lt_product *p, const void *bias, void *out)
{
    size_t bytes = (size_t)p->n * lt_dtype_bytes(dtype);
    for (int64_t i = 0; i < p->m; i++) {
        void *row = lt__at(out, dtype, i * p->out_row);
        if (bias)
            memcpy(row, bias, bytes);
        else
            memset(row, 0, bytes);
    }
}

static lt_conv_task task_of(const lt_product *p, lt_operand a, lt_operand b, lt_operand bias,
                            lt_operand out, bool add)
{
    return (lt_conv_task){
        .kind = LT_PRODUCT, .product = p, .x = a, .w = b, .bias = bias, .y = out, .add = add};
}

static bool any_half(lt_operand a, lt_operand b, lt_operand out)
{
    return lt__is_half(a.dtype) || lt__is_half(b.dtype) || lt__is_half(out.dtype);
}

lt_status lt__product_ready(const lt_call *c, const lt_product *p, lt_operand a, lt_operand b,
                            lt_operand bias, lt_operand out)
{
    lt_conv_task task = task_of(p, a, b, bias, out, false);
    return any_half(a, b, out) ? lt__dnnl_ready(c, &task) : LT_OK;
}

/* The portable implementation. All operands have the same dtype. */
static void multiply(const lt_call *c, const lt_product *p, const void *a, const void *b,
                     const void *bias, void *out, lt_dtype dtype, bool add)
{
    int64_t down = (p->m + TILE - 1) / TILE, across = (p->n + TILE - 1) / TILE;
    LT_PARALLEL_FOR(c, (double)(p->batch * p->m * p->n) * (double)p->k)
    for (int64_t task = 0; task < p->batch * down * across; task++) {
        int64_t i = task / (down * across);
        int64_t row = task / across % down * TILE, col = task % across * TILE;
        lt_product tile = *p;
        tile.m = lt__min(TILE, p->m - row);
        tile.n = lt__min(TILE, p->n - col);
        void *to = lt__at(out, dtype, i * p->out_batch + row * p->out_row + col);
        if (!add)
            begin_rows(dtype, &tile, bias ? lt__at(bias, dtype, col) : NULL, to);
        lt__product_add(dtype, &tile, lt__at(a, dtype, i * p->a_batch + row * p->a_row),
                        lt__at(b, dtype, i * p->b_batch + col * p->b_col), to);
    }
}

lt_status lt__product(const lt_call *c, bool fast, const lt_product *p, lt_operand a, lt_operand b,
                      lt_operand bias, lt_operand out, bool add)
{
    lt_conv_task task = task_of(p, a, b, bias, out, add);
    lt_status status = fast ? lt__dnnl_run(c, &task) : LT_EUNSUPPORTED;
    if (status != LT_EUNSUPPORTED || any_half(a, b, out))
        return status;
    multiply(c, p, a.data, b.data, bias.data, out.data, out.dtype, add);
    return LT_OK;
}

/* Sums rows of f32 or bf16, one vector of columns after the other. */
LT_INLINE void sum_vectors(bool half, int64_t rows, int64_t stride, int64_t vectors, const void *in,
                           double sum[STRIP])
{
    for (int64_t first = 0; first < rows; first += RUN)
        for (int64_t k = 0; k < vectors; k++) {
            lt_vec run = {0};
            int64_t at = first * stride + k * LT_LANES;
            for (int64_t i = first; i < lt__min(first + RUN, rows); i++, at += stride)
                run += half ? lt__load_bf16((const uint16_t *)in + at)
                            : lt__load_f32((const float *)in + at);
            for (int j = 0; j < LT_LANES; j++)
                sum[k * LT_LANES + j] += run[j];
        }
}

/* Sums n <= STRIP columns over rows that are stride apart. */
LT_SIMD static void sum_strip(int64_t rows, int64_t stride, int64_t n, const void *in,
                              lt_dtype dtype, double sum[STRIP])
{
    int64_t done = dtype == LT_F64 ? 0 : n / LT_LANES * LT_LANES;
    memset(sum, 0, STRIP * sizeof *sum);
    if (dtype == LT_BF16)
        sum_vectors(true, rows, stride, done / LT_LANES, in, sum);
    else
        sum_vectors(false, rows, stride, done / LT_LANES, in, sum);
    for (int64_t i = 0; i < rows && done < n; i++)
        for (int64_t j = done, at = i * stride + j; j < n; j++, at++)
            sum[j] += dtype == LT_F64   ? ((const double *)in)[at]
                      : dtype == LT_F32 ? ((const float *)in)[at]
                                        : lt__bf16_to_f32(((const uint16_t *)in)[at]);
}

static void put_sums(int64_t n, const double *sum, void *out, lt_dtype dtype, bool add)
{
    for (int64_t j = 0; j < n && dtype == LT_BF16; j++) {
        uint16_t *y = (uint16_t *)out + j;
        *y = lt__f64_to_bf16(sum[j] + (add ? lt__bf16_to_f32(*y) : 0));
    }
    if (dtype != LT_BF16)
        LT_FLOATS(dtype, T, for (int64_t j = 0; j < n; j++)
                                LT_PUT(add, ((T *)out)[j], (T)sum[j]););
}

void lt__sum_rows(const lt_call *c, int64_t rows, int64_t cols, lt_operand x, lt_operand out,
                  bool add)
{
    for (int64_t col = 0; col < cols; col += STRIP) {
        double sum[PARTS][STRIP];
        int64_t n = lt__min(STRIP, cols - col);
        LT_PARALLEL_FOR(c, (double)(rows * n))
        for (int part = 0; part < PARTS; part++) {
            int64_t first = rows * part / PARTS, end = rows * (part + 1) / PARTS;
            sum_strip(end - first, cols, n, lt__at(x.data, x.dtype, first * cols + col), x.dtype,
                      sum[part]);
        }
        for (int part = 1; part < PARTS; part++)
            for (int64_t j = 0; j < n; j++)
                sum[0][j] += sum[part][j];
        put_sums(n, sum[0], lt__at(out.data, out.dtype, col), out.dtype, add);
    }
}
