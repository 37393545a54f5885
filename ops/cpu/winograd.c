/* winograd.c - convolutions with 3x3 kernels and stride 1 by F(2x2, 3x3): Lavin and Gray, Fast
 * Algorithms for Convolutional Neural Networks, CVPR 2016. Names of matrices follow the paper.
 *
 * A tile of 2x2 pixels of y is a function of a tile of 4x4 pixels of x. With U = G g G' of the
 * kernel and V = B' d B of the tile of x,
 *
 *     y = A' (U . V) A    where U . V = the sum over channels of products, element by element
 *
 * So each of the 16 points of a tile is a separate matrix product, (tiles, channels) by (channels,
 * channels). That takes 16 multiplications where direct convolution takes 36. The gradient of x is
 * a convolution of dy with the kernel rotated by 180 degrees. The gradient of the kernel is dg = G'
 * (the sum over tiles of V . W) G with W = A dy A'.
 *
 * Errors in f32, relative to a typical element, over 16 to 512 channels: for y and dx, 2e-7 to
 * 7e-7, compared with 2e-7 to 11e-7 for the longer sums of oneDNN's direct code; for dw, 2e-7 to
 * 9e-7, compared with 1e-7 to 3e-7 in oneDNN.
 *
 * In bf16, transforms and sums are in f32, but the factors are rounded. Errors of y and dx are
 * 4.2e-3, compared with 1.7e-3 in oneDNN from the rounding of the result alone. Errors of dw are
 * 4.0e-3, compared with less than 1e-6 for oneDNN's f32 sums of exact products.
 *
 * Memory traffic decides whether this is faster. A thread processes only as many tiles at a time as
 * stay in its cache until they are used, and meanwhile prefetches the next ones.
 */
#include "ops/cpu/conv.h"
#include "ops/cpu/loops.h"
#include "ops/cpu/winograd_tile.h"

enum { COLUMNS = MOST * LT_LANES };
enum { PADDING = 16 }; /* words between points; without them, points would share cache sets */

/* Defines name_f32() and name_bf16() from an inlined name() whose first argument is `half`. */
#define FOR_BOTH(name, parameters, ...)                                                            \
    LT_SIMD static void name##_f32 parameters { name(false, __VA_ARGS__); }                        \
    LT_SIMD_BF16 static void name##_bf16 parameters { name(true, __VA_ARGS__); }

/* ==== Words =================================================================================== */

/* Factors of products are stored in 32-bit words: one f32 term, or two bf16 terms. */
LT_INLINE int terms_of(bool half) { return half ? 2 : 1; }

/* Words of tiles. Vector k of tile t begins at t * tile + k * vector within a point, and point p at
 * p * point. */
typedef struct {
    float *data;
    int64_t point, tile, vector;
} store;

/* Stores v as term i of sums. In bf16 and for odd i, the words already contain term i - 1. */
LT_INLINE void put_term(bool half, float *words, int64_t i, lt_vec v)
{
    if (half && i % 2)
        v = lt__pair_bf16((lt_vec)((lt_vec_u32)lt__load_f32(words) << 16), v);
    else if (half)
        v = lt__pair_bf16(v, (lt_vec){0});
    lt__store_f32(words, v);
}

/* Computes V of n adjacent tiles of x, or W of n adjacent tiles of dy, in a row of tiles that
 * begins at the square. Stores them as tiles t, t + 1, ... A word of two bf16 contains adjacent
 * tiles if `tiles` is set, otherwise adjacent channels. */
LT_INLINE void spread_row(bool half, bool of_x, bool tiles, const square *s, bool rows,
                          int64_t channels, int64_t n, int64_t t, const store *to)
{
    for (int64_t c = 0; c < channels; c += LT_LANES) {
        lt_vec columns[TILE][TILE], v[TILE][TILE];
        if (of_x)
            read_columns(half, s, rows, 0, c, columns + 2);
        for (int64_t i = 0; i < n; i++) {
            float *at = to->data + (half && tiles ? (t + i) / 2 : t + i) * to->tile +
                        c / LT_LANES * to->vector;
            if (of_x)
                read_input(half, s, rows, 2 * i + 2, c, columns, v);
            else
                read_output_gradient(half, s, rows, 2 * i, c, v);
            UNROLL(k, POINTS)
                if (tiles)
                    put_term(half, at + k * to->point, t + i, v[k / TILE][k % TILE]);
                else
                    put(half, at + k * to->point, 0, v[k / TILE][k % TILE]);
        }
    }
}

/* The same for n tiles starting at tile `first`, stored as tiles 0, 1, ... */
LT_INLINE void spread(bool half, bool of_x, bool tiles, const grid *g, int64_t first, int64_t n,
                      const store *to)
{
    cursor at = tile_at(g, first);
    int64_t channels = of_x ? g->x.c : g->y.c;
    for (int64_t t = 0, some; t < n; t += some, advance(g, &at, some)) {
        square s = of_x ? input_of(half, g, &at) : output_of(half, g, &at);
        some = lt__min(n - t, g->across - at.column / 2);
        if (s.top <= 0 && s.bottom >= (of_x ? TILE : 2))
            spread_row(half, of_x, tiles, &s, true, channels, some, t, to);
        else
            spread_row(half, of_x, tiles, &s, false, channels, some, t, to);
    }
}

/* ==== Products ================================================================================ */

/* Computes ROWS rows of `vectors` vectors of out (+)= a b. Factors are words: element (i, s) of a
 * is a[i * a_row + s * a_word], vector j of row s of b is at b + j * b_vector + s * LT_LANES. */
LT_INLINE void multiply(bool half, int vectors, int64_t words, const float *a, int64_t a_row,
                        int64_t a_word, const float *b, int64_t b_vector, float *out,
                        int64_t out_row, bool add)
{
    lt_vec sum[ROWS][MOST];
    UNROLL(i, ROWS)
        UNROLL(j, vectors)
            sum[i][j] = (lt_vec){0};
    add_products(half, vectors, words, a, a_row, a_word, b, b_vector, sum);
    UNROLL(i, ROWS)
        UNROLL(j, vectors) {
            float *to = out + i * out_row + j * LT_LANES;
            lt__store_f32(to, add ? lt__load_f32(to) + sum[i][j] : sum[i][j]);
        }
}

/* ==== y, and the gradient of x ================================================================ */

/* Transposes LANES rows of LANES floats in four rounds, each of which interleaves the rows of the
 * first half with those of the second. */
LT_INLINE void transpose(lt_vec rows[LT_LANES])
{
    UNROLL(round, 4) {
        lt_vec mixed[LT_LANES];
        UNROLL(i, LT_LANES / 2) {
            lt_vec a = rows[i], b = rows[i + LT_LANES / 2];
            mixed[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                                   6, 22, 7, 23);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                                       13, 29, 14, 30, 15, 31);
        }
        UNROLL(i, LT_LANES)
            rows[i] = mixed[i];
    }
}

/* Computes U of LANES channels and stores it as term i. */
LT_INLINE void put_kernel(bool half, lt_vec g[SIDE][SIDE], float *u, int64_t point, int64_t i)
{
    lt_vec v[TILE][TILE];
    transform_kernel(g, v);
    UNROLL(k, POINTS)
        put_term(half, u + k * point + i / terms_of(half) * LT_LANES, i, v[k / TILE][k % TILE]);
}

/* Computes U of LANES output channels starting at channel o, for y. Vectors of w run along input
 * channels, vectors of u along output channels. u: (point, out / LANES, in / terms, LANES,
 * terms) */
LT_INLINE void pack_kernel(bool half, const void *w, int64_t out, int64_t in, int64_t o, float *u)
{
    int64_t words = in / terms_of(half);
    for (int64_t c = 0; c < in; c += LT_LANES) {
        lt_vec taps[SIDE * SIDE][LT_LANES];
        for (int k = 0; k < SIDE * SIDE; k++) {
            for (int i = 0; i < LT_LANES; i++)
                taps[k][i] = load(half, w, ((o + i) * SIDE * SIDE + k) * in + c);
            transpose(taps[k]);
        }
        for (int i = 0; i < LT_LANES; i++) {
            lt_vec g[SIDE][SIDE];
            UNROLL(k, SIDE * SIDE)
                g[k / SIDE][k % SIDE] = taps[k][i];
            put_kernel(half, g, u + o * words, out * words + PADDING, c + i);
        }
    }
}

/* The same for the rotated kernel, for the gradient of x. u: (point, in / LANES, out / terms,
 * LANES, terms) */
LT_INLINE void pack_turned_kernel(bool half, const void *w, int64_t out, int64_t in, int64_t first,
                                  float *u)
{
    int64_t words = out / terms_of(half);
    for (int64_t o = first; o < first + LT_LANES; o++)
        for (int64_t c = 0; c < in; c += LT_LANES) {
            lt_vec g[SIDE][SIDE];
            UNROLL(k, SIDE * SIDE)
                g[SIDE - 1 - k / SIDE][SIDE - 1 - k % SIDE] =
                    load(half, w, (o * SIDE * SIDE + k) * in + c);
            put_kernel(half, g, u + c * words, in * words + PADDING, o);
        }
}

LT_INLINE void pack(bool half, const lt_conv_task *task, int64_t o, float *u)
{
    if (task->kind == LT_CONV)
        pack_kernel(half, task->w.data, task->conv->out, task->conv->in, o, u);
    else
        pack_turned_kernel(half, task->w.data, task->conv->out, task->conv->in, o, u);
}
FOR_BOTH(pack, (const lt_conv_task *task, int64_t o, float *u), task, o, u)

/* Writes `start` plus one tile of y for a vector of channels, or adds the tile to y without
 * `start`. Pixels outside the image are skipped. */
LT_INLINE void collect_tile(bool half, const square *s, const float *m, int64_t point,
                            int64_t channel, lt_vec start, bool add)
{
    lt_vec p[TILE][TILE], y[2][2];
    UNROLL(k, POINTS)
        p[k / TILE][k % TILE] = lt__load_f32(m + k * point);
    transform_output(p, y);
    UNROLL(k, 4)
        if (k / 2 < s->bottom && k % 2 < s->right) {
            void *to = pixel_of(s, k / 2, k % 2);
            put(half, to, channel, y[k / 2][k % 2] + (add ? load(half, to, channel) : start));
        }
}

/* Writes n tiles of y, for `vectors` vectors of channels starting at `channel`. */
LT_INLINE void collect(bool half, const grid *g, int64_t first, int64_t n, const store *m,
                       int64_t channel, int vectors, lt_operand bias, bool add)
{
    cursor at = tile_at(g, first);
    for (int64_t t = 0; t < n; t++, advance(g, &at, 1)) {
        square s = output_of(half, g, &at);
        for (int k = 0; k < vectors; k++) {
            int64_t c = channel + k * LT_LANES;
            lt_vec start = bias.data ? load(half && bias.dtype == LT_BF16, bias.data, c)
                                     : (lt_vec){0};
            collect_tile(half, &s, m->data + t * m->tile + k * m->vector, m->point, c, start, add);
        }
    }
}

/* The part of an image that the next tiles need, approximately: the pixels of an image are in about
 * the same order as its tiles. It is prefetched in steps, so that memory is busy while products are
 * summed. */
typedef struct {
    uintptr_t next, end;
    int64_t step; /* bytes per step */
} ahead;

LT_INLINE ahead ahead_of(bool half, const grid *g, const image *x, int64_t first, int64_t n,
                         int64_t steps)
{
    int64_t bytes = x->h * x->w * x->c * bytes_of(half), tiles = g->down * g->across;
    uintptr_t from = (uintptr_t)x->data + (uintptr_t)(bytes * first / tiles);
    return (ahead){from, from, bytes * lt__min(n, g->count - first) / tiles / steps + 1};
}

LT_INLINE void prefetch(ahead *a)
{
    enum { LINE = 64 };
    for (a->end += (uintptr_t)a->step; a->next < a->end; a->next += LINE)
        __builtin_prefetch((const void *)a->next, 0, 2);
}

/* Sets tiles [n, end) of V to zero. */
LT_INLINE void clear_tiles(const store *v, int64_t n, int64_t end)
{
    for (int k = 0; k < POINTS; k++)
        memset(v->data + k * v->point + n * v->tile, 0,
               (size_t)((end - n) * v->tile) * sizeof *v->data);
}

/* Computes tiles [first, first + n) of y. Products are computed for ROWS tiles at a time; those
 * beyond n are not used. V is zero there, because leftover data might be NaNs or subnormal. */
LT_INLINE void convolve(bool half, const grid *g, int64_t first, int64_t n, const float *u,
                        lt_operand bias, bool add, const store *v, const store *m)
{
    int64_t words = g->x.c / terms_of(half), width = g->y.c, groups = (n + ROWS - 1) / ROWS;
    int64_t products = POINTS * groups * ((width + COLUMNS - 1) / COLUMNS);
    ahead of_x = ahead_of(half, g, &g->x, first + n, n, products);
    ahead of_y = ahead_of(half, g, &g->y, first + n, n, products);
    spread(half, true, false, g, first, n, v);
    clear_tiles(v, n, groups * ROWS);
    for (int64_t c = 0; c < width; c += COLUMNS) {
        int vectors = width - c < COLUMNS ? 1 : MOST;
        for (int k = 0; k < POINTS; k++)
            for (int64_t t = 0; t < n; t += ROWS) {
                const float *a = v->data + k * v->point + t * v->tile;
                const float *b = u + k * (width * words + PADDING) + c * words;
                float *to = m->data + k * m->point + t * m->tile;
                prefetch(&of_x);
                prefetch(&of_y);
                if (vectors == MOST)
                    multiply(half, MOST, words, a, words, 1, b, words * LT_LANES, to, COLUMNS,
                             false);
                else
                    multiply(half, 1, words, a, words, 1, b, 0, to, COLUMNS, false);
            }
        collect(half, g, first, n, m, c, vectors, bias, add);
    }
}
FOR_BOTH(convolve,
         (const grid *g, int64_t first, int64_t n, const float *u, lt_operand bias, bool add,
          const store *v, const store *m),
         g, first, n, u, bias, add, v, m)

/* The number of tiles that a thread processes at a time: few enough for their V to stay in its
 * cache. */
static int64_t tiles_at_a_time(int64_t words)
{
    enum { WORDS = 1 << 18 };
    int64_t tiles = WORDS / POINTS / words / ROWS * ROWS;
    return tiles < ROWS ? ROWS : lt__min(tiles, 64);
}

static int64_t words_of_v(int64_t words)
{
    return POINTS * (tiles_at_a_time(words) * words + PADDING);
}

static int64_t words_of_m(int64_t words)
{
    return POINTS * (tiles_at_a_time(words) * COLUMNS + PADDING);
}

/* Computes one part of the tiles. Each thread has one part. */
static void convolve_part(const lt_call *c, const grid *g, const lt_conv_task *task, int part)
{
    int64_t words = g->x.c / terms_of(g->half), max = tiles_at_a_time(words);
    int64_t first = g->count * part / c->threads, end = g->count * (part + 1) / c->threads;
    float *u = c->scratch, *own = u + POINTS * (words * g->y.c + PADDING) +
                                  part * (words_of_v(words) + words_of_m(words));
    store v = {own, max * words + PADDING, words, LT_LANES / terms_of(g->half)};
    store m = {own + words_of_v(words), max * COLUMNS + PADDING, COLUMNS, LT_LANES};
    for (; first < end; first += max)
        (g->half ? convolve_bf16 : convolve_f32)(g, first, lt__min(max, end - first), u, task->bias,
                                                 task->add, &v, &m);
}

static void run_convolution(const lt_call *c, const grid *g, const lt_conv_task *task)
{
    const lt_conv *conv = task->conv;
    LT_PARALLEL_FOR(c, (double)(conv->out * conv->in) * POINTS)
    for (int64_t o = 0; o < conv->out; o += LT_LANES)
        (g->half ? pack_bf16 : pack_f32)(task, o, c->scratch);
    LT_PARALLEL_FOR(c, (double)(g->count * conv->out) * (double)conv->in)
    for (int part = 0; part < c->threads; part++)
        convolve_part(c, g, task, part);
}

/* ==== The gradient of the kernel ============================================================== */

/* Computes V and W of n tiles, and stores them as tiles `at`, `at` + 1, ... */
LT_INLINE void spread_both(bool half, const grid *g, int64_t first, int64_t n, store v, store w,
                           int64_t at)
{
    v.data += at / terms_of(half) * v.tile;
    w.data += at / terms_of(half) * w.tile;
    spread(half, true, true, g, first, n, &v);
    spread(half, false, true, g, first, n, &w);
}
FOR_BOTH(spread_both, (const grid *g, int64_t first, int64_t n, store v, store w, int64_t at), g,
         first, n, v, w, at)

/* Adds or writes one point of LANES output channels starting at channel o: du (+)= the sum over n
 * tiles of w v. du: (point, out, in) */
LT_INLINE void sum_point(bool half, int k, int64_t o, int64_t n, const store *v, const store *w,
                         int64_t in, int64_t out, float *du, bool add)
{
    int64_t words = (n + terms_of(half) - 1) / terms_of(half);
    for (int64_t c = 0; c < in; c += COLUMNS)
        for (int64_t row = o; row < o + LT_LANES; row += ROWS) {
            const float *a = w->data + k * w->point + o / LT_LANES * w->vector + row - o;
            const float *b = v->data + k * v->point + c / LT_LANES * v->vector;
            float *to = du + (k * out + row) * in + c;
            if (in - c < COLUMNS)
                multiply(half, 1, words, a, 1, LT_LANES, b, v->vector, to, in, add);
            else
                multiply(half, MOST, words, a, 1, LT_LANES, b, v->vector, to, in, add);
        }
}
FOR_BOTH(sum_point,
         (int k, int64_t o, int64_t n, const store *v, const store *w, int64_t in, int64_t out,
          float *du, bool add),
         k, o, n, v, w, in, out, du, add)

/* Computes dw of output channel o from the sums of all parts. */
LT_INLINE void put_kernel_gradient(bool half, const float *du, int64_t part, int parts, int64_t out,
                                   int64_t in, int64_t o, lt_operand dw, bool add)
{
    bool to_half = half && dw.dtype == LT_BF16;
    for (int64_t c = 0; c < in; c += LT_LANES) {
        lt_vec u[TILE][TILE], g[SIDE][SIDE];
        UNROLL(k, POINTS) {
            const float *at = du + (k * out + o) * in + c;
            lt_vec sum = lt__load_f32(at);
            for (int i = 1; i < parts; i++)
                sum += lt__load_f32(at + i * part);
            u[k / TILE][k % TILE] = sum;
        }
        transform_kernel_gradient(u, g);
        UNROLL(k, SIDE * SIDE) {
            int64_t at = (o * SIDE * SIDE + k) * in + c;
            lt_vec there = add ? load(to_half, dw.data, at) : (lt_vec){0};
            put(to_half, dw.data, at, g[k / SIDE][k % SIDE] + there);
        }
    }
}
FOR_BOTH(put_kernel_gradient,
         (const float *du, int64_t part, int parts, int64_t out, int64_t in, int64_t o,
          lt_operand dw, bool add),
         du, part, parts, out, in, o, dw, add)

/* Layout of the sums of one part: the gradient of U, then V and W of some tiles. */
typedef struct {
    int64_t tiles;       /* tiles that are transformed at a time */
    int64_t v, w, words; /* offsets of V and W; floats per part */
    int parts;
} sums;

/* With few channels, each thread sums a part of the tiles in its own memory. With many, there is
 * one sum, in the order of the tiles, and the threads divide the transforms and then the
 * products. */
static sums sums_of(const lt_call *c, const grid *g)
{
    enum { FEW = 128 * 256, OWN = 1 << 17, SHARED = 1 << 22, LEAST = 64 };
    int64_t in = g->x.c, out = g->y.c;
    bool few = in * out <= FEW;
    int64_t words = (few ? OWN : SHARED) / POINTS / (in + out) / ROWS * ROWS;
    int64_t all = (g->count + terms_of(g->half) - 1) / terms_of(g->half);
    words = lt__min(all, words < LEAST ? LEAST : words);
    sums s = {.tiles = words * terms_of(g->half), .parts = few ? c->threads : 1};
    s.v = POINTS * in * out;
    s.w = s.v + POINTS * (words * in + PADDING);
    s.words = s.w + POINTS * (words * out + PADDING);
    return s;
}

static store store_of(float *data, const grid *g, const sums *s, int64_t channels)
{
    int64_t words = s->tiles / terms_of(g->half);
    return (store){data, words * channels + PADDING, LT_LANES, words * LT_LANES};
}

/* Computes the sums of one part in one thread. */
static void sum_part(const lt_call *c, const grid *g, const sums *s, int part)
{
    int64_t in = g->x.c, out = g->y.c;
    int64_t first = g->count * part / s->parts, end = g->count * (part + 1) / s->parts;
    float *du = (float *)c->scratch + part * s->words;
    store v = store_of(du + s->v, g, s, in), w = store_of(du + s->w, g, s, out);
    if (first == end)
        memset(du, 0, (size_t)s->v * sizeof *du);
    for (int64_t at = first; at < end; at += s->tiles) {
        int64_t n = lt__min(s->tiles, end - at);
        (g->half ? spread_both_bf16 : spread_both_f32)(g, at, n, v, w, 0);
        for (int k = 0; k < POINTS; k++)
            for (int64_t o = 0; o < out; o += LT_LANES)
                (g->half ? sum_point_bf16 : sum_point_f32)(k, o, n, &v, &w, in, out, du,
                                                           at > first);
    }
}

/* Computes the sums of all tiles with all threads, when there is only one part. */
static void sum_together(const lt_call *c, const grid *g, const sums *s)
{
    enum { SHARE = 16 }; /* tiles per task */
    int64_t in = g->x.c, out = g->y.c, blocks = out / LT_LANES;
    float *du = c->scratch;
    store v = store_of(du + s->v, g, s, in), w = store_of(du + s->w, g, s, out);
    for (int64_t first = 0; first < g->count; first += s->tiles) {
        int64_t n = lt__min(s->tiles, g->count - first);
        LT_PARALLEL_FOR(c, (double)(n * (in + out)) * POINTS)
        for (int64_t at = 0; at < n; at += SHARE)
            (g->half ? spread_both_bf16 : spread_both_f32)(g, first + at, lt__min(SHARE, n - at), v,
                                                           w, at);
        LT_PARALLEL_FOR(c, (double)(n * in) * (double)out)
        for (int64_t task = 0; task < POINTS * blocks; task++)
            (g->half ? sum_point_bf16 : sum_point_f32)(
                (int)(task / blocks), task % blocks * LT_LANES, n, &v, &w, in, out, du, first > 0);
    }
}

static void run_kernel_gradient(const lt_call *c, const grid *g, const lt_conv_task *task)
{
    sums s = sums_of(c, g);
    int64_t in = g->x.c, out = g->y.c;
    if (s.parts == 1)
        sum_together(c, g, &s);
    LT_PARALLEL_FOR(c, (double)(g->count * in) * (double)out)
    for (int part = 0; part < (s.parts > 1 ? s.parts : 0); part++)
        sum_part(c, g, &s, part);
    LT_PARALLEL_FOR(c, (double)(in * out) * POINTS)
    for (int64_t o = 0; o < out; o++)
        (g->half ? put_kernel_gradient_bf16 : put_kernel_gradient_f32)(
            c->scratch, s.words, s.parts, out, in, o, task->w, task->add);
}

/* ==== Interface for conv2d.c ================================================================== */

static grid grid_of(lt_conv_task_kind kind, const lt_conv *v, bool half)
{
    const lt_window *w = &v->window;
    bool turned = kind == LT_CONV_DATA;
    image x = {NULL, w->in[0], w->in[1], v->in}, y = {NULL, w->out[0], w->out[1], v->out};
    grid g = {.x = turned ? y : x, .y = turned ? x : y, .half = half};
    for (int i = 0; i < 2; i++)
        g.pad[i] = turned ? SIDE - 1 - w->pad[i] : w->pad[i];
    g.down = (g.y.h + 1) / 2;
    g.across = (g.y.w + 1) / 2;
    g.count = v->n * g.down * g.across;
    return g;
}

static bool fits(const lt_conv *v)
{
    const lt_window *w = &v->window;
    bool yes = v->groups == 1 && v->in % LT_LANES == 0 && v->out % LT_LANES == 0 && v->n > 0 &&
               v->in > 0 && v->out > 0;
    for (int i = 0; i < 2; i++)
        yes = yes && w->kernel[i] == SIDE && w->stride[i] == 1 && w->dilation[i] == 1 &&
              w->pad[i] < SIDE;
    return yes;
}

bool lt__winograd_can(const lt_conv_task *task)
{
    bool half = task->y.dtype == LT_BF16, weights = task->kind == LT_CONV_WEIGHTS;
    lt_dtype dtype = half ? LT_BF16 : LT_F32, of_w = task->w.dtype;
    return fits(task->conv) && task->y.dtype == dtype && task->x.dtype == dtype &&
           (of_w == dtype || (weights && of_w == LT_F32)) && has_fast_products(half);
}

/* The limits were measured against oneDNN. With one vector of channels on both sides, the
 * transforms take as long as they save. In bf16, direct convolution takes half the time. Then
 * computing U pays off with 128 tiles but not with 50, and tiles that extend far beyond the image
 * do not pay off (5x5 pixels, unlike 7x7). But oneDNN's gradients of w are slow in bf16, even with
 * one vector of channels on both sides. */
static lt_status winograd_accepts(const lt_call *c, const lt_conv_task *task)
{
    (void)c;
    enum { ENOUGH = 128 };
    bool half = task->y.dtype == LT_BF16, weights = task->kind == LT_CONV_WEIGHTS;
    bool wide = task->conv->in + task->conv->out > 2 * LT_LANES;
    if (!lt__winograd_can(task))
        return LT_EUNSUPPORTED;
    grid g = grid_of(task->kind, task->conv, half);
    bool full = 20 * g.down * g.across < 7 * g.y.h * g.y.w;
    bool pays = half ? g.count >= ENOUGH && (weights || (wide && full)) : wide;
    return pays ? LT_OK : LT_EUNSUPPORTED;
}

static size_t winograd_scratch(const lt_call *c, const lt_conv *v, lt_dtype dtype, bool backward)
{
    bool half = dtype == LT_BF16;
    if (!fits(v) || !has_fast_products(half))
        return 0;
    grid g = grid_of(LT_CONV_WEIGHTS, v, half);
    sums s = sums_of(c, &g);
    int64_t words = (backward ? v->out : v->in) / terms_of(half);
    int64_t convolution = POINTS * (v->in * v->out / terms_of(half) + PADDING) +
                          c->threads * (words_of_v(words) + words_of_m(words));
    int64_t gradient = backward ? s.parts * s.words : 0;
    return (size_t)(gradient > convolution ? gradient : convolution) * sizeof(float);
}

static lt_status winograd_run(const lt_call *c, const lt_conv_task *task)
{
    grid g = grid_of(task->kind, task->conv, task->y.dtype == LT_BF16);
    bool turned = task->kind == LT_CONV_DATA;
    g.x.data = turned ? task->y.data : task->x.data;
    g.y.data = turned ? task->x.data : task->y.data;
    if (task->kind == LT_CONV_WEIGHTS)
        run_kernel_gradient(c, &g, task);
    else
        run_convolution(c, &g, task);
    return LT_OK;
}

const lt_conv_impl lt__winograd = {"winograd", winograd_accepts, winograd_scratch, winograd_run};
