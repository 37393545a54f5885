/* winograd_tile.h - reads tiles of F(2x2, 3x3) from images, transforms them, and writes them, one
 * vector of channels at a time. winograd.c explains the algorithm. The matrices are
 *
 *     B' = 1  0 -1  0      G = 1    0    0      A' = 1  1  1  0
 *          0  1  1  0          1/2  1/2  1/2         0  1 -1 -1
 *          0 -1  1  0          1/2 -1/2  1/2
 *          0  1  0 -1          0    0    1
 *
 * Images are f32 or bf16 (half); transforms are in f32. Factors of products are stored in 32-bit
 * words: one f32 term, or two bf16 terms.
 */
#ifndef LT_OPS_CPU_WINOGRAD_TILE_H
#define LT_OPS_CPU_WINOGRAD_TILE_H

#include "ops/cpu/panel.h"

enum { SIDE = 3, TILE = 4, POINTS = TILE * TILE }; /* side of the kernel; side of a tile of x */

/* ==== Transforms ============================================================================== */

/* v = B' d for a column d of a tile of x; or v' = d' B for a row of that result. */
LT_INLINE void transform_input(const lt_vec d[TILE], lt_vec v[TILE])
{
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[1] - d[3];
}

/* y = A' m A */
LT_INLINE void transform_output(lt_vec m[TILE][TILE], lt_vec y[2][2])
{
    lt_vec s[2][TILE];
    UNROLL(j, TILE) {
        s[0][j] = m[0][j] + m[1][j] + m[2][j];
        s[1][j] = m[1][j] - m[2][j] - m[3][j];
    }
    UNROLL(i, 2) {
        y[i][0] = s[i][0] + s[i][1] + s[i][2];
        y[i][1] = s[i][1] - s[i][2] - s[i][3];
    }
}

/* w = A y A' */
LT_INLINE void transform_output_gradient(lt_vec y[2][2], lt_vec w[TILE][TILE])
{
    lt_vec s[TILE][2];
    UNROLL(j, 2) {
        s[0][j] = y[0][j];
        s[1][j] = y[0][j] + y[1][j];
        s[2][j] = y[0][j] - y[1][j];
        s[3][j] = -y[1][j];
    }
    UNROLL(i, TILE) {
        w[i][0] = s[i][0];
        w[i][1] = s[i][0] + s[i][1];
        w[i][2] = s[i][0] - s[i][1];
        w[i][3] = -s[i][1];
    }
}

/* u = G g G' */
LT_INLINE void transform_kernel(lt_vec g[SIDE][SIDE], lt_vec u[TILE][TILE])
{
    lt_vec s[TILE][SIDE];
    UNROLL(j, SIDE) {
        s[0][j] = g[0][j];
        s[1][j] = 0.5f * (g[0][j] + g[1][j] + g[2][j]);
        s[2][j] = 0.5f * (g[0][j] - g[1][j] + g[2][j]);
        s[3][j] = g[2][j];
    }
    UNROLL(i, TILE) {
        u[i][0] = s[i][0];
        u[i][1] = 0.5f * (s[i][0] + s[i][1] + s[i][2]);
        u[i][2] = 0.5f * (s[i][0] - s[i][1] + s[i][2]);
        u[i][3] = s[i][2];
    }
}

/* g = G' u G */
LT_INLINE void transform_kernel_gradient(lt_vec u[TILE][TILE], lt_vec g[SIDE][SIDE])
{
    lt_vec s[SIDE][TILE];
    UNROLL(j, TILE) {
        s[0][j] = u[0][j] + 0.5f * (u[1][j] + u[2][j]);
        s[1][j] = 0.5f * (u[1][j] - u[2][j]);
        s[2][j] = 0.5f * (u[1][j] + u[2][j]) + u[3][j];
    }
    UNROLL(i, SIDE) {
        g[i][0] = s[i][0] + 0.5f * (s[i][1] + s[i][2]);
        g[i][1] = 0.5f * (s[i][1] - s[i][2]);
        g[i][2] = 0.5f * (s[i][1] + s[i][2]) + s[i][3];
    }
}

/* ==== Images ================================================================================== */

/* Images (n, h, w, c). */
typedef struct {
    void *data;
    int64_t h, w, c;
} image;

typedef struct {
    image x, y; /* x is read in tiles of 4x4; y is divided into tiles of 2x2 */
    bool half;  /* both images are bf16 */
    int64_t pad[2];
    int64_t down, across; /* tiles per image */
    int64_t count;        /* tiles of all images */
} grid;

/* A square of pixels that may extend beyond the image. */
typedef struct {
    char *data;
    int64_t row, pixel;               /* bytes between rows; between pixels */
    int64_t top, bottom, left, right; /* rows [top, bottom), columns [left, right) are inside */
} square;

LT_INLINE square square_of(bool half, const image *x, int64_t n, int64_t row, int64_t column)
{
    int64_t pixel = x->c * bytes_of(half);
    return (square){(char *)x->data + ((n * x->h + row) * x->w + column) * pixel,
                    x->w * pixel,
                    pixel,
                    -row,
                    x->h - row,
                    -column,
                    x->w - column};
}

LT_INLINE void *pixel_of(const square *s, int64_t i, int64_t j)
{
    return s->data + i * s->row + j * s->pixel;
}

/* A position in the sequence of tiles, advanced without divisions. */
typedef struct {
    int64_t n, row, column;
} cursor;

static inline cursor tile_at(const grid *g, int64_t t)
{
    return (cursor){t / (g->down * g->across), t / g->across % g->down * 2, t % g->across * 2};
}

/* Advances by n tiles, which must not extend beyond the end of the row. */
LT_INLINE void advance(const grid *g, cursor *at, int64_t n)
{
    if ((at->column += 2 * n) < g->y.w)
        return;
    at->column = 0;
    if ((at->row += 2) < g->y.h)
        return;
    at->row = 0;
    at->n++;
}

/* The tile's square in x, and in y. */
LT_INLINE square input_of(bool half, const grid *g, const cursor *at)
{
    return square_of(half, &g->x, at->n, at->row - g->pad[0], at->column - g->pad[1]);
}

LT_INLINE square output_of(bool half, const grid *g, const cursor *at)
{
    return square_of(half, &g->y, at->n, at->row, at->column);
}

LT_INLINE lt_vec load(bool half, const void *data, int64_t i)
{
    return half ? lt__load_bf16((const uint16_t *)data + i) : lt__load_f32((const float *)data + i);
}

LT_INLINE void put(bool half, void *data, int64_t i, lt_vec v)
{
    if (half)
        lt__store_bf16_at_once((uint16_t *)data + i, v);
    else
        lt__store_f32((float *)data + i, v);
}

/* Loads pixel (i, j), or zero outside the image. rows: all rows are known to be inside. */
LT_INLINE lt_vec load_pixel(bool half, const square *s, bool rows, int i, int64_t j,
                            int64_t channel)
{
    bool inside = (rows || (i >= s->top && i < s->bottom)) && j >= s->left && j < s->right;
    return inside ? load(half, pixel_of(s, i, j), channel) : (lt_vec){0};
}

/* Computes B' d for columns j and j + 1 of x. */
LT_INLINE void read_columns(bool half, const square *s, bool rows, int64_t j, int64_t channel,
                            lt_vec columns[2][TILE])
{
    UNROLL(k, 2) {
        lt_vec d[TILE];
        UNROLL(i, TILE)
            d[i] = load_pixel(half, s, rows, i, j + k, channel);
        transform_input(d, columns[k]);
    }
}

/* v = B' d B for the tile of x whose last columns are j and j + 1. Its other columns are the last
 * two of the tile on its left, for which `columns` contains B' d. */
LT_INLINE void read_input(bool half, const square *s, bool rows, int64_t j, int64_t channel,
                          lt_vec columns[TILE][TILE], lt_vec v[TILE][TILE])
{
    UNROLL(k, 2 * TILE)
        columns[k / TILE][k % TILE] = columns[k / TILE + 2][k % TILE];
    read_columns(half, s, rows, j, channel, columns + 2);
    UNROLL(i, TILE) {
        lt_vec row[TILE] = {columns[0][i], columns[1][i], columns[2][i], columns[3][i]};
        transform_input(row, v[i]);
    }
}

/* w = A y A' for the tile of dy whose columns are j and j + 1. */
LT_INLINE void read_output_gradient(bool half, const square *s, bool rows, int64_t j,
                                    int64_t channel, lt_vec w[TILE][TILE])
{
    lt_vec y[2][2];
    UNROLL(k, 4)
        y[k / 2][k % 2] = load_pixel(half, s, rows, k / 2, j + k % 2, channel);
    transform_output_gradient(y, w);
}

#endif
