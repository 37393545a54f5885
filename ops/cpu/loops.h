/* loops.h - elementwise loops over arrays of different shapes, for the op files that broadcast.
 *
 * A op file writes one plain loop over dense blocks (an lt_block_fn). lt__map() cuts the work into
 * blocks, shares them out to the threads, and copies what is stretched, or half, into small buffers
 * first; so no loop knows about broadcasting or halves, and every one vectorises. Results of halves
 * are rounded once, from what f32 copies of the tensors would give.
 */
#ifndef LT_OPS_CPU_LOOPS_H
#define LT_OPS_CPU_LOOPS_H

#include "ops/kernel.h"

/* Dense elements and a shape for them, which need not be that of the tensor they lie in. Borrows
 * both. */
typedef struct lt_array {
    void *data;
    const int64_t *dims;
    int64_t count;
    int ndim;
    lt_dtype dtype;
} lt_array;

static inline lt_array lt__array(const lt_tensor *x)
{
    return (lt_array){x->data, x->dims, x->count, x->ndim, (lt_dtype)x->dtype};
}

/* Address of element i. */
static inline void *lt__at(const void *data, lt_dtype dtype, int64_t i)
{
    return (char *)data + i * (int64_t)lt_dtype_bytes(dtype);
}

static inline int64_t lt__least(int64_t a, int64_t b) { return a < b ? a : b; }

/* bytes, rounded up so that what follows them in scratch is aligned like scratch itself. */
static inline size_t lt__aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* ==== Typed loops ============================================================================= */

/* Runs body once with T standing for i64, i32 or u8. */
#define LT_INTEGERS(dtype, T, ...)                                                                 \
    do {                                                                                           \
        switch (dtype) {                                                                           \
        case LT_I64: { typedef int64_t T; __VA_ARGS__ } break;                                     \
        case LT_I32: { typedef int32_t T; __VA_ARGS__ } break;                                     \
        default: { typedef uint8_t T; __VA_ARGS__ } break;                                         \
        }                                                                                          \
    } while (0)

/* As LT_NUMERICS, with unsigned types for the integers: sums, differences and products are the
 * same bits, and overflow wraps instead of being undefined. */
#define LT_WRAPPING(dtype, T, ...)                                                                 \
    do {                                                                                           \
        switch (dtype) {                                                                           \
        case LT_F64: { typedef double T; __VA_ARGS__ } break;                                      \
        case LT_I64: { typedef uint64_t T; __VA_ARGS__ } break;                                    \
        case LT_I32: { typedef uint32_t T; __VA_ARGS__ } break;                                    \
        case LT_U8: { typedef uint8_t T; __VA_ARGS__ } break;                                      \
        default: { typedef float T; __VA_ARGS__ } break;                                           \
        }                                                                                          \
    } while (0)

/* Runs body once with T standing for an unsigned integer of so many bytes: for moving elements. */
#define LT_SIZES(bytes, T, ...)                                                                    \
    do {                                                                                           \
        switch (bytes) {                                                                           \
        case 1: { typedef uint8_t T; __VA_ARGS__ } break;                                          \
        case 2: { typedef uint16_t T; __VA_ARGS__ } break;                                         \
        case 4: { typedef uint32_t T; __VA_ARGS__ } break;                                         \
        default: { typedef uint64_t T; __VA_ARGS__ } break;                                        \
        }                                                                                          \
    } while (0)

/* Runs body once with T standing for the type to compute in and E for that of the elements: float
 * and uint16_t for bf16, else the one that `types` gives for both. */
#define LT_AND_BF16(types, dtype, T, E, ...)                                                       \
    do {                                                                                           \
        if ((dtype) == LT_BF16) { typedef float T; typedef uint16_t E; __VA_ARGS__ }               \
        else types(dtype, T, typedef T E; __VA_ARGS__);                                            \
    } while (0)

/* To the nearest, ties to even. A NaN that comes of bf16 or of arithmetic ends in 16 zeros, and so
 * stays one. */
static inline uint16_t lt__round_bf16(float f)
{
    union { float f; uint32_t u; } v = {f};
    return (uint16_t)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

/* The value of an element; the element, of type E, for a value. */
#define LT_VALUE(e) _Generic((e), uint16_t: lt__bf16_to_f32((uint16_t)(e)), default: (e))
#define LT_ELEMENT(E, v) _Generic((E)0, uint16_t: lt__round_bf16((float)(v)), default: (E)(v))

/* ==== Maps ==================================================================================== */

enum { LT_BLOCK = 1024 };     /* elements; a block of each operand stays in the first cache */

typedef struct lt_block {     /* one run of elements, all dense */
    int64_t n;
    int64_t first;            /* element of z, of the n */
    void *z;                  /* n results */
    const void *in[3];        /* n elements of each input */
    lt_dtype dtype;           /* to compute in; never half, but bf16 where the map says so */
    bool add;                 /* to what is in z */
    const lt_call *c;         /* for options */
} lt_block;
typedef void (*lt_block_fn)(const lt_block *b);

/* What an element costs, in simple operations. */
enum { LT_CHEAP = 1, LT_COSTLY = 16 /* calls the mathematical library */ };

typedef struct lt_map {       /* z (+)= fn(in...), where each input broadcasts to z's dims */
    lt_block_fn fn;
    lt_dtype dtype;           /* to compute in; a half one stands for f32 */
    int cost;
    bool add;
    bool bf16;                /* fn reads and writes bf16 itself, where all is bf16 */
    int n_in;
    lt_array z, in[3];
} lt_map;
void lt__map(const lt_call *c, const lt_map *map);

/* The gradient of input i of a broadcasting op. map gives it at each element of the output, whose
 * dims are in map->z; where to write it, and whether to add, is filled in here. If the input was
 * stretched, all that is computed in scratch, then summed over the stretched axes. */
void lt__put_grad(const lt_call *c, int i, lt_map *map);
/* The scratch that lt__put_grad() needs, whichever the input: for op->scratch. */
size_t lt__grad_scratch(const lt_call *c, bool backward);

/* dst (+)= the sum of src, of the same float dtype, over the axes in which dst is 1 or absent
 * (from the last axis backwards). In double, in an order that depends on the shapes alone.
 * In reduce.c. */
void lt__sum_to(const lt_call *c, lt_array dst, lt_array src, bool add, void *scratch);
size_t lt__sum_to_scratch(const lt_tensor *dst, const lt_tensor *src);

#endif
