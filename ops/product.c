/* product.c - portable matrix products and column sums.
 *
 * The kernel holds a tile of ROWS rows and one vector of columns in registers and runs over at most
 * DEPTH terms. The columns of b that it needs are first copied into a panel, which makes them
 * dense whatever the strides, and padded with zeros, so that the inner loop knows no edges: numbers
 * beside the edge are computed and not stored. Vectors are GCC's generic ones: 64 bytes are one
 * register or several, as the instruction set has it, and the sums are the same bits.
 */
#include "ops/dnnl.h"
#include "ops/loops.h"
#include "ops/product.h"

enum { ROWS = 4, DEPTH = 256, VECTOR_BYTES = 64 };
enum { TILE = 64 };  /* rows and columns of a task of lt__product() */
enum { STRIP = 512, LINE = 16 }; /* most and least columns of a task of lt__sum_rows() */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

LT_SIMD void lt__product_add(lt_dtype dtype, const lt_product *p, const void *a, const void *b,
                             void *out)
{
    LT_FLOATS(dtype, T,
        enum { COLS = VECTOR_BYTES / sizeof(T) };
        typedef T vector __attribute__((vector_size(VECTOR_BYTES)));
        vector panel[DEPTH];
        for (int64_t col = 0; col < p->n; col += COLS) {
            int cols = (int)least(COLS, p->n - col);
            for (int64_t first = 0; first < p->k; first += DEPTH) {
                int depth = (int)least(DEPTH, p->k - first);
                for (int s = 0; s < depth; s++) {
                    const T *from = (const T *)b + (first + s) * p->b_row + col * p->b_col;
                    if (cols == COLS && p->b_col == 1)
                        memcpy(&panel[s], from, sizeof panel[s]);
                    else
                        for (int j = 0; j < COLS; j++)
                            panel[s][j] = j < cols ? from[j * p->b_col] : 0;
                }
                for (int64_t row = 0; row < p->m; row += ROWS) {
                    int rows = (int)least(ROWS, p->m - row);
                    const T *from[ROWS]; /* rows beside the edge repeat the first */
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

/* Rows [0, m) of out = bias, or zero. */
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

lt_status lt__product(const lt_call *c, bool fast, lt_dtype dtype, const lt_product *p,
                      const void *a, const void *b, const void *bias, void *out, bool add)
{
    if (fast && dtype == LT_F32) {
        lt_status status = lt__dnnl_product(c, p, a, b, bias, out, add);
        if (status != LT_EUNSUPPORTED)
            return status;
    }
    int64_t down = (p->m + TILE - 1) / TILE, across = (p->n + TILE - 1) / TILE;
    LT_PARALLEL_FOR(c, (double)(p->batch * p->m * p->n) * (double)p->k)
    for (int64_t task = 0; task < p->batch * down * across; task++) {
        int64_t i = task / (down * across);
        int64_t row = task / across % down * TILE, col = task % across * TILE;
        lt_product tile = *p;
        tile.m = least(TILE, p->m - row);
        tile.n = least(TILE, p->n - col);
        void *to = lt__at(out, dtype, i * p->out_batch + row * p->out_row + col);
        if (!add)
            begin_rows(dtype, &tile, bias ? lt__at(bias, dtype, col) : NULL, to);
        lt__product_add(dtype, &tile, lt__at(a, dtype, i * p->a_batch + row * p->a_row),
                        lt__at(b, dtype, i * p->b_batch + col * p->b_col), to);
    }
    return LT_OK;
}

/* n <= STRIP columns of rows that are stride apart. */
LT_SIMD static void sum_strip(lt_dtype dtype, int64_t rows, int64_t stride, int64_t n, double scale,
                              const void *in, void *out, bool add)
{
    LT_FLOATS(dtype, T,
        const T *x = in;
        T *y = out;
        double sum[STRIP] = {0};
        for (int64_t i = 0; i < rows; i++, x += stride)
            for (int64_t j = 0; j < n; j++)
                sum[j] += x[j];
        for (int64_t j = 0; j < n; j++)
            LT_PUT(add, y[j], (T)(sum[j] * scale));
    );
}

void lt__sum_rows(const lt_call *c, lt_dtype dtype, int64_t batch, int64_t rows, int64_t cols,
                  double scale, const void *x, void *out, bool add)
{
    /* wide strips stream through memory; a column's sum does not depend on the width */
    int64_t share = (cols / c->threads + LINE - 1) / LINE * LINE;
    int64_t width = least(share > LINE ? share : LINE, STRIP), strips = (cols + width - 1) / width;
    LT_PARALLEL_FOR(c, (double)(batch * rows * cols))
    for (int64_t task = 0; task < batch * strips; task++) {
        int64_t i = task / strips, col = task % strips * width;
        sum_strip(dtype, rows, cols, least(width, cols - col), scale,
                  lt__at(x, dtype, i * rows * cols + col), lt__at(out, dtype, i * cols + col), add);
    }
}
