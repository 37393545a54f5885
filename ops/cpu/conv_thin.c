/* conv_thin.c - convolutions of images with few channels, vectorised over the channels of y.
 *
 * An element of x is broadcast to a vector. The vector is multiplied by the weights of LT_LANES
 * channels of y, or, for the gradient of w, by LT_LANES channels of dy:
 *
 *     y (pixel, out) = b (out) + the sum over taps of x (pixel, tap) w (tap, out)
 *     dw (tap, out) = the sum over pixels of x (pixel, tap) dy (pixel, out)
 *
 * A tap is a channel of x at a position in the kernel. A thread takes some rows of y of one image
 * at a time. It copies to a strip the rows of x that they need, with zeros for padding. Within the
 * strip there are no borders, and a tap is an offset. The strip stays in the L1 cache.
 *
 * For gradients, each thread sums a part of the rows, and the parts are summed in order. The bits
 * depend on the number of threads, as they do in oneDNN.
 */
#include "ops/cpu/conv.h"
#include "ops/cpu/loops.h"
#include "ops/cpu/panel.h"

enum { MAX_CHANNELS = 4, MAX_TAPS = 7 * 7 * MAX_CHANNELS };
enum { COLUMNS = MOST * LT_LANES };
enum { PIXELS = 7, TAPS = 9 }; /* sums of COLUMNS each; widths of images are often 7 * 2^n */
enum { STRIP = 4096 };         /* floats per strip, unless one row of y needs more */

/* ==== Strips ================================================================================== */

/* How a convolution is divided. A strip is (rows, columns, in); its rows are `pitch` floats. */
typedef struct {
    const lt_conv *conv;
    int64_t rows, strips;            /* rows of y per strip; strips per image */
    int64_t pitch, words;            /* floats per row of a strip; per strip */
    int64_t taps, tiles;             /* taps; tiles of TAPS taps */
    int64_t offset[MAX_TAPS + TAPS]; /* offset of each tap in the strip; 0 beyond the last */
} plan;

static plan plan_of(const lt_conv *v)
{
    const lt_window *w = &v->window;
    int64_t across = (w->out[1] + PIXELS - 1) / PIXELS * PIXELS, run = w->kernel[1] * v->in;
    plan p = {.conv = v, .taps = w->kernel[0] * run};
    p.pitch = (across - 1) * w->stride[1] * v->in + run;
    int64_t spare = STRIP / p.pitch - w->kernel[0]; /* rows beyond those for one row of y */
    p.rows = lt__min(spare < 0 ? 1 : spare / w->stride[0] + 1, w->out[0]);
    p.strips = (w->out[0] + p.rows - 1) / p.rows;
    p.words = ((p.rows - 1) * w->stride[0] + w->kernel[0]) * p.pitch;
    p.words = (p.words + LT_LANES - 1) / LT_LANES * LT_LANES;
    p.tiles = (p.taps + TAPS - 1) / TAPS;
    for (int64_t k = 0; k < p.taps; k++)
        p.offset[k] = k / run * p.pitch + k % run;
    return p;
}

/* A range of rows of y in an image. */
typedef struct {
    int64_t image, first, n;
} range;

static range rows_of(const plan *p, int64_t strip)
{
    int64_t first = strip % p->strips * p->rows;
    return (range){strip / p->strips, first, lt__min(p->rows, p->conv->window.out[0] - first)};
}

/* Copies the rows of x that rows of y need. The padding columns are zero from the start. */
static void fill(const plan *p, const float *x, const range *rows, float *strip)
{
    const lt_window *w = &p->conv->window;
    int64_t in = p->conv->in, left = w->pad[1] * in, length = w->in[1] * in;
    int64_t top = lt__window_in(w, 0, rows->first, 0);
    for (int64_t i = 0; i < (rows->n - 1) * w->stride[0] + w->kernel[0]; i++) {
        float *to = strip + i * p->pitch;
        if (top + i < 0 || top + i >= w->in[0])
            memset(to, 0, (size_t)p->pitch * sizeof *to);
        else
            memcpy(to + left, x + (rows->image * w->in[0] + top + i) * length,
                   (size_t)lt__min(length, p->pitch - left) * sizeof *to);
    }
}

/* ==== y ======================================================================================= */

/* Packs w as (out / COLUMNS, tap, COLUMNS). */
static void pack(const lt_conv_task *task, int64_t taps, float *panel)
{
    const float *w = task->w.data;
    for (int64_t o = 0; o < task->conv->out; o++)
        for (int64_t k = 0; k < taps; k++)
            panel[(o / COLUMNS * taps + k) * COLUMNS + o % COLUMNS] = w[o * taps + k];
}

/* Computes n <= PIXELS pixels of a row of y, for COLUMNS channels. The strip has columns for PIXELS
 * pixels. */
LT_INLINE void put_pixels(const plan *p, const float *strip, const float *panel, const float *bias,
                          int64_t n, float *y)
{
    int64_t pixel = p->conv->window.stride[1] * p->conv->in;
    lt_vec sum[PIXELS][MOST];
    UNROLL(i, PIXELS)
        UNROLL(j, MOST)
            sum[i][j] = bias ? lt__load_f32(bias + j * LT_LANES) : (lt_vec){0};
    for (int64_t k = 0; k < p->taps; k++, panel += COLUMNS) {
        const float *x = strip + p->offset[k];
        lt_vec with[MOST];
        UNROLL(j, MOST)
            with[j] = lt__load_f32(panel + j * LT_LANES);
        UNROLL(i, PIXELS)
            UNROLL(j, MOST)
                sum[i][j] += with[j] * x[i * pixel];
    }
    UNROLL(i, PIXELS)
        if (i < n)
            UNROLL(j, MOST)
                lt__store_f32(y + i * p->conv->out + j * LT_LANES, sum[i][j]);
}

LT_SIMD static void put_rows(const plan *p, const float *strip, const float *panel,
                             const float *bias, int64_t n, float *y)
{
    const lt_window *w = &p->conv->window;
    int64_t out = p->conv->out, columns = PIXELS * w->stride[1] * p->conv->in;
    for (int64_t oh = 0; oh < n; oh++, strip += w->stride[0] * p->pitch) {
        const float *x = strip;
        for (int64_t left = w->out[1]; left > 0; left -= PIXELS, x += columns) {
            int64_t pixels = lt__min(left, PIXELS);
            for (int64_t o = 0; o < out; o += COLUMNS)
                put_pixels(p, x, panel + o * p->taps, bias ? bias + o : NULL, pixels, y + o);
            y += pixels * out;
        }
    }
}

/* ==== The gradient of w ======================================================================= */

/* Adds the sums of TAPS taps and COLUMNS channels over n rows of y to sums (tap, out). */
LT_INLINE void add_taps(const plan *p, const int64_t *offset, const float *strip, const float *dy,
                        int64_t n, float *sums)
{
    const lt_window *w = &p->conv->window;
    int64_t out = p->conv->out, pixel = w->stride[1] * p->conv->in;
    lt_vec sum[TAPS][MOST] = {{{0}}};
    for (int64_t oh = 0; oh < n; oh++, strip += w->stride[0] * p->pitch) {
        const float *x = strip;
        for (int64_t ow = 0; ow < w->out[1]; ow++, dy += out, x += pixel) {
            lt_vec with[MOST];
            UNROLL(j, MOST)
                with[j] = lt__load_f32(dy + j * LT_LANES);
            UNROLL(i, TAPS)
                UNROLL(j, MOST)
                    sum[i][j] += with[j] * x[offset[i]];
        }
    }
    UNROLL(i, TAPS)
        UNROLL(j, MOST) {
            float *to = sums + i * out + j * LT_LANES;
            lt__store_f32(to, lt__load_f32(to) + sum[i][j]);
        }
}

LT_SIMD static void add_rows(const plan *p, const float *strip, const float *dy, int64_t n,
                             float *sums)
{
    int64_t out = p->conv->out;
    for (int64_t k = 0; k < p->tiles * TAPS; k += TAPS, sums += TAPS * out)
        for (int64_t o = 0; o < out; o += COLUMNS)
            add_taps(p, p->offset + k, strip, dy + o, n, sums + o);
}

/* Computes dw from the sums of all parts, which are `apart` floats apart. */
static void put_gradient(const lt_conv_task *task, int64_t taps, const float *sums, int parts,
                         int64_t apart)
{
    int64_t out = task->conv->out;
    for (int64_t i = 0; i < out * taps; i++) {
        const float *from = sums + i % taps * out + i / taps;
        float sum = from[0];
        for (int k = 1; k < parts; k++)
            sum += from[k * apart];
        LT_PUT(task->add, ((float *)task->w.data)[i], sum);
    }
}

/* ==== Interface for conv2d.c ================================================================== */

static bool fits(const lt_conv *v)
{
    const lt_window *w = &v->window;
    bool yes = v->groups == 1 && v->in > 0 && v->in <= MAX_CHANNELS && v->out > 0 &&
               v->out % COLUMNS == 0;
    for (int i = 0; i < 2; i++)
        yes = yes && w->in[i] > 0 && w->kernel[i] <= 7 && w->dilation[i] == 1 &&
              w->stride[i] <= w->kernel[i] && w->pad[i] < w->kernel[i];
    return yes;
}

/* For y with three input channels, or with strides, oneDNN is as fast. With fewer channels it takes
 * twice as long if its result is not in a cache yet, as in training. */
static bool pays(const lt_conv_task *task)
{
    const lt_window *w = &task->conv->window;
    return task->kind == LT_CONV_WEIGHTS ||
           (task->kind == LT_CONV && task->conv->in <= 2 && w->stride[0] * w->stride[1] == 1);
}

static lt_status thin_accepts(const lt_call *c, const lt_conv_task *task)
{
    (void)c;
    bool f32 = task->x.dtype == LT_F32 && task->w.dtype == LT_F32 && task->y.dtype == LT_F32;
    bool yes = f32 && pays(task) && fits(task->conv) && has_fast_products(false);
    return yes ? LT_OK : LT_EUNSUPPORTED;
}

/* Layout of the scratch: the packed weights (forward only), then for each thread the sums (gradient
 * only) and a strip. */
static int64_t words_of_sums(const plan *p, bool backward)
{
    return backward ? p->tiles * TAPS * p->conv->out : 0;
}

static int64_t words_of_panel(const plan *p, bool backward)
{
    return backward ? 0 : p->taps * p->conv->out;
}

static size_t thin_scratch(const lt_call *c, const lt_conv *v, lt_dtype dtype, bool backward)
{
    (void)dtype;
    if (!fits(v))
        return 0;
    plan p = plan_of(v);
    return (size_t)(words_of_panel(&p, backward) +
                    c->threads * (words_of_sums(&p, backward) + p.words)) *
           sizeof(float);
}

static lt_status thin_run(const lt_call *c, const lt_conv_task *task)
{
    plan p = plan_of(task->conv);
    bool backward = task->kind == LT_CONV_WEIGHTS;
    int64_t width = task->conv->window.out[1] * task->conv->out, height = task->conv->window.out[0];
    int64_t strips = task->conv->n * p.strips;
    int64_t sums = words_of_sums(&p, backward), each = sums + p.words;
    float *panel = c->scratch, *parts = panel + words_of_panel(&p, backward);
    if (!backward)
        pack(task, p.taps, panel);
    LT_PARALLEL_FOR(c, (double)(task->conv->n * height * width) * (double)p.taps)
    for (int part = 0; part < c->threads; part++) {
        float *own = parts + part * each, *strip = own + sums;
        memset(own, 0, (size_t)each * sizeof *own);
        for (int64_t i = strips * part / c->threads; i < strips * (part + 1) / c->threads; i++) {
            range rows = rows_of(&p, i);
            float *y = (float *)task->y.data + (rows.image * height + rows.first) * width;
            fill(&p, task->x.data, &rows, strip);
            if (backward)
                add_rows(&p, strip, y, rows.n, own);
            else
                put_rows(&p, strip, panel, task->bias.data, rows.n, y);
        }
    }
    if (backward)
        put_gradient(task, p.taps, parts, c->threads, each);
    return LT_OK;
}

const lt_conv_impl lt__conv_thin = {"thin", thin_accepts, thin_scratch, thin_run};
