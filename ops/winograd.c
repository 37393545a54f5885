/* winograd.c - convolutions with 3x3 kernels and stride 1 by F(2x2, 3x3): Lavin and Gray, Fast
 * Algorithms for Convolutional Neural Networks, CVPR 2016, whose names the matrices have here.
 *
 * Four pixels of y, a tile of 2x2, are functions of a tile of 4x4 of x: with U = G g G' of the
 * kernel and V = B' d B of the tile of x,
 *
 *     y = A' (U . V) A    where U . V = the sum over channels of products, element by element
 *
 * so each of the 16 points of a tile is a matrix product of its own, (tiles, channels) by
 * (channels, channels): 16 multiplications where the direct way takes 36. The gradient of x is a
 * convolution of dy with the turned kernel. For that of the kernel, dg = G' (the sum over tiles of
 * V . W) G with W = A dy A'.
 *
 * Errors in f32, over 16 to 512 channels: y and dx 2e-7 to 7e-7 of a typical element, where the
 * longer sums of oneDNN's direct code err by 2e-7 to 11e-7; dw 2e-7 to 9e-7, where that errs by
 * 1e-7 to 3e-7.
 *
 * Memory decides whether that pays: a thread takes so many tiles at a time that what it makes of
 * them stays in its cache until it is used.
 */
#include "ops/winograd.h"
#include "ops/loops.h"
#include "ops/winograd_tile.h"

enum { ROWS = 8, MOST = 2, COLUMNS = MOST * LT_LANES }; /* of sums that registers hold */
enum { APART = 16 };    /* floats between points: equal ones would fall on the same cache lines */

/* An image, and the tiles that it is cut into. */
typedef struct {
    float *data;
    int64_t h, w, c;
} image;

typedef struct {
    image x, y;             /* what tiles of 4x4 are read from; what those of 2x2 belong to */
    int64_t pad[2];
    int64_t down, across;   /* tiles of an image */
    int64_t count;          /* of all images */
} grid;

/* Where values of tiles lie, point by point: vector k of tile t from t * tile + k * vector on. */
typedef struct {
    float *data;
    int64_t point, tile, vector;
} store;

/* ==== Tiles in images and in stores =========================================================== */

/* A square of pixels of an image: some may be outside. */
typedef struct {
    float *data;
    int64_t row, pixel;              /* floats from one to the next */
    int64_t top, bottom, left, right; /* rows [top, bottom), columns [left, right) are inside */
} square;

LT_INLINE square square_of(const image *x, int64_t n, int64_t row, int64_t column)
{
    return (square){x->data + ((n * x->h + row) * x->w + column) * x->c, x->w * x->c, x->c,
                    -row, x->h - row, -column, x->w - column};
}

LT_INLINE bool inside(const square *s, int i, int j)
{
    return i >= s->top && i < s->bottom && j >= s->left && j < s->right;
}

LT_INLINE float *pixel_of(const square *s, int i, int j)
{
    return s->data + i * s->row + j * s->pixel;
}

/* Tiles one after the other, without a division for each. */
typedef struct {
    int64_t n, row, column;
} cursor;

static inline cursor tile_at(const grid *g, int64_t t)
{
    return (cursor){t / (g->down * g->across), t / g->across % g->down * 2, t % g->across * 2};
}

LT_INLINE void go_on(const grid *g, cursor *at)
{
    if ((at->column += 2) < g->y.w)
        return;
    at->column = 0;
    if ((at->row += 2) < g->y.h)
        return;
    at->row = 0;
    at->n++;
}

/* The tile in x, and in y. */
LT_INLINE square input_of(const grid *g, const cursor *at)
{
    return square_of(&g->x, at->n, at->row - g->pad[0], at->column - g->pad[1]);
}

LT_INLINE square output_of(const grid *g, const cursor *at)
{
    return square_of(&g->y, at->n, at->row, at->column);
}

LT_INLINE lt_vec load(const square *s, bool whole, int i, int j, int64_t channel)
{
    return whole || inside(s, i, j) ? lt__load_f32(pixel_of(s, i, j) + channel) : (lt_vec){0};
}

/* The values of one tile of x, whole or partly outside. */
LT_INLINE void spread_input(const square *s, bool whole, int64_t channels, const store *to,
                            int64_t t)
{
    for (int64_t c = 0; c < channels; c += LT_LANES) {
        lt_vec d[TILE][TILE], v[TILE][TILE];
        float *at = to->data + t * to->tile + c / LT_LANES * to->vector;
        UNROLL for (int k = 0; k < POINTS; k++)
            d[k / TILE][k % TILE] = load(s, whole, k / TILE, k % TILE, c);
        transform_input(d, v);
        UNROLL for (int k = 0; k < POINTS; k++)
            lt__store_f32(at + k * to->point, v[k / TILE][k % TILE]);
    }
}

/* The values of one tile of dy. */
LT_INLINE void spread_output_gradient(const square *s, bool whole, int64_t channels,
                                      const store *to, int64_t t)
{
    for (int64_t c = 0; c < channels; c += LT_LANES) {
        lt_vec y[2][2], w[TILE][TILE];
        float *at = to->data + t * to->tile + c / LT_LANES * to->vector;
        UNROLL for (int k = 0; k < 4; k++)
            y[k / 2][k % 2] = load(s, whole, k / 2, k % 2, c);
        transform_output_gradient(y, w);
        UNROLL for (int k = 0; k < POINTS; k++)
            lt__store_f32(at + k * to->point, w[k / TILE][k % TILE]);
    }
}

/* V of n tiles from `first` on. */
LT_INLINE void spread_inputs(const grid *g, int64_t first, int64_t n, const store *v)
{
    cursor at = tile_at(g, first);
    for (int64_t t = 0; t < n; t++, go_on(g, &at)) {
        square s = input_of(g, &at);
        if (inside(&s, 0, 0) && inside(&s, TILE - 1, TILE - 1))
            spread_input(&s, true, g->x.c, v, t);
        else
            spread_input(&s, false, g->x.c, v, t);
    }
}

/* W of n tiles. */
LT_INLINE void spread_output_gradients(const grid *g, int64_t first, int64_t n, const store *w)
{
    cursor at = tile_at(g, first);
    for (int64_t t = 0; t < n; t++, go_on(g, &at)) {
        square s = output_of(g, &at);
        if (inside(&s, 1, 1))
            spread_output_gradient(&s, true, g->y.c, w, t);
        else
            spread_output_gradient(&s, false, g->y.c, w, t);
    }
}

/* One tile of y, whole or partly outside, for one vector of channels: the pixels get `start`, or
 * are added to. */
LT_INLINE void collect_output(const square *s, bool whole, const float *m, int64_t point,
                              int64_t channel, lt_vec start, bool add)
{
    lt_vec p[TILE][TILE], y[2][2];
    UNROLL for (int k = 0; k < POINTS; k++)
        p[k / TILE][k % TILE] = lt__load_f32(m + k * point);
    transform_output(p, y);
    UNROLL for (int k = 0; k < 4; k++)
        if (whole || inside(s, k / 2, k % 2)) {
            float *to = pixel_of(s, k / 2, k % 2) + channel;
            lt__store_f32(to, y[k / 2][k % 2] + (add ? lt__load_f32(to) : start));
        }
}

/* n tiles of y, `vectors` vectors of channels from `channel` on. */
LT_INLINE void collect_outputs(const grid *g, int64_t first, int64_t n, const store *m,
                               int64_t channel, int vectors, const float *bias, bool add)
{
    cursor at = tile_at(g, first);
    for (int64_t t = 0; t < n; t++, go_on(g, &at)) {
        square s = output_of(g, &at);
        for (int k = 0; k < vectors; k++) {
            int64_t c = channel + k * LT_LANES;
            lt_vec start = bias ? lt__load_f32(bias + c) : (lt_vec){0};
            const float *from = m->data + t * m->tile + k * m->vector;
            if (inside(&s, 1, 1))
                collect_output(&s, true, from, m->point, c, start, add);
            else
                collect_output(&s, false, from, m->point, c, start, add);
        }
    }
}

/* ==== Products ================================================================================ */

/* ROWS rows of `vectors` vectors of out (+)= a b: element (i, s) of a is a[i * a_row + s * a_term],
 * vector j of row s of b is at b + j * b_vector + s * LT_LANES. */
LT_INLINE void multiply(int vectors, int64_t terms, const float *a, int64_t a_row, int64_t a_term,
                        const float *b, int64_t b_vector, float *out, int64_t out_row, bool add)
{
    lt_vec sum[ROWS][MOST];
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < vectors; j++)
            sum[i][j] = (lt_vec){0};
    for (int64_t s = 0; s < terms; s++, a += a_term, b += LT_LANES) {
        lt_vec with[MOST];
        UNROLL for (int j = 0; j < vectors; j++)
            with[j] = lt__load_f32(b + j * b_vector);
        UNROLL for (int i = 0; i < ROWS; i++)
            UNROLL for (int j = 0; j < vectors; j++)
                sum[i][j] += a[i * a_row] * with[j];
    }
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < vectors; j++) {
            float *to = out + i * out_row + j * LT_LANES;
            lt__store_f32(to, add ? lt__load_f32(to) + sum[i][j] : sum[i][j]);
        }
}

/* ==== y, and the gradient of x ================================================================ */

/* Turns LANES rows of LANES floats into columns: four rounds that mix each row of the first half
 * with one of the second. */
LT_INLINE void transpose(lt_vec rows[LT_LANES])
{
    UNROLL for (int round = 0; round < 4; round++) {
        lt_vec mixed[LT_LANES];
        UNROLL for (int i = 0; i < LT_LANES / 2; i++) {
            lt_vec a = rows[i], b = rows[i + LT_LANES / 2];
            mixed[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                                   6, 22, 7, 23);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                                       13, 29, 14, 30, 15, 31);
        }
        UNROLL for (int i = 0; i < LT_LANES; i++)
            rows[i] = mixed[i];
    }
}

/* U of LANES output channels from o on, for y: vectors of w go along input channels, those of u
 * along output channels. u: (point, out / LANES, in, LANES) */
LT_SIMD static void pack_kernel(const float *w, int64_t out, int64_t in, int64_t o, float *u)
{
    for (int64_t c = 0; c < in; c += LT_LANES) {
        lt_vec taps[SIDE * SIDE][LT_LANES];
        for (int k = 0; k < SIDE * SIDE; k++) {
            for (int i = 0; i < LT_LANES; i++)
                taps[k][i] = lt__load_f32(w + ((o + i) * SIDE * SIDE + k) * in + c);
            transpose(taps[k]);
        }
        for (int i = 0; i < LT_LANES; i++) {
            lt_vec g[SIDE][SIDE], v[TILE][TILE];
            UNROLL for (int k = 0; k < SIDE * SIDE; k++)
                g[k / SIDE][k % SIDE] = taps[k][i];
            transform_kernel(g, v);
            UNROLL for (int k = 0; k < POINTS; k++)
                lt__store_f32(u + ((k * out + o) * in + (c + i) * LT_LANES),
                              v[k / TILE][k % TILE]);
        }
    }
}

/* The same of the turned kernel, for the gradient of x. u: (point, in / LANES, out, LANES) */
LT_SIMD static void pack_turned_kernel(const float *w, int64_t out, int64_t in, int64_t first,
                                       float *u)
{
    for (int64_t o = first; o < first + LT_LANES; o++)
        for (int64_t c = 0; c < in; c += LT_LANES) {
            lt_vec g[SIDE][SIDE], v[TILE][TILE];
            UNROLL for (int k = 0; k < SIDE * SIDE; k++)
                g[SIDE - 1 - k / SIDE][SIDE - 1 - k % SIDE] =
                    lt__load_f32(w + (o * SIDE * SIDE + k) * in + c);
            transform_kernel(g, v);
            UNROLL for (int k = 0; k < POINTS; k++)
                lt__store_f32(u + ((k * in + c) * out + o * LT_LANES), v[k / TILE][k % TILE]);
        }
}

/* Tiles [first, first + n) of y. Rows beside the n are products of what is there, and not used. */
LT_SIMD static void convolve(const grid *g, int64_t first, int64_t n, const float *u,
                             const float *bias, bool add, const store *v, const store *m)
{
    int64_t depth = g->x.c, width = g->y.c;
    spread_inputs(g, first, n, v);
    for (int64_t c = 0; c < width; c += COLUMNS) {
        int vectors = width - c < COLUMNS ? 1 : MOST;
        for (int k = 0; k < POINTS; k++)
            for (int64_t t = 0; t < n; t += ROWS) {
                const float *a = v->data + k * v->point + t * v->tile;
                const float *b = u + (k * width + c) * depth;
                float *to = m->data + k * m->point + t * m->tile;
                if (vectors == MOST)
                    multiply(MOST, depth, a, depth, 1, b, depth * LT_LANES, to, COLUMNS, false);
                else
                    multiply(1, depth, a, depth, 1, b, depth * LT_LANES, to, COLUMNS, false);
            }
        collect_outputs(g, first, n, m, c, vectors, bias, add);
    }
}

/* Tiles that a thread takes at a time: their V is to stay in its cache. */
static int64_t tiles_at_a_time(int64_t depth)
{
    enum { FLOATS = 1 << 18 };
    int64_t tiles = FLOATS / POINTS / depth / ROWS * ROWS;
    return tiles < ROWS ? ROWS : lt__least(tiles, 64);
}

static int64_t floats_of_v(int64_t depth)
{
    return POINTS * (tiles_at_a_time(depth) * depth + APART);
}

static int64_t floats_of_m(int64_t depth)
{
    return POINTS * (tiles_at_a_time(depth) * COLUMNS + APART);
}

/* Part `part` of as many as there are threads. */
static void convolve_part(const lt_call *c, const grid *g, const lt_job *job, int part)
{
    int64_t depth = g->x.c, most = tiles_at_a_time(depth);
    int64_t first = g->count * part / c->threads, end = g->count * (part + 1) / c->threads;
    float *u = c->scratch, *own = u + POINTS * depth * g->y.c +
                                  part * (floats_of_v(depth) + floats_of_m(depth));
    store v = {own, most * depth + APART, depth, LT_LANES};
    store m = {own + floats_of_v(depth), most * COLUMNS + APART, COLUMNS, LT_LANES};
    for (; first < end; first += most)
        convolve(g, first, lt__least(most, end - first), u, job->bias.data, job->add, &v, &m);
}

static void run_convolution(const lt_call *c, const grid *g, const lt_job *job)
{
    bool turned = job->kind == LT_CONV_DATA;
    int64_t out = job->conv->out, in = job->conv->in;
    LT_PARALLEL_FOR(c, (double)(out * in) * POINTS)
    for (int64_t o = 0; o < out; o += LT_LANES)
        if (turned)
            pack_turned_kernel(job->w.data, out, in, o, c->scratch);
        else
            pack_kernel(job->w.data, out, in, o, c->scratch);
    LT_PARALLEL_FOR(c, (double)(g->count * out) * (double)in)
    for (int part = 0; part < c->threads; part++)
        convolve_part(c, g, job, part);
}

/* ==== The gradient of the kernel ============================================================== */

/* V and W of n tiles, as tiles `at` and so on of the stores. */
LT_SIMD static void spread_both(const grid *g, int64_t first, int64_t n, store v, store w,
                                int64_t at)
{
    v.data += at * v.tile;
    w.data += at * w.tile;
    spread_inputs(g, first, n, &v);
    spread_output_gradients(g, first, n, &w);
}

/* One point of LANES output channels from o on: du (+)= the sum over n tiles of w v.
 * du: (point, out, in) */
LT_SIMD static void sum_point(int k, int64_t o, int64_t n, const store *v, const store *w,
                              int64_t in, int64_t out, float *du, bool add)
{
    for (int64_t c = 0; c < in; c += COLUMNS)
        for (int64_t row = o; row < o + LT_LANES; row += ROWS) {
            const float *a = w->data + k * w->point + o / LT_LANES * w->vector + row - o;
            const float *b = v->data + k * v->point + c / LT_LANES * v->vector;
            float *to = du + (k * out + row) * in + c;
            if (in - c < COLUMNS)
                multiply(1, n, a, 1, LT_LANES, b, v->vector, to, in, add);
            else
                multiply(MOST, n, a, 1, LT_LANES, b, v->vector, to, in, add);
        }
}

/* dw of output channel o from the sums of all parts. */
LT_SIMD static void put_kernel_gradient(const float *du, int64_t part, int parts, int64_t out,
                                        int64_t in, int64_t o, float *dw, bool add)
{
    for (int64_t c = 0; c < in; c += LT_LANES) {
        lt_vec u[TILE][TILE], g[SIDE][SIDE];
        UNROLL for (int k = 0; k < POINTS; k++) {
            const float *at = du + (k * out + o) * in + c;
            lt_vec sum = lt__load_f32(at);
            for (int i = 1; i < parts; i++)
                sum += lt__load_f32(at + i * part);
            u[k / TILE][k % TILE] = sum;
        }
        transform_kernel_gradient(u, g);
        UNROLL for (int k = 0; k < SIDE * SIDE; k++) {
            float *to = dw + (o * SIDE * SIDE + k) * in + c;
            lt_vec there = add ? lt__load_f32(to) : (lt_vec){0};
            lt__store_f32(to, g[k / SIDE][k % SIDE] + there);
        }
    }
}

/* Where sums of a part of the tiles lie: U's gradient, then V and W of some tiles. */
typedef struct {
    int64_t tiles;           /* that are transformed at a time */
    int64_t v, w, floats;    /* where V and W begin; all that a part needs */
    int parts;
} sums;

/* Few channels: each thread has sums of its own, of its part of the tiles. Many: there is one, in
 * the order of the tiles, and the threads share out transforms and sums in turn. */
static sums sums_of(const lt_call *c, const lt_conv *v)
{
    enum { FEW = 64 * 128, OWN = 1 << 17, SHARED = 1 << 21 };
    bool few = v->in * v->out <= FEW;
    int64_t tiles = (few ? OWN : SHARED) / POINTS / (v->in + v->out) / ROWS * ROWS;
    sums s = {.tiles = tiles < 64 ? 64 : tiles, .parts = few ? c->threads : 1};
    s.v = POINTS * v->in * v->out;
    s.w = s.v + POINTS * (s.tiles * v->in + APART);
    s.floats = s.w + POINTS * (s.tiles * v->out + APART);
    return s;
}

static store store_of(float *data, int64_t tiles, int64_t channels)
{
    return (store){data, tiles * channels + APART, LT_LANES, tiles * LT_LANES};
}

/* The sums of one part, by one thread. */
static void sum_part(const lt_call *c, const grid *g, const sums *s, int part)
{
    int64_t in = g->x.c, out = g->y.c;
    int64_t first = g->count * part / s->parts, end = g->count * (part + 1) / s->parts;
    float *du = (float *)c->scratch + part * s->floats;
    store v = store_of(du + s->v, s->tiles, in), w = store_of(du + s->w, s->tiles, out);
    if (first == end)
        memset(du, 0, (size_t)s->v * sizeof *du);
    for (int64_t at = first; at < end; at += s->tiles) {
        int64_t n = lt__least(s->tiles, end - at);
        spread_both(g, at, n, v, w, 0);
        for (int k = 0; k < POINTS; k++)
            for (int64_t o = 0; o < out; o += LT_LANES)
                sum_point(k, o, n, &v, &w, in, out, du, at > first);
    }
}

/* The only sums, by all threads. */
static void sum_together(const lt_call *c, const grid *g, const sums *s)
{
    enum { SHARE = 16 }; /* tiles of a task */
    int64_t in = g->x.c, out = g->y.c, blocks = out / LT_LANES;
    float *du = c->scratch;
    store v = store_of(du + s->v, s->tiles, in), w = store_of(du + s->w, s->tiles, out);
    for (int64_t first = 0; first < g->count; first += s->tiles) {
        int64_t n = lt__least(s->tiles, g->count - first);
        LT_PARALLEL_FOR(c, (double)(n * (in + out)) * POINTS)
        for (int64_t at = 0; at < n; at += SHARE)
            spread_both(g, first + at, lt__least(SHARE, n - at), v, w, at);
        LT_PARALLEL_FOR(c, (double)(n * in) * (double)out)
        for (int64_t task = 0; task < POINTS * blocks; task++)
            sum_point((int)(task / blocks), task % blocks * LT_LANES, n, &v, &w, in, out, du,
                      first > 0);
    }
}

static void run_kernel_gradient(const lt_call *c, const grid *g, const lt_job *job)
{
    sums s = sums_of(c, job->conv);
    int64_t in = g->x.c, out = g->y.c;
    if (s.parts == 1)
        sum_together(c, g, &s);
    LT_PARALLEL_FOR(c, (double)(g->count * in) * (double)out)
    for (int part = 0; part < (s.parts > 1 ? s.parts : 0); part++)
        sum_part(c, g, &s, part);
    LT_PARALLEL_FOR(c, (double)(in * out) * POINTS)
    for (int64_t o = 0; o < out; o++)
        put_kernel_gradient(c->scratch, s.floats, s.parts, out, in, o, job->w.data, job->add);
}

/* ==== For conv2d.c ============================================================================ */

/* From one vector of channels to one the transforms cost what they save. */
static bool fits(const lt_conv *v)
{
    const lt_window *w = &v->window;
    bool yes = v->groups == 1 && v->in % LT_LANES == 0 && v->out % LT_LANES == 0 && v->n > 0 &&
               v->in + v->out > 2 * LT_LANES;
    for (int i = 0; i < 2; i++)
        yes = yes && w->kernel[i] == SIDE && w->stride[i] == 1 && w->dilation[i] == 1 &&
              w->pad[i] < SIDE;
    return yes;
}

/* Registers of 64 bytes, and 32 of them: with fewer the sums do not stay in registers. */
static bool has_wide_vectors(void)
{
#if defined(LT_NO_CLONES)
    return true; /* a build for tests: its speed is no matter */
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    return __builtin_cpu_supports("x86-64-v4");
#else
    return false;
#endif
}

bool lt__winograd_takes(const lt_job *job)
{
    return fits(job->conv) && job->x.dtype == LT_F32 && job->w.dtype == LT_F32 &&
           job->y.dtype == LT_F32 && has_wide_vectors();
}

size_t lt__winograd_scratch(const lt_call *c, const lt_conv *v, bool backward)
{
    if (!fits(v) || !has_wide_vectors())
        return 0;
    int64_t depth = backward ? v->out : v->in;
    int64_t convolution = POINTS * v->in * v->out +
                          c->threads * (floats_of_v(depth) + floats_of_m(depth));
    sums s = sums_of(c, v);
    int64_t gradient = backward ? s.parts * s.floats : 0;
    return (size_t)(gradient > convolution ? gradient : convolution) * sizeof(float);
}

void lt__winograd_run(const lt_call *c, const lt_job *job)
{
    const lt_conv *v = job->conv;
    const lt_window *w = &v->window;
    image x = {job->x.data, w->in[0], w->in[1], v->in};
    image y = {job->y.data, w->out[0], w->out[1], v->out};
    bool turned = job->kind == LT_CONV_DATA;
    grid g = {.x = turned ? y : x, .y = turned ? x : y};
    for (int i = 0; i < 2; i++)
        g.pad[i] = turned ? SIDE - 1 - w->pad[i] : w->pad[i];
    g.down = (g.y.h + 1) / 2;
    g.across = (g.y.w + 1) / 2;
    g.count = v->n * g.down * g.across;
    if (job->kind == LT_CONV_WEIGHTS)
        run_kernel_gradient(c, &g, job);
    else
        run_convolution(c, &g, job);
}
