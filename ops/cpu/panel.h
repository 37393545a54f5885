/* panel.h - products of vectors of channels, for our own convolution code (winograd.c, conv_thin.c,
 * conv_weights.c).
 *
 * Factors are read in 32-bit words. A word contains the terms that one instruction multiplies and
 * adds: one f32 or two bf16. A panel is a sequence of vectors of such words. A thread keeps ROWS x
 * MOST vectors of sums in registers. This is fast only with 32 registers of 64 bytes (AVX-512).
 */
#ifndef LT_OPS_CPU_PANEL_H
#define LT_OPS_CPU_PANEL_H

#include "ops/cpu/simd.h"

enum { ROWS = 8, MOST = 2 }; /* sums: rows, and vectors per row */

/* A loop over i from 0 to n - 1, unrolled. */
#define UNROLL(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

LT_INLINE int64_t bytes_of(bool half) { return half ? 2 : 4; }

/* Interleaves a and b into words of two bf16, with a in the lower half. */
LT_INLINE lt_vec weave(const uint16_t *a, const uint16_t *b)
{
    lt_vec_u16 first, second;
    memcpy(&first, a, sizeof first);
    memcpy(&second, b, sizeof second);
    return (lt_vec)__builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                           6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                           29, 14, 30, 15, 31);
}

/* Copies n vectors to panel, `step` floats apart: in f32, vectors of a; in bf16, a and b
 * interleaved. */
LT_INLINE void pack_words(bool half, int64_t n, const void *a, const void *b, float *panel,
                          int64_t step)
{
    for (int64_t i = 0; i < n * LT_LANES; i += LT_LANES, panel += step)
        lt__store_f32(panel, half ? weave((const uint16_t *)a + i, (const uint16_t *)b + i)
                                  : lt__load_f32((const float *)a + i));
}

/* sum[i][j] += the sum over words s of a[i * a_row + s * a_word] times vector s of the panel at b +
 * j * b_step. */
LT_INLINE void add_products(bool half, int vectors, int64_t words, const float *a, int64_t a_row,
                            int64_t a_word, const float *b, int64_t b_step, lt_vec sum[ROWS][MOST])
{
    for (int64_t s = 0; s < words; s++, a += a_word, b += LT_LANES) {
        lt_vec with[MOST];
        UNROLL(j, vectors)
            with[j] = lt__load_f32(b + j * b_step);
        UNROLL(i, ROWS) {
            uint32_t word;
            memcpy(&word, a + i * a_row, sizeof word);
            lt_vec all = (lt_vec)(word + (lt_vec_u32){0});
            UNROLL(j, vectors)
                sum[i][j] = half ? lt__dot_bf16(sum[i][j], all, with[j])
                                 : sum[i][j] + all * with[j];
        }
    }
}

/* Whether this machine has the instructions that make these products fast. */
static inline bool has_fast_products(bool half)
{
    (void)half; /* unused on some architectures */
#if defined(LT_NO_CLONES)
    return true; /* test builds; speed does not matter */
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    return half ? lt__has_bf16_products() : __builtin_cpu_supports("x86-64-v4");
#else
    return false;
#endif
}

#endif
