/* simd.h - compiles functions for several instruction sets; the best one is selected at load time.
 * Used by other modules too; not installed.
 */
#ifndef LT_CORE_SIMD_H
#define LT_CORE_SIMD_H

/* Marks a function with plain loops that is compiled for each instruction set. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(LT_NO_CLONES)
#define LT_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LT_SIMD
#endif

/* Marks a function that CUDA kernels call too. */
#ifdef __CUDACC__
#define LT_BOTH __host__ __device__
#else
#define LT_BOTH
#endif

/* Marks a helper that is inlined into each LT_SIMD function that calls it. */
#define LT_INLINE static inline __attribute__((always_inline))

#endif
