/* conv_weights.c - the gradient of a convolution's weights as a sum of outer products over the
 * pixels of y. With window(p) as the kh * kw * in numbers of x and padding that contribute to
 * output pixel p,
 *
 *     dw (out, kh * kw * in) = the sum over p of dy(p) window(p)'
 *
 * Each thread sums a part of the pixels, and the parts are summed in order. The bits depend on the
 * number of threads, as they do in oneDNN.
 *
 * With few channels and many pixels, both factors come from memory. A thread packs some pixels of
 * both into panels that stay in its cache while their products are summed and the next pixels are
 * prefetched.
 */
#include "ops/cpu/conv.h"
#include "ops/cpu/loops.h"
#include "ops/cpu/panel.h"

enum { COLUMNS = MOST * LT_LANES };
enum { WORDS = 64 }; /* vectors per panel */
/* one vector more, so that panels do not share cache sets */
enum { PANEL = (WORDS + 1) * LT_LANES };
enum { LINE = 64 }; /* bytes of a cache line */

/* ==== Sizes =================================================================================== */

static int64_t pixels_of(const lt_conv *v) { return v->n * v->window.out[0] * v->window.out[1]; }

/* Numbers in the window of a pixel of y. */
static int64_t depth_of(const lt_conv *v)
{
    return v->window.kernel[0] * v->window.kernel[1] * v->in;
}

/* The scratch of a part, in floats: sums (depth / COLUMNS rounded up, out, COLUMNS); panels of dy
 * and of x; a pixel of zeros for either. */
typedef struct {
    int64_t dy, x, zeros, all;
} layout;

static layout layout_of(const lt_conv *v)
{
    layout at = {.dy = (depth_of(v) + COLUMNS - 1) / COLUMNS * v->out * COLUMNS};
    at.x = at.dy + v->out / LT_LANES * PANEL;
    at.zeros = at.x + depth_of(v) / LT_LANES * PANEL;
    at.all = at.zeros + (v->in > v->out ? v->in : v->out);
    return at;
}

/* ==== Windows ================================================================================= */

/* A pixel of y, advanced without divisions. */
typedef struct {
    int64_t n, oh, ow;
} cursor;

static void advance(const lt_window *w, cursor *at)
{
    if (++at->ow < w->out[1])
        return;
    at->ow = 0;
    if (++at->oh < w->out[0])
        return;
    at->oh = 0;
    at->n++;
}

/* The window of a pixel of y: rows and columns of x starting at (top, left), which is at `data`. */
typedef struct {
    const char *data;
    int64_t top, left;
} patch;

LT_INLINE patch patch_of(bool half, const lt_conv_task *task, const cursor *at)
{
    const lt_window *w = &task->conv->window;
    int64_t top = lt__window_in(w, 0, at->oh, 0), left = lt__window_in(w, 1, at->ow, 0);
    int64_t pixel = (at->n * w->in[0] + top) * w->in[1] + left;
    return (patch){(char *)task->x.data + pixel * task->conv->in * bytes_of(half), top, left};
}

LT_INLINE bool has_row(const lt_window *w, const patch *at, int64_t kh)
{
    return at->top + kh >= 0 && at->top + kh < w->in[0];
}

/* Whether columns [from, to) of the window are inside the image. */
LT_INLINE bool has_columns(const lt_window *w, const patch *at, int64_t from, int64_t to)
{
    return at->left + from >= 0 && at->left + to <= w->in[1];
}

/* The pixel of tap (kh, kw), or zeros if it is padding. */
LT_INLINE const char *tap_of(const lt_window *w, const patch *at, int64_t kh, int64_t kw,
                             int64_t pixel, const char *zeros)
{
    bool inside = has_row(w, at, kh) && has_columns(w, at, kw, kw + 1);
    return inside ? at->data + (kh * w->in[1] + kw) * pixel : zeros;
}

/* Packs the window of pixel a, one number per word. In bf16, packs the windows of pixels a and b,
 * with one number of each in a word. */
LT_INLINE void pack_windows(bool half, const lt_conv *v, const patch *a, const patch *b,
                            const char *zeros, float *panel)
{
    const lt_window *w = &v->window;
    int64_t kernel = w->kernel[1], vectors = v->in / LT_LANES, pixel = v->in * bytes_of(half);
    bool whole = has_columns(w, a, 0, kernel) && has_columns(w, b, 0, kernel);
    for (int64_t kh = 0; kh < w->kernel[0]; kh++) {
        int64_t row = kh * w->in[1] * pixel;
        if (whole && has_row(w, a, kh) && has_row(w, b, kh)) {
            pack_words(half, kernel * vectors, a->data + row, b->data + row, panel, PANEL);
            panel += kernel * vectors * PANEL;
            continue;
        }
        for (int64_t kw = 0; kw < kernel; kw++, panel += vectors * PANEL)
            pack_words(half, vectors, tap_of(w, a, kh, kw, pixel, zeros),
                       tap_of(w, b, kh, kw, pixel, zeros), panel, PANEL);
    }
}

/* ==== One part ================================================================================ */

typedef struct {
    const lt_conv_task *task;
    int64_t pixel, end;   /* the pixels that remain */
    cursor at;            /* the position of `pixel` */
    float *sums, *dy, *x; /* sums; panels */
    const char *zeros;
} part;

/* Packs as many of the next pixels as fit in the panels. Returns the number of words per
 * channel. */
LT_INLINE int64_t pack_pixels(bool half, part *p)
{
    const lt_conv *v = p->task->conv;
    int64_t bytes = v->out * bytes_of(half), words = 0;
    for (; words < WORDS && p->pixel < p->end; words++) {
        const char *dy = (char *)p->task->y.data + p->pixel * bytes, *next = p->zeros;
        patch a = patch_of(half, p->task, &p->at), b = a;
        p->pixel++;
        advance(&v->window, &p->at);
        if (half && p->pixel < p->end) {
            next = dy + bytes;
            b = patch_of(half, p->task, &p->at);
            p->pixel++;
            advance(&v->window, &p->at);
        } /* an odd last pixel is paired with zeros in dy */
        pack_words(half, v->out / LT_LANES, dy, next, p->dy + words * LT_LANES, PANEL);
        pack_windows(half, v, &a, &b, p->zeros, p->x + words * LT_LANES);
    }
    return words;
}

/* Memory that is prefetched in steps. */
typedef struct {
    uintptr_t at, end, step;
} range;

static range range_of(const void *from, int64_t bytes, int64_t steps)
{
    uintptr_t at = (uintptr_t)from;
    return (range){at, at + (uintptr_t)bytes, (uintptr_t)(bytes / steps / LINE + 1) * LINE};
}

LT_INLINE void fetch(range *r)
{
    for (uintptr_t end = r->at + r->step; r->at < end && r->at < r->end; r->at += LINE)
        __builtin_prefetch((const void *)r->at, 0, 2);
}

/* Adds products to ROWS rows of `vectors` vectors of sums, or overwrites the sums with them. */
LT_INLINE void sum_tile(bool half, int vectors, int64_t words, const float *dy, const float *x,
                        float *sums, bool add)
{
    lt_vec sum[ROWS][MOST];
    UNROLL(i, ROWS)
        UNROLL(j, vectors)
            sum[i][j] = add ? lt__load_f32(sums + i * COLUMNS + j * LT_LANES) : (lt_vec){0};
    add_products(half, vectors, words, dy, 1, LT_LANES, x, PANEL, sum);
    UNROLL(i, ROWS)
        UNROLL(j, vectors)
            lt__store_f32(sums + i * COLUMNS + j * LT_LANES, sum[i][j]);
}

/* Adds the products of the packed pixels, and prefetches about as many pixels. */
LT_INLINE void sum_panels(bool half, part *p, int64_t words, bool add)
{
    const lt_conv *v = p->task->conv;
    const lt_window *w = &v->window;
    int64_t depth = depth_of(v), tiles = (depth + COLUMNS - 1) / COLUMNS * (v->out / ROWS);
    int64_t of_y = v->out * bytes_of(half); /* bytes per pixel of y */
    int64_t of_x = w->in[0] * w->in[1] * v->in * bytes_of(half) / (w->out[0] * w->out[1]);
    int64_t next = lt__min(words * (half ? 2 : 1), p->end - p->pixel);
    range dy = range_of((char *)p->task->y.data + p->pixel * of_y, next * of_y, tiles);
    range x = range_of(patch_of(half, p->task, &p->at).data, next * of_x, tiles);
    float *sums = p->sums;
    for (int64_t c = 0; c < depth; c += COLUMNS)
        for (int64_t o = 0; o < v->out; o += ROWS, sums += ROWS * COLUMNS) {
            const float *a = p->dy + o / LT_LANES * PANEL + o % LT_LANES;
            const float *b = p->x + c / LT_LANES * PANEL;
            fetch(&dy);
            fetch(&x);
            if (depth - c < COLUMNS)
                sum_tile(half, 1, words, a, b, sums, add);
            else
                sum_tile(half, MOST, words, a, b, sums, add);
        }
}

LT_INLINE void sum_part(bool half, part *p)
{
    for (bool add = false; p->pixel < p->end; add = true) {
        int64_t words = pack_pixels(half, p);
        sum_panels(half, p, words, add);
    }
}

LT_SIMD static void sum_part_f32(part *p) { sum_part(false, p); }
LT_SIMD_BF16 static void sum_part_bf16(part *p) { sum_part(true, p); }

/* Computes dw of output channel o from the sums of all parts, which are `apart` floats apart. */
LT_SIMD static void put_channel(const lt_conv_task *task, const float *sums, int parts,
                                int64_t apart, int64_t o)
{
    int64_t depth = depth_of(task->conv);
    float *dw = (float *)task->w.data + o * depth;
    for (int64_t k = 0; k < depth; k += COLUMNS, sums += task->conv->out * COLUMNS) {
        int64_t n = lt__min(COLUMNS, depth - k);
        float sum[COLUMNS];
        memcpy(sum, sums + o * COLUMNS, sizeof sum);
        for (int i = 1; i < parts; i++)
            for (int j = 0; j < COLUMNS; j++)
                sum[j] += sums[i * apart + o * COLUMNS + j];
        for (int64_t j = 0; j < n; j++)
            LT_PUT(task->add, dw[k + j], sum[j]);
    }
}

/* ==== Interface for conv2d.c ================================================================== */

static bool fits(const lt_conv *v)
{
    const lt_window *w = &v->window;
    bool yes = v->groups == 1 && v->in % LT_LANES == 0 && v->out % LT_LANES == 0 && v->in > 0 &&
               v->out > 0;
    for (int i = 0; i < 2; i++)
        yes = yes && w->dilation[i] == 1 && w->in[i] > 0;
    return yes;
}

static bool is_strided(const lt_window *w) { return w->stride[0] > 1 || w->stride[1] > 1; }

static bool is_pointwise(const lt_window *w) { return w->kernel[0] == 1 && w->kernel[1] == 1; }

/* Writing the sums of each thread costs too much if they exceed 4 MB, or if the thread has fewer
 * than 1024 pixels. Windows with stride 1 share most of their pixels, which packing cannot exploit;
 * there oneDNN is slower only in bf16, from 32 input channels up to in * out = 64 * 128. */
static bool is_worthwhile(const lt_call *c, const lt_conv *v, bool half)
{
    if (pixels_of(v) < 1024 * c->threads || depth_of(v) * v->out > 1 << 20)
        return false;
    return is_strided(&v->window) || is_pointwise(&v->window) ||
           (half && v->in >= 2 * LT_LANES && v->in * v->out <= 64 * 128);
}

static lt_status weights_accepts(const lt_call *c, const lt_conv_task *task)
{
    lt_dtype dtype = task->x.dtype;
    bool half = dtype == LT_BF16;
    bool yes = task->kind == LT_CONV_WEIGHTS && fits(task->conv) &&
               is_worthwhile(c, task->conv, half) && task->w.dtype == LT_F32 &&
               task->y.dtype == dtype && (dtype == LT_F32 || half) && has_fast_products(half);
    return yes ? LT_OK : LT_EUNSUPPORTED;
}

static size_t weights_scratch(const lt_call *c, const lt_conv *v, lt_dtype dtype, bool backward)
{
    (void)dtype;
    if (!backward || !fits(v) || !is_worthwhile(c, v, true))
        return 0;
    return (size_t)(c->threads * layout_of(v).all) * sizeof(float);
}

static lt_status weights_run(const lt_call *c, const lt_conv_task *task)
{
    const lt_conv *v = task->conv;
    const lt_window *w = &v->window;
    layout at = layout_of(v);
    int64_t pixels = pixels_of(v), image = w->out[0] * w->out[1];
    float *sums = c->scratch;
    LT_PARALLEL_FOR(c, (double)pixels * (double)at.dy)
    for (int i = 0; i < c->threads; i++) {
        float *own = sums + i * at.all;
        int64_t first = pixels * i / c->threads;
        part p = {.task = task,
                  .pixel = first,
                  .end = pixels * (i + 1) / c->threads,
                  .at = {first / image, first % image / w->out[1], first % w->out[1]},
                  .sums = own,
                  .dy = own + at.dy,
                  .x = own + at.x,
                  .zeros = (char *)(own + at.zeros)};
        memset(own + at.zeros, 0, (size_t)(at.all - at.zeros) * sizeof *own);
        (task->x.dtype == LT_BF16 ? sum_part_bf16 : sum_part_f32)(&p);
    }
    LT_PARALLEL_FOR(c, (double)at.dy)
    for (int64_t o = 0; o < v->out; o++)
        put_channel(task, sums, c->threads, at.all, o);
    return LT_OK;
}

const lt_conv_impl lt__conv_weights = {"weights", weights_accepts, weights_scratch, weights_run};
