/* winograd_tile.h - the transforms of F(2x2, 3x3) for one tile, a vector of channels at a time: for
 * winograd.c, which says what they are for. The matrices are
 *
 *     B' = 1  0 -1  0      G = 1    0    0      A' = 1  1  1  0
 *          0  1  1  0          1/2  1/2  1/2         0  1 -1 -1
 *          0 -1  1  0          1/2 -1/2  1/2
 *          0  1  0 -1          0    0    1
 */
#ifndef LT_OPS_WINOGRAD_TILE_H
#define LT_OPS_WINOGRAD_TILE_H

#include "ops/simd.h"

enum { SIDE = 3, TILE = 4, POINTS = TILE * TILE }; /* of the kernel; of the tile of x */

#define UNROLL _Pragma("GCC unroll 16")

/* v = B' d B */
LT_INLINE void transform_input(lt_vec d[TILE][TILE], lt_vec v[TILE][TILE])
{
    lt_vec t[TILE][TILE];
    UNROLL for (int j = 0; j < TILE; j++) {
        t[0][j] = d[0][j] - d[2][j];
        t[1][j] = d[1][j] + d[2][j];
        t[2][j] = d[2][j] - d[1][j];
        t[3][j] = d[1][j] - d[3][j];
    }
    UNROLL for (int i = 0; i < TILE; i++) {
        v[i][0] = t[i][0] - t[i][2];
        v[i][1] = t[i][1] + t[i][2];
        v[i][2] = t[i][2] - t[i][1];
        v[i][3] = t[i][1] - t[i][3];
    }
}

/* y = A' m A */
LT_INLINE void transform_output(lt_vec m[TILE][TILE], lt_vec y[2][2])
{
    lt_vec s[2][TILE];
    UNROLL for (int j = 0; j < TILE; j++) {
        s[0][j] = m[0][j] + m[1][j] + m[2][j];
        s[1][j] = m[1][j] - m[2][j] - m[3][j];
    }
    UNROLL for (int i = 0; i < 2; i++) {
        y[i][0] = s[i][0] + s[i][1] + s[i][2];
        y[i][1] = s[i][1] - s[i][2] - s[i][3];
    }
}

/* w = A y A' */
LT_INLINE void transform_output_gradient(lt_vec y[2][2], lt_vec w[TILE][TILE])
{
    lt_vec s[TILE][2];
    UNROLL for (int j = 0; j < 2; j++) {
        s[0][j] = y[0][j];
        s[1][j] = y[0][j] + y[1][j];
        s[2][j] = y[0][j] - y[1][j];
        s[3][j] = -y[1][j];
    }
    UNROLL for (int i = 0; i < TILE; i++) {
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
    UNROLL for (int j = 0; j < SIDE; j++) {
        s[0][j] = g[0][j];
        s[1][j] = 0.5f * (g[0][j] + g[1][j] + g[2][j]);
        s[2][j] = 0.5f * (g[0][j] - g[1][j] + g[2][j]);
        s[3][j] = g[2][j];
    }
    UNROLL for (int i = 0; i < TILE; i++) {
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
    UNROLL for (int j = 0; j < TILE; j++) {
        s[0][j] = u[0][j] + 0.5f * (u[1][j] + u[2][j]);
        s[1][j] = 0.5f * (u[1][j] - u[2][j]);
        s[2][j] = 0.5f * (u[1][j] + u[2][j]) + u[3][j];
    }
    UNROLL for (int i = 0; i < SIDE; i++) {
        g[i][0] = s[i][0] + 0.5f * (s[i][1] + s[i][2]);
        g[i][1] = 0.5f * (s[i][1] - s[i][2]);
        g[i][2] = 0.5f * (s[i][1] + s[i][2]) + s[i][3];
    }
}

#endif
