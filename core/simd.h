/* simd.h - code for each instruction set, chosen when the program is loaded. A door of core for the
 * rooms above. Not installed.
 */
#ifndef LT_CORE_SIMD_H
#define LT_CORE_SIMD_H

/* On a function with plain loops: compiled for each instruction set. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(LT_NO_CLONES)
#define LT_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LT_SIMD
#endif

/* On a function that CUDA kernels call too. */
#ifdef __CUDACC__
#define LT_BOTH __host__ __device__
#else
#define LT_BOTH
#endif

/* On a function that becomes part of each that is marked LT_SIMD and calls it. */
#define LT_INLINE static inline __attribute__((always_inline))

#endif
