/* loops.h - elementwise loops over arrays of different shapes, for the op files that broadcast.
 *
 * An op file writes one plain loop over dense blocks (an lt_block_fn). lt__map() splits the work
 * into blocks, distributes them over the threads, and first copies inputs that are stretched or of
 * half precision into small buffers. So the loops need not handle broadcasting or halves, and all
 * of them vectorise. Half-precision results are computed from f32 values and rounded once.
 */
#ifndef LT_OPS_CPU_LOOPS_H
#define LT_OPS_CPU_LOOPS_H

#include "ops/kernel.h"

/* Dense elements with a shape, which may differ from the shape of the tensor that contains them.
 * Both pointers are borrowed. */
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

/* ==== Dispatch on dtypes ====================================================================== */

/* Runs the body with T as int64_t, int32_t or uint8_t. */
#define LT_INTEGERS(dtype, T, ...)                                                                 \
    do {                                                                                           \
        switch (dtype) {                                                                           \
            LT_CASE(LT_I64, int64_t, T, __VA_ARGS__)                                               \
            LT_CASE(LT_I32, int32_t, T, __VA_ARGS__)                                               \
        default: {                                                                                 \
            typedef uint8_t T;                                                                     \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        }                                                                                          \
    } while (0)

/* Runs the body with T as the unsigned integer of the given size, to move elements of any dtype. */
#define LT_SIZES(bytes, T, ...)                                                                    \
    do {                                                                                           \
        switch (bytes) {                                                                           \
            LT_CASE(1, uint8_t, T, __VA_ARGS__)                                                    \
            LT_CASE(2, uint16_t, T, __VA_ARGS__)                                                   \
            LT_CASE(4, uint32_t, T, __VA_ARGS__)                                                   \
        default: {                                                                                 \
            typedef uint64_t T;                                                                    \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        }                                                                                          \
    } while (0)

/* Runs the body with T as the type to compute in and E as the type of elements: float and uint16_t
 * for bf16, otherwise the type from `types` for both. */
#define LT_WITH_BF16(types, dtype, T, E, ...)                                                      \
    do {                                                                                           \
        if ((dtype) == LT_BF16) {                                                                  \
            typedef float T;                                                                       \
            typedef uint16_t E;                                                                    \
            __VA_ARGS__                                                                            \
        } else                                                                                     \
            types(dtype, T, typedef T E; __VA_ARGS__);                                             \
    } while (0)

/* Rounds to nearest, ties to even. A NaN from bf16 or from arithmetic has 16 trailing zero bits and
 * stays a NaN. */
static inline uint16_t lt__round_bf16(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    return (uint16_t)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

/* The value of an element; a value converted to an element of type E. */
#define LT_VALUE(e) _Generic((e), uint16_t : lt__bf16_to_f32((uint16_t)(e)), default : (e))
#define LT_ELEMENT(E, v) _Generic((E)0, uint16_t : lt__round_bf16((float)(v)), default : (E)(v))

/* ==== Maps ==================================================================================== */

enum { LT_BLOCK = 1024 }; /* elements; one block of each operand fits in L1 */

typedef struct lt_block { /* a run of dense elements */
    int64_t n;
    int64_t first;     /* index of the first element in z */
    void *z;           /* n results */
    const void *in[3]; /* n elements of each input */
    lt_dtype dtype;    /* dtype to compute in: never half, except bf16 if the map allows it */
    bool add;          /* add to the values in z */
    const lt_call *c;  /* the call, with the op's options */
} lt_block;
typedef void (*lt_block_fn)(const lt_block *b);

/* Cost of one element, in simple operations. */
enum { LT_CHEAP = 1, LT_COSTLY = 16 /* calls libm */ };

typedef struct lt_map { /* z (+)= fn(in...), where each input broadcasts to z's dims */
    lt_block_fn fn;
    lt_dtype dtype; /* dtype to compute in; f32 is used for a half dtype */
    int cost;
    bool add;
    bool bf16; /* fn reads and writes bf16 itself, if all operands are bf16 */
    int n_in;
    lt_array z, in[3];
} lt_map;
void lt__map(const lt_call *c, const lt_map *map);
/* The dtype that a map computes in. Halves are widened block by block and rounded once, unless fn
 * converts bf16 itself, element by element. */
static inline lt_dtype lt__widened(lt_dtype dtype) { return lt__is_half(dtype) ? LT_F32 : dtype; }

/* Computes the gradient of input i of a broadcasting op. map computes the gradient for each element
 * of the output, whose dims are in map->z; this function fills in its destination and `add`. If the
 * input is stretched, the gradient goes to scratch and is then summed over the stretched axes. */
void lt__put_grad(const lt_call *c, int i, lt_map *map);
/* Bytes of scratch that lt__put_grad() needs for any input. Can be used as op->scratch. */
size_t lt__grad_scratch(const lt_call *c, bool backward);

/* dst (+)= the sum of src over the axes in which dst has size 1 or no axis. Axes are matched from
 * the last one backwards. Both have the same dtype, f32 or f64. Sums are in double, in an order
 * that depends only on the shapes. In reduce.c. */
void lt__sum_to(const lt_call *c, lt_array dst, lt_array src, bool add, void *scratch);
size_t lt__sum_to_scratch(const lt_tensor *dst, const lt_tensor *src);

#endif
