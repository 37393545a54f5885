/* pool2d.c - max_pool2d, avg_pool2d and global_avg_pool2d, which is avg_pool2d with one window.
 *
 * oneDNN's pooling is not faster, and its maximum drops NaN, so that training would continue
 * without noticing it. Here NaN propagates, as in PyTorch.
 *
 * max_pool2d saves, as an extra output, which tap of its window each maximum came from. For each
 * pixel of x, backward sums over the windows that contain the pixel and selected it. It does not
 * read x, and each gradient is written once, by one thread. If every pixel is in exactly one
 * window, the fast kernel iterates over windows instead.
 */
#include "ops/cpu/loops.h"
#include "ops/cpu/simd.h"
#include "ops/window.h"

enum { KERNEL, STRIDE, PAD };
enum { FROM = 1, BYTES = 256 }; /* the extra output of max_pool2d; taps that a u8 can number */

/* ==== Shape =================================================================================== */

static lt_status want_pixels(const lt_call *c)
{
    const lt_tensor *x = c->in[0];
    LT_TRY(lt__same_float(c, 1));
    LT_TRY(lt__require_ndim(c, 0, 4, "(n, h, w, c)"));
    if (x->dims[1] == 0 || x->dims[2] == 0)
        return lt_fail(LT_EINVAL, "x must have at least one pixel, but is %s", LT_TEXT(x));
    return LT_OK;
}

/* *w = the window over x, or over a gradient of the same dims. LT_EINVAL if it does not fit. */
static lt_status describe(const lt_call *c, const lt_tensor *x, lt_window *w)
{
    LT_TRY(lt__pair(c, KERNEL, 1, w->kernel));
    LT_TRY(lt__pair(c, STRIDE, 1, w->stride));
    LT_TRY(lt__pair(c, PAD, 0, w->pad));
    w->dilation[0] = w->dilation[1] = 1;
    for (int i = 0; i < 2; i++)
        if (w->pad[i] > w->kernel[i] / 2)
            return lt_fail(LT_EINVAL,
                           "pad must be at most %lldx%lld, half the kernel, but is %lldx%lld",
                           (lt_ll)(w->kernel[0] / 2), (lt_ll)(w->kernel[1] / 2), (lt_ll)w->pad[0],
                           (lt_ll)w->pad[1]);
    return lt__window_fit(w, x);
}

static lt_status pool_shape(lt_call *c)
{
    lt_window w;
    const lt_tensor *x = c->in[0];
    LT_TRY(want_pixels(c));
    LT_TRY(describe(c, x, &w));
    int64_t dims[4] = {x->dims[0], w.out[0], w.out[1], x->dims[3]};
    lt__spec(c, 0, (lt_dtype)x->dtype, 4, dims);
    if (c->op->n_aux == 0)
        return LT_OK;
    double taps = (double)w.kernel[0] * (double)w.kernel[1];
    lt__spec(c, FROM, taps <= BYTES ? LT_U8 : LT_I32, 4, dims);
    if (taps > INT32_MAX)
        return lt_fail(LT_EINVAL, "kernel must have at most %d pixels, but is %lldx%lld", INT32_MAX,
                       (lt_ll)w.kernel[0], (lt_ll)w.kernel[1]);
    return LT_OK;
}

static lt_status global_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    LT_TRY(want_pixels(c));
    int64_t dims[2] = {x->dims[0], x->dims[3]};
    lt__spec(c, 0, (lt_dtype)x->dtype, 2, dims);
    return LT_OK;
}

/* ==== One call ================================================================================ */

/* A forward or backward call. big: (images, w.in[0], w.in[1], channels); small: with w.out. */
typedef struct {
    lt_window w;
    int64_t images, channels;
    double taps, share; /* taps of a window; 1 / taps */
    lt_dtype dtype;
    void *big, *small; /* x and y, or their gradients */
    lt_tensor *from;   /* the tap of each maximum; NULL for a mean */
    bool add;          /* add to big instead of overwriting it */
    bool fast;         /* the vector kernels accept the call */
} pool;

static pool pool_of(const lt_call *c, const lt_tensor *big, const lt_tensor *small)
{
    pool p = {.images = big->dims[0],
              .channels = big->dims[3],
              .dtype = (lt_dtype)big->dtype,
              .big = big->data,
              .small = small->data,
              .from = c->op->n_aux > 0 ? c->out[FROM] : NULL};
    if (c->schema->n_opt > 0) {
        (void)describe(c, big, &p.w); /* passes, as it did in the shape rule */
    } else {
        p.w = (lt_window){.stride = {1, 1}, .out = {1, 1}};
        for (int i = 0; i < 2; i++)
            p.w.in[i] = p.w.kernel[i] = big->dims[1 + i];
    }
    p.taps = (double)p.w.kernel[0] * (double)p.w.kernel[1];
    p.share = 1 / p.taps;
    p.fast = (p.dtype == LT_F32 || p.dtype == LT_BF16) && small->dtype == big->dtype &&
             (p.taps <= BYTES || c->schema->n_opt == 0);
    return p;
}

/* Computes row `row` of y, or of the gradient of x, of one image. image: index in the batch. */
typedef void (*row_fn)(const pool *p, int64_t image, int64_t row);

/* Runs fn for `rows` rows of each image. */
static lt_status run_rows(const lt_call *c, const pool *p, int64_t rows, row_fn fn)
{
    double outputs = (double)(p->images * p->w.out[0] * p->w.out[1] * p->channels);
    LT_PARALLEL_FOR(c, outputs * p->taps)
    for (int64_t i = 0; i < p->images * rows; i++)
        fn(p, i / rows, i % rows);
    return LT_OK;
}

/* Advances *r from lt__window_outputs() of input i - 1 to that of input i, without a division. */
static inline void move_outputs(const lt_window *w, int axis, int64_t i, lt_extent *r)
{
    int64_t at = i + w->pad[axis], stride = w->stride[axis];
    r->first += r->first * stride + w->kernel[axis] <= at;
    r->end += r->end < w->out[axis] && r->end * stride <= at;
}

/* Offset, in elements, of the channels of a pixel in big, and in small. */
static inline int64_t big_at(const pool *p, int64_t image, int64_t ih, int64_t iw)
{
    return ((image * p->w.in[0] + ih) * p->w.in[1] + iw) * p->channels;
}

static inline int64_t small_at(const pool *p, int64_t image, int64_t oh, int64_t ow)
{
    return ((image * p->w.out[0] + oh) * p->w.out[1] + ow) * p->channels;
}

/* Offset in big of tap (0, 0) of an output. It may be in the padding, outside big. */
static inline int64_t window_at(const pool *p, int64_t image, int64_t oh, int64_t ow)
{
    const lt_window *w = &p->w;
    return big_at(p, image, oh * w->stride[0] - w->pad[0], ow * w->stride[1] - w->pad[1]);
}

/* ==== Plain kernels =========================================================================== */

static void put_from(lt_tensor *from, int64_t i, int64_t tap)
{
    if (from->dtype == LT_U8)
        ((uint8_t *)from->data)[i] = (uint8_t)tap;
    else
        ((int32_t *)from->data)[i] = (int32_t)tap;
}

static void plain_output_row(const pool *p, int64_t image, int64_t oh)
{
    lt_extent down = lt__window_taps(&p->w, 0, oh);
    LT_FLOATS(p->dtype, T,
        for (int64_t i = 0; i < p->w.out[1] * p->channels; i++) {
            int64_t ow = i / p->channels, j = i % p->channels, tap = -1;
            lt_extent right = lt__window_taps(&p->w, 1, ow);
            int64_t at = window_at(p, image, oh, ow) + j, to = small_at(p, image, oh, ow) + j;
            T max = 0;
            double sum = 0;
            for (int64_t kh = down.first; kh < down.end; kh++)
                for (int64_t kw = right.first; kw < right.end; kw++) {
                    T v = ((const T *)p->big)[at + (kh * p->w.in[1] + kw) * p->channels];
                    sum += (double)v;
                    if (tap < 0 || LT_IS_GREATER(v, max)) {
                        max = v;
                        tap = kh * p->w.kernel[1] + kw;
                    }
                }
            ((T *)p->small)[to] = p->from ? max : (T)(sum / p->taps);
            if (p->from)
                put_from(p->from, to, tap);
        }
    );
}

static void plain_input_row(const pool *p, int64_t image, int64_t ih)
{
    lt_extent down = lt__window_outputs(&p->w, 0, ih);
    LT_FLOATS(p->dtype, T,
        for (int64_t i = 0; i < p->w.in[1] * p->channels; i++) {
            int64_t iw = i / p->channels, j = i % p->channels;
            lt_extent right = lt__window_outputs(&p->w, 1, iw);
            T *dx = (T *)p->big + big_at(p, image, ih, iw) + j;
            double sum = 0;
            for (int64_t oh = down.first; oh < down.end; oh++)
                for (int64_t ow = right.first; ow < right.end; ow++) {
                    int64_t at = small_at(p, image, oh, ow) + j;
                    int64_t tap = lt__window_tap(&p->w, ih, iw, oh, ow);
                    if (!p->from || lt__integer(p->from, at) == tap)
                        sum += (double)((const T *)p->small)[at];
                }
            LT_PUT(p->add, *dx, p->from ? (T)sum : (T)sum * (T)p->share);
        }
    );
}

static lt_status fwd(lt_call *c)
{
    pool p = pool_of(c, c->in[0], c->out[0]);
    return run_rows(c, &p, p.w.out[0], plain_output_row);
}

static lt_status bwd(lt_call *c)
{
    pool p = pool_of(c, c->d_in[0], c->d_out[0]);
    p.add = lt__adds(c, 0);
    return run_rows(c, &p, p.w.in[0], plain_input_row);
}

/* ==== Fast kernels: blocks of channels ======================================================== */

/* A block is one vector of f32, or 2 * LT_LANES bf16 as two vectors: even and odd positions. */
enum { MOST = 2 }; /* most vectors of a block */
typedef struct {
    lt_vec v[MOST];
} block;

LT_INLINE int vectors_of(bool half) { return half ? 2 : 1; }
LT_INLINE int block_of(bool half) { return half ? 2 * LT_LANES : LT_LANES; }

/* Loads elements [i, i + n). The remaining lanes are 0. */
LT_INLINE block load(const void *from, int64_t i, int n, bool half)
{
    block b = {{{0}}};
    if (half) {
        const uint16_t *at = (const uint16_t *)from + i;
        uint16_t part[2 * LT_LANES] = {0};
        if (n < 2 * LT_LANES)
            memcpy(part, at, (size_t)n * sizeof *at);
        lt__load_pairs(n < 2 * LT_LANES ? part : at, b.v);
        return b;
    }
    const float *at = (const float *)from + i;
    LT_EACH_LANE(k)
        b.v[0][k] = k < n ? at[k] : 0;
    return b;
}

LT_INLINE void store(void *to, int64_t i, int n, bool half, block b)
{
    if (half) {
        uint16_t *at = (uint16_t *)to + i, part[2 * LT_LANES];
        lt__store_pairs(n < 2 * LT_LANES ? part : at, b.v);
        if (n < 2 * LT_LANES)
            memcpy(at, part, (size_t)n * sizeof *at);
    } else {
        float *at = (float *)to + i;
        LT_EACH_LANE(k)
            if (k < n)
                at[k] = b.v[0][k];
    }
}

/* Loads n bytes into the lanes of a block. */
LT_INLINE void load_bytes(const uint8_t *from, int n, bool half, lt_vec_i32 v[MOST])
{
    uint8_t part[2 * LT_LANES] = {0};
    if (n < block_of(half)) {
        memcpy(part, from, (size_t)n);
        from = part;
    }
    if (half) {
        uint16_t pairs[LT_LANES];
        lt_vec_i32 both;
        memcpy(pairs, from, sizeof pairs);
        for (int k = 0; k < LT_LANES; k++) /* one instruction, as in lt__load_bf16() */
            both[k] = pairs[k];
        v[0] = both & 255;
        v[1] = both >> 8;
    } else {
        for (int k = 0; k < LT_LANES; k++)
            v[0][k] = from[k];
    }
}

LT_INLINE void store_bytes(uint8_t *to, int n, bool half, const lt_vec_i32 v[MOST])
{
    uint8_t part[2 * LT_LANES], *at = n < block_of(half) ? part : to;
    if (half) {
        lt_vec_u16 pairs = __builtin_convertvector(v[0] | v[1] << 8, lt_vec_u16);
        memcpy(at, &pairs, sizeof pairs);
    } else {
        for (int k = 0; k < LT_LANES; k++)
            at[k] = (uint8_t)v[0][k];
    }
    if (n < block_of(half))
        memcpy(to, part, (size_t)n);
}

/* A pixel to read: the offset of its channels, and its tap in the window concerned. */
typedef struct {
    int64_t at;
    int32_t tap;
} place;

/* Prevents the vectorisation of a loop of two or three iterations, which would make it slower. */
#define FEW __asm__ volatile("")

/* list = the pixels of x in the window of an output, with offsets from its tap (0, 0). Returns
 * their number. down, right: lt__window_taps() of the output. */
static int places_in(const pool *p, lt_extent down, lt_extent right, place *list)
{
    int n = 0;
    for (int64_t kh = down.first; kh < down.end; kh++)
        for (int64_t kw = right.first; kw < right.end; kw++) {
            FEW;
            list[n++] =
                (place){(kh * p->w.in[1] + kw) * p->channels, (int32_t)(kh * p->w.kernel[1] + kw)};
        }
    return n;
}

/* list = the outputs whose windows contain a pixel of x. Returns their number. down, right:
 * lt__window_outputs() of the pixel. */
static int places_over(const pool *p, int64_t image, int64_t ih, lt_extent down, int64_t iw,
                       lt_extent right, place *list)
{
    int n = 0;
    for (int64_t oh = down.first; oh < down.end; oh++)
        for (int64_t ow = right.first; ow < right.end; ow++) {
            FEW;
            list[n++] =
                (place){small_at(p, image, oh, ow), (int32_t)lt__window_tap(&p->w, ih, iw, oh, ow)};
        }
    return n;
}

/* In lanes where x is larger than max, max = x and tap = id. The first NaN stays. */
LT_INLINE void take_larger(lt_vec x, int32_t id, lt_vec *max, lt_vec_i32 *tap)
{
    lt_vec old = *max, new = old;
    lt_vec_i32 from = *tap;
    LT_EACH_LANE(k) {
        int take = !(x[k] <= old[k]) & (old[k] == old[k]);
        new[k] = take ? x[k] : old[k];
        from[k] = take ? id : from[k];
    }
    *max = new;
    *tap = from;
}

/* Prefetches the block at the same position in the next row of windows. Hardware prefetchers see
 * two rows at a time and do not predict this access. A block, one cache line, may be outside. */
LT_INLINE void fetch_next(const pool *p, int64_t at, bool half, bool write)
{
    int64_t row = p->w.in[1] * p->channels;
    uint64_t next = (uint64_t)at + (uint64_t)p->w.stride[0] * (uint64_t)row;
    uintptr_t address = (uintptr_t)p->big + next * (half ? 2 : 4);
    write ? __builtin_prefetch((const void *)address, 1, 2)
          : __builtin_prefetch((const void *)address, 0, 2);
}

/* Computes n channels of one output, at offset `to`. at: the offset of the window's tap (0, 0). */
LT_INLINE void output_of(const pool *p, const place *list, int places, int64_t at, int64_t to,
                         int n, bool max, bool half)
{
    block y = load(p->big, at + list[0].at, n, half);
    fetch_next(p, at + list[0].at, half, false);
    lt_vec_i32 tap[MOST];
    for (int h = 0; h < vectors_of(half); h++)
        LT_EACH_LANE(k)
            tap[h][k] = list[0].tap;
    for (int i = 1; i < places; i++) {
        block x = load(p->big, at + list[i].at, n, half);
        fetch_next(p, at + list[i].at, half, false);
        for (int h = 0; h < vectors_of(half); h++)
            if (max)
                take_larger(x.v[h], list[i].tap, &y.v[h], &tap[h]);
            else
                y.v[h] += x.v[h];
    }
    for (int h = 0; h < vectors_of(half) && !max; h++)
        y.v[h] /= (float)p->taps;
    store(p->small, to, n, half, y);
    if (max)
        store_bytes((uint8_t *)p->from->data + to, n, half, tap);
}

/* Computes channels [j, j + n) of the gradient of one pixel of x, whose channels start at `to`. */
LT_INLINE void gradient_of(const pool *p, const place *list, int places, int64_t j, int64_t to,
                           int n, bool max, bool half)
{
    block sum = {{{0}}};
    for (int i = 0; i < places; i++) {
        block dy = load(p->small, list[i].at + j, n, half);
        int32_t id = list[i].tap;
        lt_vec_i32 from[MOST];
        if (max)
            load_bytes((const uint8_t *)p->from->data + list[i].at + j, n, half, from);
        for (int h = 0; h < vectors_of(half); h++) {
            if (max)
                LT_EACH_LANE(k)
                    dy.v[h][k] = from[h][k] == id ? dy.v[h][k] : 0;
            sum.v[h] += dy.v[h];
        }
    }
    block before = p->add ? load(p->big, to + j, n, half) : (block){{{0}}};
    for (int h = 0; h < vectors_of(half); h++) {
        if (!max)
            sum.v[h] *= (float)p->share;
        if (p->add)
            sum.v[h] += before.v[h];
    }
    store(p->big, to + j, n, half, sum);
}

/* Computes the gradients of all pixels in one window. No other window may contain them. */
LT_INLINE void gradients_of(const pool *p, const place *list, int places, int64_t at, int64_t to,
                            int n, bool max, bool half)
{
    for (int i = 0; i < places; i++) {
        place only = {to, list[i].tap};
        gradient_of(p, &only, 1, 0, at + list[i].at, n, max, half);
        fetch_next(p, at + list[i].at, half, true);
    }
}

/* Computes a row of outputs, or with `back` the gradients of the pixels in their windows. Windows
 * that are inside the image differ only in their offset, so they share one list of places. */
LT_INLINE void windows(const pool *p, int64_t image, int64_t oh, bool back, bool max, bool half)
{
    place list[BYTES];
    lt_extent down = lt__window_taps(&p->w, 0, oh), right = {0, 0};
    int places = 0, n = block_of(half);
    for (int64_t ow = 0; ow < p->w.out[1]; ow++) {
        lt_extent taps = lt__window_taps(&p->w, 1, ow);
        if (taps.first != right.first || taps.end != right.end)
            places = places_in(p, down, right = taps, list);
        int64_t at = window_at(p, image, oh, ow), to = small_at(p, image, oh, ow), left;
        for (left = p->channels; left >= n; left -= n, at += n, to += n)
            if (back)
                gradients_of(p, list, places, at, to, n, max, half);
            else
                output_of(p, list, places, at, to, n, max, half);
        if (left > 0 && back)
            gradients_of(p, list, places, at, to, (int)left, max, half);
        else if (left > 0)
            output_of(p, list, places, at, to, (int)left, max, half);
    }
}

/* Computes a row of gradients of x, pixel by pixel. */
LT_INLINE void gradients(const pool *p, int64_t image, int64_t ih, bool max, bool half)
{
    place list[BYTES];
    lt_extent down = lt__window_outputs(&p->w, 0, ih), right = lt__window_outputs(&p->w, 1, 0);
    for (int64_t iw = 0; iw < p->w.in[1]; move_outputs(&p->w, 1, ++iw, &right)) {
        int64_t to = big_at(p, image, ih, iw), j = 0;
        int places = places_over(p, image, ih, down, iw, right, list), n = block_of(half);
        for (; j + n <= p->channels; j += n)
            gradient_of(p, list, places, j, to, n, max, half);
        if (j < p->channels)
            gradient_of(p, list, places, j, to, (int)(p->channels - j), max, half);
    }
}

/* Defines a row_fn. It branches on the kind of pooling and the dtype, so that both are constants in
 * the inlined code. */
#define ROW_OF(name, pixels, ...)                                                                  \
    LT_SIMD static void name(const pool *p, int64_t image, int64_t row)                            \
    {                                                                                              \
        if (p->from && p->dtype == LT_BF16)                                                        \
            pixels(__VA_ARGS__, true, true);                                                       \
        else if (p->from)                                                                          \
            pixels(__VA_ARGS__, true, false);                                                      \
        else if (p->dtype == LT_BF16)                                                              \
            pixels(__VA_ARGS__, false, true);                                                      \
        else                                                                                       \
            pixels(__VA_ARGS__, false, false);                                                     \
    }
ROW_OF(output_row, windows, p, image, row, false)
ROW_OF(window_row, windows, p, image, row, true)
ROW_OF(input_row, gradients, p, image, row)

/* Whether each position of x along the axis is in exactly one window. */
static bool tiles(const lt_window *w, int axis)
{
    return w->pad[axis] == 0 && w->stride[axis] == w->kernel[axis] &&
           w->in[axis] == w->out[axis] * w->kernel[axis];
}

static lt_status fast_fwd(lt_call *c)
{
    pool p = pool_of(c, c->in[0], c->out[0]);
    return p.fast ? run_rows(c, &p, p.w.out[0], output_row) : LT_EUNSUPPORTED;
}

static lt_status fast_bwd(lt_call *c)
{
    pool p = pool_of(c, c->d_in[0], c->d_out[0]);
    p.add = lt__adds(c, 0);
    if (!p.fast)
        return LT_EUNSUPPORTED;
    bool apart = tiles(&p.w, 0) && tiles(&p.w, 1);
    return run_rows(c, &p, apart ? p.w.out[0] : p.w.in[0], apart ? window_row : input_row);
}

const lt_op lt__op_max_pool2d = {
    .sig = "max_pool2d(x; kernel, stride=kernel, pad=0)",
    .doc = "Maximum over windows of x (n, h, w, c), to (n, oh, ow, c); padding counts as -inf, "
           "and the gradient goes to the first maximum of a window.",
    .cast = LT_CAST_ANY,
    .n_out = 1,
    .n_aux = 1,
    .fast_bf16 = true,
    .save = LT_SAVE_OUT(FROM),
    .shape = pool_shape,
    .fwd = fwd,
    .bwd = bwd,
    .fast_fwd = fast_fwd,
    .fast_bwd = fast_bwd,
};

const lt_op lt__op_avg_pool2d = {
    .sig = "avg_pool2d(x; kernel, stride=kernel, pad=0)",
    .doc = "Mean over windows of x (n, h, w, c), to (n, oh, ow, c); padding counts as zeros in "
           "the mean, which is PyTorch's default.",
    .cast = LT_CAST_ANY,
    .fast_bf16 = true,
    .shape = pool_shape,
    .fwd = fwd,
    .bwd = bwd,
    .fast_fwd = fast_fwd,
    .fast_bwd = fast_bwd,
};

/* ==== global_avg_pool2d ======================================================================= */

enum { RUN = 64 * LT_LANES }; /* channels of a pixel that one task reads */

LT_INLINE void add_block(block *sum, block x, bool half)
{
    for (int h = 0; h < vectors_of(half); h++)
        sum->v[h] += x.v[h];
}

/* Computes up to RUN channels of y, starting at `first`, of one image, which is a single window.
 * Reads the pixels in address order. Each row has its own sum, because a sum of sums is more
 * accurate for many pixels. */
LT_INLINE void mean_of_run(const pool *p, int64_t image, int64_t first, bool half)
{
    int64_t n = lt__min(RUN, p->channels - first), size = block_of(half), whole = n / size;
    int left = (int)(n % size), blocks = (int)(whole + (left > 0)), vectors = vectors_of(half);
    block total[RUN / LT_LANES] = {0};
    for (int64_t ih = 0; ih < p->w.in[0]; ih++) {
        block sum[RUN / LT_LANES] = {0};
        for (int64_t iw = 0; iw < p->w.in[1]; iw++) {
            int64_t at = big_at(p, image, ih, iw) + first;
            for (int64_t k = 0; k < whole; k++)
                add_block(&sum[k], load(p->big, at + k * size, (int)size, half), half);
            if (left > 0)
                add_block(&sum[whole], load(p->big, at + whole * size, left, half), half);
        }
        for (int k = 0; k < blocks; k++)
            add_block(&total[k], sum[k], half);
    }
    for (int k = 0; k < blocks; k++) {
        int64_t to = image * p->channels + first + k * size;
        for (int h = 0; h < vectors; h++)
            total[k].v[h] /= (float)p->taps;
        if (k < whole)
            store(p->small, to, (int)size, half, total[k]);
        else
            store(p->small, to, left, half, total[k]);
    }
}

LT_SIMD static void mean_run(const pool *p, int64_t image, int64_t run)
{
    if (p->dtype == LT_BF16)
        mean_of_run(p, image, run * RUN, true);
    else
        mean_of_run(p, image, run * RUN, false);
}

static lt_status global_fast_fwd(lt_call *c)
{
    pool p = pool_of(c, c->in[0], c->out[0]);
    return p.fast ? run_rows(c, &p, (p.channels + RUN - 1) / RUN, mean_run) : LT_EUNSUPPORTED;
}

const lt_op lt__op_global_avg_pool2d = {
    .sig = "global_avg_pool2d(x)",
    .doc = "Mean over the pixels of each image: x (n, h, w, c) to (n, c).",
    .cast = LT_CAST_ANY,
    .fast_bf16 = true,
    .shape = global_shape,
    .fwd = fwd,
    .bwd = bwd,
    .fast_fwd = global_fast_fwd,
    .fast_bwd = fast_bwd,
};
