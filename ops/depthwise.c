/* depthwise.c - depthwise 3x3 convolution of images (n, h, w, c) in f32 and bf16.
 *
 * There are nine multiplications for each element that is read and written: what counts is how
 * often an element is loaded, and that memory is walked in order. So the kernels compute a tile of
 * pixels at a time, for one vector of channels after the other: each pixel that the tile meets is
 * loaded once, and streams of memory are read from front to end. In the place of pixels beyond the
 * edges stands a pixel of zeros.
 *
 * Channels come in blocks: 16 in f32, 32 in bf16, of which those with even and those with odd
 * numbers make a vector each, for one instruction turns a word of two halves into either. The last
 * block is moved back over its neighbour where channels are not a multiple of it, and only what is
 * new is kept. Where there are fewer than a block has, vectors run into the next pixel, and over the
 * end of the tensor: its last pixels are copied to where that does no harm.
 *
 * The gradient of x is, with stride 1, the convolution of dy with the turned kernel; with stride 2 a
 * pixel of dy meets nine pixels of dx, and neighbours share some of them. Gradients of w are summed over parts of
 * the batch, and the parts in order; they depend on the sizes alone, and so do the bits.
 */
#include "ops/depthwise.h"
#include "ops/loops.h"
#include "ops/simd.h"

enum { SIDE = 3, TAPS = SIDE * SIDE };
enum { START = TAPS, PACKED };    /* vectors of a packed block: the taps, and what sums begin with */
enum { ROWS = 4 };                /* of a tile */
enum { MOST = 9 * SIDE };         /* pixels that a tile meets */
enum { MOST_PARTS = 64, PART_PIXELS = 64 };
enum { LINE = 64 };               /* bytes of a block */

#define UNROLL _Pragma("GCC unroll 32")

/* ==== Pixels ================================================================================== */

typedef struct {
    void *data;
    int64_t n, h, w, c;
    bool half;
    int64_t safe;             /* pixels from which a block can be loaded; the others lie in */
    const char *rest;
} images;

/* Channels of a block, and the vectors that they make. */
LT_INLINE int block_of(bool half) { return half ? 2 * LT_LANES : LT_LANES; }
LT_INLINE int vectors_of(bool half) { return half ? 2 : 1; }

static int64_t blocks_of(int64_t channels, bool half)
{
    return (channels + block_of(half) - 1) / block_of(half);
}

/* The first channel of block b. */
LT_INLINE int64_t channel_of(int64_t b, int64_t channels, bool half)
{
    int64_t channel = b * block_of(half), last = channels - block_of(half);
    return channel <= last ? channel : last > 0 ? last : 0;
}

static __attribute__((noinline)) void look_up(const images *x, int64_t n, int64_t row,
                                              int64_t column, int rows, int columns,
                                              const void *outside, const void **pixel)
{
    int64_t bytes = x->c * (x->half ? 2 : 4);
    for (int r = 0; r < rows; r++) {
        int64_t first = (n * x->h + row + r) * x->w + column;
        bool inside = row + r >= 0 && row + r < x->h;
        for (int t = 0; t < columns; t++)
            pixel[r * columns + t] =
                !inside || column + t < 0 || column + t >= x->w ? outside
                : first + t < x->safe ? (const char *)x->data + (first + t) * bytes
                                      : x->rest + (first + t - x->safe) * bytes;
    }
}

/* The rows x columns pixels of image n from (row, column) on; `outside` for those that are. further:
 * pixel holds those `by` columns before. */
LT_INLINE void find_pixels(const images *x, int64_t n, int64_t row, int64_t column, int rows,
                           int columns, int by, bool further, const void *outside,
                           const void **pixel)
{
    int64_t bytes = x->c * (x->half ? 2 : 4);
    if (further && column >= by && column + columns <= x->w && bytes >= LINE)
        for (int i = 0; i < rows * columns; i++)
            pixel[i] = pixel[i] == outside ? outside : (const char *)pixel[i] + by * bytes;
    else
        look_up(x, n, row, column, rows, columns, outside, pixel);
}

static inline uintptr_t address_of(const images *x, int64_t n, int64_t row)
{
    return (uintptr_t)x->data + (uintptr_t)((n * x->h + row) * x->w * x->c * (x->half ? 2 : 4));
}

/* Brings memory into the second cache, as many lines as blocks, and moves on behind them. */
LT_INLINE void prefetch(uintptr_t *at, int lines)
{
    UNROLL
    for (int i = 0; i < lines; i++)
        __builtin_prefetch((const void *)(*at + (uintptr_t)(i * LINE)), 0, 2);
    *at += (uintptr_t)(lines * LINE);
}

/* Vector i of a block. */
LT_INLINE lt_vec load(bool half, const void *pixel, int64_t channel, int i)
{
    if (!half)
        return lt__load_f32((const float *)pixel + channel);
    lt_vec_u32 pairs;
    memcpy(&pairs, (const uint16_t *)pixel + channel, sizeof pairs);
    return (lt_vec)(i == 0 ? pairs << 16 : pairs & 0xffff0000);
}

/* A NaN made of bf16 has zeros behind those 16 bits, or ones in front: rounding keeps it one. */
LT_INLINE lt_vec_u32 round_bf16(lt_vec v)
{
    lt_vec_u32 bits = (lt_vec_u32)v;
    return bits + 0x7fff + (bits >> 16 & 1);
}

LT_INLINE void store(bool half, void *pixel, int64_t channel, lt_vec even, lt_vec odd)
{
    if (!half) {
        lt__store_f32((float *)pixel + channel, even);
        return;
    }
    lt_vec_u32 pairs = round_bf16(even) >> 16 | (round_bf16(odd) & 0xffff0000);
    memcpy((uint16_t *)pixel + channel, &pairs, sizeof pairs);
}

/* How pixel r of a source and tap k meet a pixel of the results, along one axis: */
enum {
    BY_ONE,                   /* r - k: stride 1 */
    BY_TWO,                   /* (r - k) / 2: stride 2 */
    BACK                      /* 2 (r - 1) + k: from the results of stride 2 back to its source */
};

/* That pixel, or -1 when there is none among `size`. */
LT_INLINE int meet(int way, int r, int k, int size)
{
    int i = way == BACK ? 2 * (r - 1) + k : r - k;
    if (i < 0 || (way == BY_TWO && i % 2 != 0))
        return -1;
    i = way == BY_TWO ? i / 2 : i;
    return i < size ? i : -1;
}

/* Pixels of the source that `size` pixels of the results meet. */
LT_INLINE int reach(int way, int size)
{
    return way == BY_ONE ? size + SIDE - 1 : way == BY_TWO ? 2 * size + SIDE - 2 : size / 2 + 1;
}

/* Pixels of the source for every `size` of the results. */
LT_INLINE int fresh(int way, int size)
{
    return way == BY_ONE ? size : way == BY_TWO ? 4 * size : size / 4;
}

/* Where the rows lie that follow those at work. */
typedef struct {
    uintptr_t from, to;
} upcoming;

typedef struct {
    images from, to;
    int64_t pad;
    const float *w;           /* packed */
    const void *zeros;        /* a pixel */
    bool add;
} pass;

/* Adds to a pixel, or writes, what is new in block b of it: lanes, vector after vector. */
static __attribute__((noinline)) void put_part(const pass *p, int64_t b, void *pixel,
                                               const float *lanes)
{
    bool half = p->to.half;
    int64_t vectors = vectors_of(half), channel = channel_of(b, p->to.c, half);
    int64_t end = lt__least(channel + block_of(half), p->to.c);
    for (int64_t i = b * block_of(half); i < end; i++) {
        float value = lanes[(i - channel) % vectors * LT_LANES + (i - channel) / vectors];
        if (half)
            ((uint16_t *)pixel)[i] = lt__f32_to_bf16(
                p->add ? lt__bf16_to_f32(((uint16_t *)pixel)[i]) + value : value);
        else
            LT_PUT(p->add, ((float *)pixel)[i], value);
    }
}

/* Block b of to (rows, columns) = the sums of what `from` and the taps make. */
LT_INLINE void compute_tile(const pass *p, int way, bool half, int rows, int columns,
                            const void *const *from, const void *const *to, int64_t b,
                            upcoming *next)
{
    lt_vec w[PACKED], sum[2][2 * ROWS];
    int64_t channel = channel_of(b, p->to.c, half);
    prefetch(&next->from, fresh(way, rows * columns));
    prefetch(&next->to, rows * columns);
    const float *packed = p->w + b * block_of(half) * PACKED;
    UNROLL
    for (int h = 0; h < vectors_of(half); h++) {
        UNROLL
        for (int k = 0; k < PACKED; k++)
            w[k] = lt__load_f32(packed + (h * PACKED + k) * LT_LANES);
        UNROLL
        for (int i = 0; i < rows * columns; i++)
            sum[h][i] = w[START];
        UNROLL
        for (int r = 0; r < reach(way, rows); r++) {
            UNROLL
            for (int t = 0; t < reach(way, columns); t++) {
                lt_vec x = load(half, from[r * reach(way, columns) + t], channel, h);
                UNROLL
                for (int k = 0; k < TAPS; k++) {
                    int i = meet(way, r, k / SIDE, rows), j = meet(way, t, k % SIDE, columns);
                    if (i >= 0 && j >= 0)
                        sum[h][i * columns + j] += x * w[k];
                }
            }
        }
    }
    if ((b + 1) * block_of(half) <= p->to.c) {
        UNROLL
        for (int i = 0; i < rows * columns; i++)
            if (to[i] && p->add) {
                sum[0][i] += load(half, to[i], channel, 0);
                sum[vectors_of(half) - 1][i] += half ? load(half, to[i], channel, 1) : (lt_vec){0};
            }
        UNROLL
        for (int i = 0; i < rows * columns; i++)
            if (to[i])
                store(half, (void *)to[i], channel, sum[0][i], sum[vectors_of(half) - 1][i]);
        return;
    }
    for (int i = 0; i < rows * columns; i++) {
        float lanes[2 * LT_LANES];
        lt__store_f32(lanes, sum[0][i]);
        lt__store_f32(lanes + LT_LANES, sum[vectors_of(half) - 1][i]);
        if (to[i])
            put_part(p, b, (void *)to[i], lanes);
    }
}

/* ROWS rows of the results from row i on; on the way back, of the results with their pad. */
LT_INLINE void compute_rows(const pass *p, int way, bool half, int columns, int64_t image,
                            int64_t i)
{
    const void *from[MOST], *to[2 * ROWS];
    int step = way == BY_TWO ? 2 : 1;
    int64_t shift = way == BACK ? p->pad : 0, blocks = blocks_of(p->to.c, half);
    int64_t row = way == BACK ? i / 2 - 1 : i * step - p->pad;
    upcoming next = {address_of(&p->from, image, row + reach(way, ROWS)),
                     address_of(&p->to, image, i - shift + ROWS)};
    for (int64_t j = 0; j < p->to.w + shift; j += columns) {
        int64_t column = way == BACK ? j / 2 - 1 : j * step - p->pad;
        find_pixels(&p->from, image, row, column, reach(way, ROWS), reach(way, columns),
                    way == BACK ? columns / 2 : columns * step, j > 0, p->zeros, from);
        find_pixels(&p->to, image, i - shift, j - shift, ROWS, columns, columns, j > 0, NULL, to);
        for (int64_t b = 0; b < blocks; b++)
            compute_tile(p, way, half, ROWS, columns, from, to, b, &next);
    }
}

LT_SIMD static void compute_group(const pass *p, int way, int64_t image, int64_t i)
{
    bool half = p->to.half;
#define ROWS_OF(way, columns)                                                                      \
    (half ? compute_rows(p, way, true, columns, image, i)                                          \
          : compute_rows(p, way, false, columns, image, i))
    if (way == BACK)
        ROWS_OF(BACK, 2);
    else if (way == BY_TWO)
        ROWS_OF(BY_TWO, 1);
    else if (p->to.c * (half ? 2 : 4)  >= 0)
        ROWS_OF(BY_ONE, 2);
    else
        ROWS_OF(BY_ONE, 1);
#undef ROWS_OF
}

static double work_of(const images *y) { return (double)(y->n * y->h * y->w * y->c) * TAPS; }

static void compute(const lt_call *c, const pass *p, int way)
{
    int64_t height = p->to.h + (way == BACK ? p->pad : 0);
    int64_t groups = (height + ROWS - 1) / ROWS;
    LT_PARALLEL_FOR(c, work_of(&p->to))
    for (int64_t g = 0; g < p->to.n * groups; g++)
        compute_group(p, way, g / groups, g % groups * ROWS);
}

/* ==== The gradient of the weights ============================================================= */

typedef struct {
    images x, dy;
    int64_t groups, pad;      /* groups of ROWS rows in an image */
    const void *zeros;
} pair;

/* sums (vectors, TAPS, LT_LANES) of block b += what x and a tile of dy make. */
LT_INLINE void correlate_tile(int way, bool half, int columns, const void *const *x,
                              const void *const *dy, int64_t channel, float *sums,
                              upcoming *next)
{
    lt_vec sum[TAPS], d[2 * ROWS];
    prefetch(&next->from, fresh(way, ROWS * columns));
    prefetch(&next->to, ROWS * columns);
    UNROLL
    for (int h = 0; h < vectors_of(half); h++, sums += TAPS * LT_LANES) {
        UNROLL
        for (int k = 0; k < TAPS; k++)
            sum[k] = lt__load_f32(sums + k * LT_LANES);
        UNROLL
        for (int i = 0; i < ROWS * columns; i++)
            d[i] = load(half, dy[i], channel, h);
        UNROLL
        for (int r = 0; r < reach(way, ROWS); r++) {
            UNROLL
            for (int t = 0; t < reach(way, columns); t++) {
                lt_vec v = load(half, x[r * reach(way, columns) + t], channel, h);
                UNROLL
                for (int k = 0; k < TAPS; k++) {
                    int i = meet(way, r, k / SIDE, ROWS), j = meet(way, t, k % SIDE, columns);
                    if (i >= 0 && j >= 0)
                        sum[k] += v * d[i * columns + j];
                }
            }
        }
        UNROLL
        for (int k = 0; k < TAPS; k++)
            lt__store_f32(sums + k * LT_LANES, sum[k]);
    }
}

/* The ROWS rows of dy from row i on. */
LT_INLINE void correlate_rows(const pair *p, int way, bool half, int columns, int64_t image,
                              int64_t i, float *sums)
{
    const void *x[MOST], *dy[2 * ROWS];
    int step = way == BY_TWO ? 2 : 1;
    int64_t blocks = blocks_of(p->x.c, half), row = i * step - p->pad;
    upcoming next = {address_of(&p->x, image, row + reach(way, ROWS)),
                     address_of(&p->dy, image, i + ROWS)};
    for (int64_t j = 0; j < p->dy.w; j += columns) {
        find_pixels(&p->x, image, row, j * step - p->pad, reach(way, ROWS),
                    reach(way, columns), columns * step, j > 0, p->zeros, x);
        find_pixels(&p->dy, image, i, j, ROWS, columns, columns, j > 0, p->zeros, dy);
        for (int64_t b = 0; b < blocks; b++)
            correlate_tile(way, half, columns, x, dy, channel_of(b, p->x.c, half),
                           sums + b * block_of(half) * TAPS, &next);
    }
}

/* Adds those of the groups [first, end) to sums (blocks, vectors, TAPS, LT_LANES). */
LT_SIMD static void correlate_part(const pair *p, int way, int64_t first, int64_t end, float *sums)
{
    for (int64_t g = first; g < end; g++) {
        int64_t image = g / p->groups, i = g % p->groups * ROWS;
        if (way == BY_ONE && p->x.half)
            correlate_rows(p, BY_ONE, true, 2, image, i, sums);
        else if (way == BY_ONE)
            correlate_rows(p, BY_ONE, false, 2, image, i, sums);
        else if (p->x.half)
            correlate_rows(p, BY_TWO, true, 1, image, i, sums);
        else
            correlate_rows(p, BY_TWO, false, 1, image, i, sums);
    }
}

/* Parts of the batch whose sums are kept apart, each of some groups of ROWS rows. */
static int64_t parts_of(const lt_conv *v)
{
    int64_t groups = v->n * ((v->window.out[0] + ROWS - 1) / ROWS);
    int64_t parts = v->n * v->window.out[0] * v->window.out[1] / PART_PIXELS;
    parts = lt__least(lt__least(parts, groups), MOST_PARTS);
    return parts > 1 ? parts : 1;
}

static float element_of(lt_operand x, int64_t i)
{
    return x.dtype == LT_BF16 ? lt__bf16_to_f32(((const uint16_t *)x.data)[i])
                              : ((const float *)x.data)[i];
}

/* dw (+)= the sums of the parts, `room` apart, for vector h of block b. */
static void put_weights(const lt_job *job, bool half, int64_t b, int h, int64_t parts,
                        const float *sums, int64_t room)
{
    int64_t channels = job->conv->in, first = channel_of(b, channels, half) + h;
    for (int k = 0; k < TAPS; k++) {
        lt_vec sum = {0};
        for (int64_t part = 0; part < parts; part++)
            sum += lt__load_f32(sums + part * room +
                                (b * block_of(half) * TAPS + (h * TAPS + k) * LT_LANES));
        for (int lane = 0; lane < LT_LANES; lane++) {
            int64_t channel = first + lane * vectors_of(half), at = channel * TAPS + k;
            if (channel < b * block_of(half) || channel >= channels)
                continue;
            float value = job->add ? element_of(job->w, at) + sum[lane] : sum[lane];
            if (job->w.dtype == LT_BF16)
                ((uint16_t *)job->w.data)[at] = lt__f32_to_bf16(value);
            else
                ((float *)job->w.data)[at] = value;
        }
    }
}

static void sum_weights(const lt_call *c, const lt_job *job, const pair *p, int way, float *sums)
{
    int64_t groups = p->x.n * p->groups, parts = parts_of(job->conv);
    bool half = p->x.half;
    int64_t blocks = blocks_of(p->x.c, half), room = blocks * block_of(half) * TAPS;
    LT_PARALLEL_FOR(c, work_of(&p->dy))
    for (int64_t part = 0; part < parts; part++) {
        memset(sums + part * room, 0, (size_t)room * sizeof *sums);
        correlate_part(p, way, groups * part / parts, groups * (part + 1) / parts,
                       sums + part * room);
    }
    LT_PARALLEL_FOR(c, parts * room)
    for (int64_t i = 0; i < blocks * vectors_of(half); i++)
        put_weights(job, half, i / vectors_of(half), (int)(i % vectors_of(half)), parts, sums,
                    room);
}

/* ==== Jobs ==================================================================================== */

/* Scratch: a pixel of zeros, the rests of two tensors, then packed weights or sums. */
enum { REST = 2 * LINE };         /* bytes */

static int64_t room_of(int64_t channels) { return blocks_of(channels, true) * block_of(true); }

/* (out, 3, 3, 1) as (blocks, vectors, PACKED, LT_LANES): zero beside the channels. turned: by half a
 * turn. */
static void pack(const lt_job *job, bool half, bool turned, float *packed)
{
    int64_t channels = job->conv->in;
    for (int64_t b = 0; b < blocks_of(channels, half); b++)
        for (int h = 0; h < vectors_of(half); h++)
            for (int lane = 0; lane < LT_LANES; lane++) {
                float *to = packed + ((b * vectors_of(half) + h) * PACKED) * LT_LANES + lane;
                int64_t channel = channel_of(b, channels, half) + lane * vectors_of(half) + h;
                bool there = channel < channels;
                for (int k = 0; k < TAPS; k++)
                    to[k * LT_LANES] =
                        there ? element_of(job->w, channel * TAPS + (turned ? TAPS - 1 - k : k)) : 0;
                to[START * LT_LANES] =
                    there && job->bias.data ? element_of(job->bias, channel) : 0;
            }
}

/* Images of that height and width. Those of their last pixels that a block would overrun are copied
 * to rest; without one they are only written. */
static images images_of(const lt_conv *v, const int64_t size[2], lt_operand of, char *rest)
{
    images x = {.data = of.data, .n = v->n, .h = size[0], .w = size[1], .c = v->in,
                .half = of.dtype == LT_BF16, .rest = rest};
    int64_t pixels = x.n * x.h * x.w, bytes = x.c * (x.half ? 2 : 4);
    x.safe = pixels;
    if (rest && bytes < LINE) {
        x.safe = pixels * bytes < LINE ? 0 : (pixels * bytes - LINE) / bytes + 1;
        memset(rest, 0, REST);
        memcpy(rest, (char *)x.data + x.safe * bytes, (size_t)((pixels - x.safe) * bytes));
    }
    return x;
}
static bool fits(const lt_conv *v)
{
    const lt_window *w = &v->window;
    bool yes = v->groups == v->in && v->groups == v->out && v->in > 0;
    for (int i = 0; i < 2; i++)
        yes = yes && w->kernel[i] == SIDE && w->dilation[i] == 1 && w->pad[i] == w->pad[0] &&
              w->pad[i] <= 1 && w->stride[i] == w->stride[0] && w->stride[i] <= 2;
    return yes;
}

bool lt__depthwise_takes(const lt_job *job)
{
    bool gradient = job->kind == LT_CONV_WEIGHTS;
    lt_dtype dtype = job->y.dtype;
    return fits(job->conv) && (dtype == LT_F32 || dtype == LT_BF16) &&
           job->x.dtype == dtype && (job->w.dtype == dtype || (gradient && job->w.dtype == LT_F32)) &&
           (!job->bias.data || (!gradient && job->bias.dtype == dtype));
}

void lt__depthwise_run(const lt_call *c, const lt_job *job)
{
    const lt_conv *v = job->conv;
    const lt_window *w = &v->window;
    float *zeros = c->scratch, *room = zeros + room_of(v->in) + 2 * REST / sizeof *zeros;
    char *rest = (char *)(zeros + room_of(v->in));
    bool back = job->kind == LT_CONV_DATA, forward = job->kind == LT_CONV;
    images x = images_of(v, w->in, job->x, back ? NULL : rest);
    images y = images_of(v, w->out, job->y, forward ? NULL : rest + REST);
    int way = w->stride[0] == 2 ? BY_TWO : BY_ONE;
    memset(zeros, 0, (size_t)room_of(v->in) * sizeof *zeros);
    if (job->kind == LT_CONV_WEIGHTS) {
        pair p = {.x = x, .dy = y, .groups = (y.h + ROWS - 1) / ROWS, .pad = w->pad[0],
                  .zeros = zeros};
        sum_weights(c, job, &p, way, room);
        return;
    }
    bool turned = back && way == BY_ONE;
    pack(job, x.half, turned, room);
    pass p = {.from = back ? y : x, .to = back ? x : y, .w = room, .zeros = zeros,
              .pad = turned ? SIDE - 1 - w->pad[0] : w->pad[0], .add = job->add};
    compute(c, &p, back && way == BY_TWO ? BACK : way);
}

size_t lt__depthwise_scratch(const lt_conv *v, bool backward)
{
    if (!fits(v))
        return 0;
    int64_t sums = backward ? parts_of(v) * TAPS : 0;
    int64_t floats = room_of(v->in) * (1 + (sums > PACKED ? sums : PACKED));
    return (size_t)floats * sizeof(float) + 2 * REST;
}
