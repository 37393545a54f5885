/* depthwise.c - depthwise 3x3 convolution of images (n, h, w, c) in f32 and bf16.
 *
 * There are only nine multiplications per element of the result, so what counts is how often an
 * element is loaded, and that memory is read in order and prefetched in time. The kernels process a
 * tile of a few pixels, one block of channels after the other, and prefetch the rows that follow.
 * Each pixel that the tile needs is loaded once. Pixels beyond the edges are replaced by a pixel of
 * zeros.
 *
 * A block is one cache line: 16 channels in f32, 32 in bf16. In bf16, even and odd channels form a
 * vector each, because one instruction extracts either from the words that contain both. If the
 * number of channels is not a multiple of the block, the last block overlaps its neighbour, and
 * only its new channels are stored. A pixel smaller than a block is loaded along with the bytes
 * behind it; the last pixels of a tensor, for which that would read beyond its end, are copied
 * first.
 *
 * With stride 1, the gradient of x is the convolution of dy with the rotated kernel; with stride 2,
 * each pixel of dx gathers from dy. Gradients of w are summed over parts of the batch, then over
 * the parts in order. Both depend only on the sizes, so that the bits do not depend on the number
 * of threads.
 */
#include "ops/cpu/conv.h"
#include "ops/cpu/loops.h"
#include "ops/cpu/simd.h"

enum { SIDE = 3, TAPS = SIDE * SIDE };
enum { START = TAPS, PACKED }; /* packed weights: the taps, then the start value of sums */
enum { ROWS = 4, MAX_COLUMNS = 2, TILE = ROWS * MAX_COLUMNS };
enum { MAX_MET = 9 * SIDE }; /* pixels that a tile needs */
enum { LINE = 64 };          /* bytes of a block */
enum { MAX_PARTS = 64, PART_PIXELS = 64 };

#define UNROLL(i, n) _Pragma("GCC unroll 32") for (int i = 0; i < (n); i++)

/* ==== Pixels and blocks ======================================================================= */

typedef struct {
    void *data;
    int64_t n, h, w, c;
    bool half;
    int64_t safe;     /* pixels from which a whole block can be loaded */
    const char *rest; /* copies of the other pixels */
} images;

static inline int64_t pixel_bytes(const images *x) { return x->c * (x->half ? 2 : 4); }

/* Channels per block, and vectors per block. */
LT_INLINE int block_of(bool half) { return half ? 2 * LT_LANES : LT_LANES; }
LT_INLINE int vectors_of(bool half) { return half ? 2 : 1; }

static inline int64_t blocks_of(int64_t channels, bool half)
{
    return (channels + block_of(half) - 1) / block_of(half);
}

/* Returns the first channel of block b. */
static inline int64_t channel_of(int64_t b, int64_t channels, bool half)
{
    int64_t last = channels > block_of(half) ? channels - block_of(half) : 0;
    return lt__min(b * block_of(half), last);
}

static __attribute__((noinline)) void look_up(const images *x, int64_t n, int64_t row,
                                              int64_t column, int rows, int columns,
                                              const void *outside, const void **pixel)
{
    for (int r = 0; r < rows; r++) {
        bool inside = row + r >= 0 && row + r < x->h;
        for (int t = 0; t < columns; t++) {
            int64_t i = (n * x->h + row + r) * x->w + column + t;
            pixel[r * columns + t] = !inside || column + t < 0 || column + t >= x->w ? outside
                                     : i < x->safe ? (const char *)x->data + i * pixel_bytes(x)
                                                   : x->rest + (i - x->safe) * pixel_bytes(x);
        }
    }
}

/* Finds the rows x columns pixels of image n starting at (row, column); `outside` is used for
 * pixels outside the image. If by > 0, `pixel` contains the pixels `by` columns to the left, which
 * can be moved quickly. */
LT_INLINE void find_pixels(const images *x, int64_t n, int64_t row, int64_t column, int rows,
                           int columns, int by, const void *outside, const void **pixel)
{
    int64_t end = (n * x->h + row + rows - 1) * x->w + column + columns;
    if (by > 0 && column >= by && column + columns <= x->w && end <= x->safe)
        for (int i = 0; i < rows * columns; i++)
            pixel[i] = pixel[i] == outside ? outside : (const char *)pixel[i] + by * pixel_bytes(x);
    else
        look_up(x, n, row, column, rows, columns, outside, pixel);
}

/* Loads vector i of the block that begins at a channel. */
LT_INLINE lt_vec load(bool half, const void *pixel, int64_t channel, int i)
{
    if (!half)
        return lt__load_f32((const float *)pixel + channel);
    lt_vec_u32 pairs;
    memcpy(&pairs, (const uint16_t *)pixel + channel, sizeof pairs);
    return (lt_vec)(i == 0 ? pairs << 16 : pairs & 0xffff0000);
}

/* Stores the vectors of a block. In f32 there is only the first. */
LT_INLINE void store(bool half, void *pixel, int64_t channel, const lt_vec v[2])
{
    if (!half) {
        lt__store_f32((float *)pixel + channel, v[0]);
        return;
    }
    lt__store_pairs((uint16_t *)pixel + channel, v);
}

static float element_of(lt_operand x, int64_t i)
{
    return x.dtype == LT_BF16 ? lt__bf16_to_f32(((const uint16_t *)x.data)[i])
                              : ((const float *)x.data)[i];
}

static void put_element(lt_operand x, int64_t i, bool add, float value)
{
    if (add)
        value += element_of(x, i);
    if (x.dtype == LT_BF16)
        ((uint16_t *)x.data)[i] = lt__f32_to_bf16(value);
    else
        ((float *)x.data)[i] = value;
}

/* ==== Directions ============================================================================== */

/* How pixel r of the source and tap k map to a pixel of the result, along one axis: */
enum {
    BY_ONE, /* r - k: stride 1 */
    BY_TWO, /* (r - k) / 2 if even: stride 2 */
    BACK    /* 2 (r - 1) + k: from dy to dx with stride 2 */
};

/* Returns that pixel, or -1 if it is not one of `size` pixels. */
LT_INLINE int map_tap(int direction, int r, int k, int size)
{
    int i = direction == BACK ? 2 * (r - 1) + k : r - k;
    if (i < 0 || (direction == BY_TWO && i % 2 != 0))
        return -1;
    i = direction == BY_TWO ? i / 2 : i;
    return i < size ? i : -1;
}

/* The number of source pixels that `size` pixels of the result need. */
LT_INLINE int reach(int direction, int size)
{
    return direction == BY_ONE   ? size + SIDE - 1
           : direction == BY_TWO ? 2 * size + SIDE - 2
                                 : size / 2 + 1;
}

/* Columns of a tile, which has ROWS rows. */
LT_INLINE int columns_of(int direction) { return direction == BY_TWO ? 1 : 2; }

/* The distance in the source that corresponds to n pixels of the result. */
LT_INLINE int64_t in_source(int direction, int64_t n)
{
    return direction == BY_ONE ? n : direction == BY_TWO ? 2 * n : n / 2;
}

typedef struct {
    images from, to;
    int64_t pad;
    const void *zeros; /* a pixel of zeros */
    const float *w;    /* packed weights */
    bool add;
} pass;

/* Traverses the tiles of a group of rows from left to right. */
typedef struct {
    int64_t n, row, column; /* position in the result; for BACK it includes the padding */
    const void *from[MAX_MET], *to[TILE];
    uintptr_t next_from, next_to; /* addresses to prefetch */
} walk;

static inline uintptr_t address_of(const images *x, int64_t n, int64_t row)
{
    return (uintptr_t)x->data + (uintptr_t)((n * x->h + row) * x->w * pixel_bytes(x));
}

LT_INLINE int64_t first_met(const pass *p, int direction, int64_t i)
{
    return in_source(direction, i) - (direction == BACK ? 1 : p->pad);
}

LT_INLINE walk walk_from(const pass *p, int direction, int64_t n, int64_t row)
{
    walk at = {.n = n, .row = row, .column = -columns_of(direction)};
    at.next_from = address_of(&p->from, n, first_met(p, direction, row) + reach(direction, ROWS));
    at.next_to = address_of(&p->to, n, row + ROWS);
    return at;
}

/* Advances to the next tile, or returns false after the last one. outside is the address used for
 * pixels of `to` outside the image. */
LT_INLINE bool walk_on(const pass *p, int direction, const void *outside, walk *at)
{
    int columns = columns_of(direction), by = at->column < 0 ? 0 : columns;
    int64_t shift = direction == BACK ? p->pad : 0;
    at->column += columns;
    if (at->column >= p->to.w + shift)
        return false;
    find_pixels(&p->from, at->n, first_met(p, direction, at->row),
                first_met(p, direction, at->column), reach(direction, ROWS),
                reach(direction, columns), (int)in_source(direction, by), p->zeros, at->from);
    find_pixels(&p->to, at->n, at->row - shift, at->column - shift, ROWS, columns, by, outside,
                at->to);
    return true;
}

/* Prefetches the next lines in address order, as many as one block of a tile has. They are many, so
 * they go to the L2 cache. */
LT_INLINE void prefetch(int direction, walk *at)
{
    int lines = ROWS * columns_of(direction);
    int of_from = direction == BY_ONE ? lines : direction == BY_TWO ? 4 * lines : lines / 4;
    UNROLL(i, of_from) {
        __builtin_prefetch((const void *)at->next_from, 0, 2);
        at->next_from += LINE;
    }
    UNROLL(i, lines) {
        __builtin_prefetch((const void *)at->next_to, 0, 2);
        at->next_to += LINE;
    }
}

/* ==== Results ================================================================================= */

LT_INLINE void copy_part(void *to, const void *from, int64_t bytes)
{
    if (bytes == LINE / 2) /* 16 channels in bf16, without a call */
        memcpy(to, from, LINE / 2);
    else
        memcpy(to, from, (size_t)bytes);
}

/* Stores the new channels of b, the last block of a pixel, which is not a whole one. */
LT_INLINE void put_part(const pass *p, bool half, int64_t b, void *pixel, lt_vec sum[2])
{
    char line[LINE] = {0}, *there = (char *)pixel + b * LINE;
    int64_t bytes = pixel_bytes(&p->to) - b * LINE, before = b > 0 ? LINE - bytes : 0;
    if (p->add) {
        copy_part(line + before, there, bytes);
        UNROLL(h, vectors_of(half))
            sum[h] += load(half, line, 0, h);
    }
    store(half, line, 0, sum);
    copy_part(there, line + before, bytes);
}

LT_INLINE void put_tile(const pass *p, int direction, bool half, int64_t b, const void *const *to,
                        lt_vec sum[TILE][2])
{
    int64_t channel = b * block_of(half);
    if (channel + block_of(half) > p->to.c) {
        UNROLL(i, ROWS * columns_of(direction))
            if (to[i])
                put_part(p, half, b, (void *)to[i], sum[i]);
        return;
    }
    UNROLL(i, ROWS * columns_of(direction)) {
        UNROLL(h, vectors_of(half))
            if (p->add && to[i])
                sum[i][h] += load(half, to[i], channel, h);
    }
    UNROLL(i, ROWS * columns_of(direction))
        if (to[i])
            store(half, (void *)to[i], channel, sum[i]);
}

/* Computes block b of the tile. */
LT_INLINE void compute_tile(const pass *p, int direction, bool half, const walk *at, int64_t b)
{
    int columns = columns_of(direction);
    int64_t channel = channel_of(b, p->to.c, half);
    const float *packed = p->w + b * block_of(half) * PACKED;
    lt_vec w[PACKED], sum[TILE][2];
    UNROLL(h, vectors_of(half)) {
        UNROLL(k, PACKED)
            w[k] = lt__load_f32(packed + (h * PACKED + k) * LT_LANES);
        UNROLL(i, ROWS * columns)
            sum[i][h] = w[START];
        UNROLL(r, reach(direction, ROWS)) {
            UNROLL(t, reach(direction, columns)) {
                lt_vec x = load(half, at->from[r * reach(direction, columns) + t], channel, h);
                UNROLL(k, TAPS) {
                    int i = map_tap(direction, r, k / SIDE, ROWS),
                        j = map_tap(direction, t, k % SIDE, columns);
                    if (i >= 0 && j >= 0)
                        sum[i * columns + j][h] += x * w[k];
                }
            }
        }
    }
    put_tile(p, direction, half, b, at->to, sum);
}

LT_INLINE void compute_rows(const pass *p, int direction, bool half, int64_t n, int64_t row)
{
    walk at = walk_from(p, direction, n, row);
    int64_t blocks = blocks_of(p->to.c, half);
    while (walk_on(p, direction, NULL, &at))
        for (int64_t b = 0; b < blocks; b++) {
            prefetch(direction, &at);
            compute_tile(p, direction, half, &at, b);
        }
}

LT_SIMD static void compute_group(const pass *p, int direction, int64_t n, int64_t row)
{
    switch (2 * direction + p->to.half) {
    case 2 * BY_ONE: compute_rows(p, BY_ONE, false, n, row); break;
    case 2 * BY_ONE + 1: compute_rows(p, BY_ONE, true, n, row); break;
    case 2 * BY_TWO: compute_rows(p, BY_TWO, false, n, row); break;
    case 2 * BY_TWO + 1: compute_rows(p, BY_TWO, true, n, row); break;
    case 2 * BACK: compute_rows(p, BACK, false, n, row); break;
    default: compute_rows(p, BACK, true, n, row);
    }
}

/* In double, as the product may overflow an integer. */
static inline double work_of(const pass *p)
{
    return (double)(p->to.n * p->to.h * p->to.w) * (double)p->to.c * TAPS;
}

/* Groups of ROWS rows in an image of the result. */
static int64_t groups_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

static void compute(const lt_call *c, const pass *p, int direction)
{
    int64_t groups = groups_of(p->to.h + (direction == BACK ? p->pad : 0));
    LT_PARALLEL_FOR(c, work_of(p))
    for (int64_t g = 0; g < p->to.n * groups; g++)
        compute_group(p, direction, g / groups, g % groups * ROWS);
}

/* ==== The gradient of the weights ============================================================= */

/* Adds block b of the tile to sums (vectors, TAPS, LT_LANES). `from` is x and `to` is dy. */
LT_INLINE void correlate_tile(const pass *p, int direction, bool half, const walk *at, int64_t b,
                              float *sums)
{
    int columns = columns_of(direction);
    int64_t channel = channel_of(b, p->to.c, half);
    lt_vec sum[TAPS], d[TILE];
    UNROLL(h, vectors_of(half)) {
        UNROLL(k, TAPS)
            sum[k] = lt__load_f32(sums + k * LT_LANES);
        UNROLL(i, ROWS * columns)
            d[i] = load(half, at->to[i], channel, h);
        UNROLL(r, reach(direction, ROWS)) {
            UNROLL(t, reach(direction, columns)) {
                lt_vec x = load(half, at->from[r * reach(direction, columns) + t], channel, h);
                UNROLL(k, TAPS) {
                    int i = map_tap(direction, r, k / SIDE, ROWS),
                        j = map_tap(direction, t, k % SIDE, columns);
                    if (i >= 0 && j >= 0)
                        sum[k] += x * d[i * columns + j];
                }
            }
        }
        UNROLL(k, TAPS)
            lt__store_f32(sums + k * LT_LANES, sum[k]);
        sums += TAPS * LT_LANES;
    }
}

LT_INLINE void correlate_rows(const pass *p, int direction, bool half, int64_t n, int64_t row,
                              float *sums)
{
    walk at = walk_from(p, direction, n, row);
    int64_t blocks = blocks_of(p->to.c, half);
    while (walk_on(p, direction, p->zeros, &at))
        for (int64_t b = 0; b < blocks; b++) {
            prefetch(direction, &at);
            correlate_tile(p, direction, half, &at, b, sums + b * block_of(half) * TAPS);
        }
}

/* Adds a group of rows to sums (blocks, vectors, TAPS, LT_LANES). */
LT_SIMD static void correlate_group(const pass *p, int direction, int64_t n, int64_t row,
                                    float *sums)
{
    switch (2 * direction + p->to.half) {
    case 2 * BY_ONE: correlate_rows(p, BY_ONE, false, n, row, sums); break;
    case 2 * BY_ONE + 1: correlate_rows(p, BY_ONE, true, n, row, sums); break;
    case 2 * BY_TWO: correlate_rows(p, BY_TWO, false, n, row, sums); break;
    default: correlate_rows(p, BY_TWO, true, n, row, sums);
    }
}

/* Parts of the batch that are summed separately, each of some groups. */
static int64_t parts_of(const lt_conv *v)
{
    const int64_t *out = v->window.out;
    int64_t parts = lt__min(v->n * groups_of(out[0]), v->n * out[0] * out[1] / PART_PIXELS);
    return parts < 1 ? 1 : lt__min(parts, MAX_PARTS);
}

/* dw (+)= the sums of the parts, which are `pitch` floats apart, for vector h of block b. */
static void put_weights(const lt_conv_task *task, bool half, int64_t b, int h, int64_t parts,
                        int64_t weights, const float *sums)
{
    int64_t channels = task->conv->in, first = channel_of(b, channels, half) + h;
    sums += (b * vectors_of(half) + h) * TAPS * LT_LANES;
    for (int k = 0; k < TAPS; k++) {
        lt_vec sum = {0};
        for (int64_t part = 0; part < parts; part++)
            sum += lt__load_f32(sums + part * weights + k * LT_LANES);
        for (int lane = 0; lane < LT_LANES; lane++) {
            int64_t channel = first + lane * vectors_of(half);
            if (channel >= b * block_of(half) && channel < channels)
                put_element(task->w, channel * TAPS + k, task->add, sum[lane]);
        }
    }
}

static void sum_weights(const lt_call *c, const lt_conv_task *task, const pass *p, int direction,
                        float *sums)
{
    bool half = p->to.half;
    int64_t groups = groups_of(p->to.h), all = p->to.n * groups, parts = parts_of(task->conv);
    int64_t vectors = blocks_of(p->to.c, half) * vectors_of(half);
    int64_t weights = vectors * TAPS * LT_LANES;
    LT_PARALLEL_FOR(c, work_of(p))
    for (int64_t part = 0; part < parts; part++) {
        memset(sums + part * weights, 0, (size_t)weights * sizeof *sums);
        for (int64_t g = all * part / parts; g < all * (part + 1) / parts; g++)
            correlate_group(p, direction, g / groups, g % groups * ROWS, sums + part * weights);
    }
    LT_PARALLEL_FOR(c, parts * weights)
    for (int64_t i = 0; i < vectors; i++)
        put_weights(task, half, i / vectors_of(half), (int)(i % vectors_of(half)), parts, weights,
                    sums);
}

/* ==== Tasks =================================================================================== */

/* Layout of the scratch: a pixel of zeros, the copied last pixels of two tensors, then packed
 * weights or sums. */
enum { REST = 2 * LINE }; /* bytes for the copied pixels of a tensor */

static int64_t padded_channels(int64_t channels)
{
    return blocks_of(channels, true) * block_of(true);
}

/* Packs (out, 3, 3, 1) as (blocks, vectors, PACKED, LT_LANES), with zeros beyond the channels. */
static void pack(const lt_conv_task *task, bool half, bool flipped, float *packed)
{
    int64_t channels = task->conv->in;
    for (int64_t i = 0; i < blocks_of(channels, half) * block_of(half); i++) {
        int64_t v = i / LT_LANES, lane = i % LT_LANES, vectors = vectors_of(half);
        int64_t channel = channel_of(v / vectors, channels, half) + lane * vectors + v % vectors;
        float *to = packed + v * PACKED * LT_LANES + lane;
        for (int k = 0; k < PACKED; k++)
            to[k * LT_LANES] = 0;
        if (channel >= channels)
            continue;
        for (int k = 0; k < TAPS; k++)
            to[k * LT_LANES] = element_of(task->w, channel * TAPS + (flipped ? TAPS - 1 - k : k));
        if (task->bias.data)
            to[START * LT_LANES] = element_of(task->bias, channel);
    }
}

/* Describes images of the given height and width. rest receives copies of the last pixels, for
 * which loading a block would read beyond the tensor. It is NULL for images that are not loaded. */
static images images_of(const lt_conv *v, const int64_t size[2], lt_operand of, char *rest)
{
    images x = {.data = of.data,
                .n = v->n,
                .h = size[0],
                .w = size[1],
                .c = v->in,
                .half = of.dtype == LT_BF16,
                .rest = rest};
    int64_t pixels = x.n * x.h * x.w, bytes = pixel_bytes(&x), spare = pixels * bytes - LINE;
    x.safe = pixels;
    if (rest && bytes < LINE) {
        x.safe = spare < 0 ? 0 : spare / bytes + 1;
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

/* Whether these kernels support the task and are faster for it. */
static bool is_accepted(const lt_conv_task *task)
{
    const lt_conv *v = task->conv;
    bool weights = task->kind == LT_CONV_WEIGHTS;
    lt_dtype dtype = task->y.dtype, of_w = task->w.dtype;
    if (!fits(v) || (dtype != LT_F32 && dtype != LT_BF16) || task->x.dtype != dtype ||
        (of_w != dtype && !(weights && of_w == LT_F32)))
        return false;
    if (task->bias.data && (weights || task->bias.dtype != dtype))
        return false;
    /* oneDNN is faster where half of a block is empty, except for tasks that it has no special code
     * for */
    return dtype == LT_F32 || v->in >= block_of(true) || v->window.stride[0] == 2 || weights;
}

static lt_status depthwise_accepts(const lt_call *c, const lt_conv_task *task)
{
    (void)c;
    return is_accepted(task) ? LT_OK : LT_EUNSUPPORTED;
}

static lt_status depthwise_run(const lt_call *c, const lt_conv_task *task)
{
    const lt_conv *v = task->conv;
    const lt_window *w = &v->window;
    bool back = task->kind == LT_CONV_DATA;
    int direction = w->stride[0] == 1 ? BY_ONE : back ? BACK : BY_TWO;
    bool flipped = back && direction == BY_ONE;
    float *zeros = c->scratch;
    char *rest = (char *)(zeros + padded_channels(v->in));
    float *weights = (float *)(rest + 2 * REST);
    images x = images_of(v, w->in, task->x, back ? NULL : rest);
    images y = images_of(v, w->out, task->y, task->kind == LT_CONV ? NULL : rest + REST);
    pass p = {.from = back ? y : x,
              .to = back ? x : y,
              .zeros = zeros,
              .w = weights,
              .pad = flipped ? SIDE - 1 - w->pad[0] : w->pad[0],
              .add = task->add};
    memset(zeros, 0, (size_t)padded_channels(v->in) * sizeof *zeros);
    if (task->kind == LT_CONV_WEIGHTS) {
        sum_weights(c, task, &p, direction, weights);
        return LT_OK;
    }
    pack(task, x.half, flipped, weights);
    compute(c, &p, direction);
    return LT_OK;
}

static size_t depthwise_scratch(const lt_call *c, const lt_conv *v, lt_dtype dtype, bool backward)
{
    (void)c, (void)dtype;
    if (!fits(v))
        return 0;
    int64_t sums = backward ? parts_of(v) * TAPS : 0;
    int64_t vectors = 1 +
                      (sums > PACKED ? sums : PACKED); /* for each of padded_channels() channels */
    return (size_t)(padded_channels(v->in) * vectors) * sizeof(float) + 2 * REST;
}

const lt_conv_impl lt__depthwise = {"depthwise", depthwise_accepts, depthwise_scratch,
                                    depthwise_run};
