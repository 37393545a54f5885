/* panel.h - products of vectors of channels, for the convolutions that this room has code of its
 * own for (winograd.c, conv_thin.c, conv_weights.c).
 *
 * Factors are read in words of 32 bits, the terms that are multiplied and summed: one of f32, or
 * two of bf16, which one instruction takes at once. A panel is made of vectors of words, one after
 * the other. A thread sums ROWS x MOST vectors at a time in its registers; that pays where there
 * are 32 of 64 bytes.
 */
#ifndef LT_OPS_CPU_PANEL_H
#define LT_OPS_CPU_PANEL_H

#include "ops/cpu/simd.h"

enum { ROWS = 8, MOST = 2 }; /* sums: rows, and vectors of each */

#define UNROLL _Pragma("GCC unroll 16")

LT_INLINE int64_t bytes_of(bool half) { return half ? 2 : 4; }

/* Words of two bf16, the first of each from a. */
LT_INLINE lt_vec weave(const uint16_t *a, const uint16_t *b)
{
    lt_vec_u16 first, second;
    memcpy(&first, a, sizeof first);
    memcpy(&second, b, sizeof second);
    return (lt_vec)__builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                           6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                           29, 14, 30, 15, 31);
}

/* Vector k, of n, goes to panel + k * step: of a in f32, of both in bf16. */
LT_INLINE void pack_words(bool half, int64_t n, const void *a, const void *b, float *panel,
                          int64_t step)
{
    for (int64_t i = 0; i < n * LT_LANES; i += LT_LANES, panel += step)
        lt__store_f32(panel, half ? weave((const uint16_t *)a + i, (const uint16_t *)b + i)
                                  : lt__load_f32((const float *)a + i));
}

/* sum[i][j] += the sum over words s of a[i * a_row + s * a_word] and vector s of the panel that
 * begins at b + j * b_step. */
LT_INLINE void add_products(bool half, int vectors, int64_t words, const float *a, int64_t a_row,
                            int64_t a_word, const float *b, int64_t b_step,
                            lt_vec sum[ROWS][MOST])
{
    for (int64_t s = 0; s < words; s++, a += a_word, b += LT_LANES) {
        lt_vec with[MOST];
        UNROLL for (int j = 0; j < vectors; j++)
            with[j] = lt__load_f32(b + j * b_step);
        UNROLL for (int i = 0; i < ROWS; i++) {
            uint32_t word;
            memcpy(&word, a + i * a_row, sizeof word);
            lt_vec all = (lt_vec)(word + (lt_vec_u32){0});
            UNROLL for (int j = 0; j < vectors; j++)
                sum[i][j] = half ? lt__dot_bf16(sum[i][j], all, with[j])
                                 : sum[i][j] + all * with[j];
        }
    }
}

/* Whether this machine has what makes them fast. */
static inline bool has_fast_products(bool half)
{
    (void)half; /* not asked everywhere */
#if defined(LT_NO_CLONES)
    return true; /* a build for tests: its speed is no matter */
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    return half ? lt__has_bf16_products() : __builtin_cpu_supports("x86-64-v4");
#else
    return false;
#endif
}

#endif
