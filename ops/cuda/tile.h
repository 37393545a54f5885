/* tile.h - products on CUDA that are tiled through shared memory, whatever the factors lie in:
 * matrices, or images behind a window.
 *
 *     out[i, j] (+)= bias[j] + the sum over k of a(i, k) b(j, k)
 *
 * for each of a batch. A block makes a tile of results: slices of both factors pass through shared
 * memory, and a thread adds up a patch of the tile. Sums are in f32, term after term. Where tiles
 * are few and terms many, the terms are cut into parts, and one more pass adds these up. Cuts
 * depend on the sizes alone: the bits are the same each time.
 *
 * Tensor cores are not used: this is for what the libraries refuse, and for machines without them.
 */
#ifndef LT_OPS_CUDA_TILE_H
#define LT_OPS_CUDA_TILE_H

#include "ops/cuda/cuda.h"

enum { LT_TILE = 64, LT_SLICE = 8, LT_PATCH = 4 };

typedef struct lt_tiles {
    int batch, m, n, k;       /* results are (batch, m, n), and sums of k terms */
    int part, parts;          /* terms of a part */
} lt_tiles;

/* A factor is a type with
 *     bool along;            in memory a row's terms are neighbours; else a term's rows are
 *     Row row(int batch, int i) const;             what there is to know about a row,
 *     Term term(int k) const;                      about a term,
 *     float at(const Row &, const Term &) const;   and what is where they meet
 * on the device. */

/* Steps are in elements, and within a row it is 1. Bias and rows of out are one type. */
template <class O> struct lt_results {
    O *out;
    int64_t batch, row;       /* from one to the next */
    int dtype, add;           /* of out; 1: to what is there */
    const O *bias;            /* NULL, or (batch, n) */
    float *sums;              /* (parts, batch, m, n): where they go when there are several parts */
};

/* ==== A slice of a factor in shared memory ==================================================== */

struct lt_slice { alignas(16) float at[LT_SLICE][LT_TILE + LT_PATCH]; };

/* The rows that a thread brings, of the tile that begins at a row. Rows beside the edge repeat the
 * last: their results are not stored. */
template <class F> struct lt_bringer {
    enum { TURNS = LT_TILE * LT_SLICE / LT_THREADS };
    typename F::Row row[TURNS];

    __device__ lt_bringer(const F &f, int batch, int first, int rows)
    {
#pragma unroll
        for (int q = 0; q < TURNS; q++) {
            int i = first + (f.along ? (int)threadIdx.x / LT_SLICE + q * (LT_THREADS / LT_SLICE)
                                     : (int)threadIdx.x % LT_TILE);
            row[q] = f.row(batch, i < rows ? i : rows - 1);
        }
    }

    /* Terms from `first` on; those from `last` on are zeros. */
    __device__ void bring(const F &f, lt_slice &slice, int first, int last) const
    {
        int down = threadIdx.x / LT_TILE, across = threadIdx.x % LT_TILE;
        if (f.along) {
            down = threadIdx.x % LT_SLICE;
            across = threadIdx.x / LT_SLICE;
        }
        typename F::Term term = f.term(first + down);
#pragma unroll
        for (int q = 0; q < TURNS; q++) {
            int k = down + (f.along ? 0 : q * (LT_THREADS / LT_TILE));
            int i = across + (f.along ? q * (LT_THREADS / LT_SLICE) : 0);
            if (!f.along && q > 0)
                term = f.term(first + k);
            slice.at[k][i] = first + k < last ? f.at(row[q], term) : 0;
        }
    }
};

/* sum += the products of two slices, for this thread's patch. */
static inline __device__ void lt__add_slices(const lt_slice &a, const lt_slice &b, int down,
                                             int across, float (&sum)[LT_PATCH][LT_PATCH])
{
#pragma unroll 2
    for (int k = 0; k < LT_SLICE; k++) {
        lt_pack<float, LT_PATCH> x = *(const lt_pack<float, LT_PATCH> *)&a.at[k][down];
        lt_pack<float, LT_PATCH> y = *(const lt_pack<float, LT_PATCH> *)&b.at[k][across];
        for (int i = 0; i < LT_PATCH; i++)
            for (int j = 0; j < LT_PATCH; j++)
                sum[i][j] = fmaf(x.at[i], y.at[j], sum[i][j]);
    }
}

/* A tile of sums in shared memory, from where it is stored row by row. */
struct lt_tile_sums { alignas(16) float at[LT_TILE][LT_TILE + LT_PATCH]; };

template <class O>
__device__ inline void lt__put_tile(const lt_results<O> &r, const lt_tiles &t,
                                    const lt_tile_sums &sums, int part, int batch, int top,
                                    int left)
{
    int j = left + threadIdx.x % LT_TILE;
    float bias = r.bias && j < t.n ? lt__value(r.bias[(int64_t)batch * t.n + j]) : 0;
#pragma unroll 1
    for (int q = threadIdx.x / LT_TILE; q < LT_TILE; q += LT_THREADS / LT_TILE) {
        int i = top + q;
        if (i >= t.m || j >= t.n)
            break;
        float sum = sums.at[q][threadIdx.x % LT_TILE] + bias;
        O *to = r.out + batch * r.batch + i * r.row + j;
        if (r.sums)
            r.sums[(((int64_t)part * t.batch + batch) * t.m + i) * t.n + j] = sum;
        else
            *to = lt_element<O>::of(r.add ? lt__value(*to) + sum : sum);
    }
}

template <class A, class B, class O>
__global__ void LT_FOUR_BLOCKS
    lt__tile_kernel(const __grid_constant__ lt_tiles t, const __grid_constant__ A a,
                    const __grid_constant__ B b, const __grid_constant__ lt_results<O> r)
{
    __shared__ lt_slice of_a, of_b;
    __shared__ lt_tile_sums sums;
    int wide = (t.n - 1) / LT_TILE + 1, high = (t.m - 1) / LT_TILE + 1;
    int above = (int)blockIdx.x / wide, left = ((int)blockIdx.x - above * wide) * LT_TILE;
    int before = above / high, top = (above - before * high) * LT_TILE;
    int part = before / t.batch, batch = before - part * t.batch;
    int first = part * t.part, last = t.k - first < t.part ? t.k : first + t.part;
    int down = threadIdx.x / (LT_TILE / LT_PATCH) * LT_PATCH;
    int across = threadIdx.x % (LT_TILE / LT_PATCH) * LT_PATCH;
    float sum[LT_PATCH][LT_PATCH] = {};
    lt_bringer<A> rows(a, batch, top, t.m);
    lt_bringer<B> columns(b, batch, left, t.n);
#pragma unroll 1
    for (int k = first; k < last; k += LT_SLICE) {
        rows.bring(a, of_a, k, last);
        columns.bring(b, of_b, k, last);
        __syncthreads();
        lt__add_slices(of_a, of_b, down, across, sum);
        __syncthreads();
    }
    for (int i = 0; i < LT_PATCH; i++)
        for (int j = 0; j < LT_PATCH; j++)
            sums.at[down + i][across + j] = sum[i][j];
    __syncthreads();
    lt__put_tile(r, t, sums, part, batch, top, left);
}

/* ==== Running ================================================================================= */

static inline int64_t lt__tile_count(const lt_tiles *t)
{
    return lt__cuts(t->m, LT_TILE) * lt__cuts(t->n, LT_TILE) * t->batch;
}

/* cut: the results are dense and have no bias, so that parts may be added up. Sizes beyond an int,
 * which no memory holds, give batch -1. */
static inline lt_tiles lt__tiles_of(int64_t batch, int64_t m, int64_t n, int64_t k, bool cut)
{
    enum { ENOUGH_BLOCKS = 256, MIN_TERMS = 256 };
    const int64_t most = INT32_MAX - LT_TILE;
    lt_tiles t = {(int)batch, (int)m, (int)n, (int)k, (int)k, 1};
    if (batch > most || m > most || n > most || k > most)
        t.batch = -1;
    int64_t tiles = lt__tile_count(&t);
    if (!cut || tiles <= 0 || tiles >= ENOUGH_BLOCKS || k < 2 * MIN_TERMS)
        return t;
    int64_t parts = lt__cuts(ENOUGH_BLOCKS, tiles);
    parts = parts < k / MIN_TERMS ? parts : k / MIN_TERMS;
    t.part = (int)(lt__cuts(lt__cuts(k, parts), LT_SLICE) * LT_SLICE);
    t.parts = (int)lt__cuts(k, t.part);
    return t;
}

/* Bytes: at most 8 MB, of 512 tiles. */
static inline size_t lt__tile_scratch(const lt_tiles *t)
{
    return t->parts > 1 ? (size_t)t->parts * t->batch * t->m * t->n * sizeof(float) : 0;
}

/* to (cols) = the sum of the rows of from (rows, cols), floats of these types; written or added. In
 * double, by cuda->sums. In matmul.cu. */
lt_status lt__cuda_sum_rows(const lt_cuda *cuda, void *to, int to_dtype, const void *from,
                            int from_dtype, int64_t rows, int64_t cols, bool add);
size_t lt__cuda_sum_rows_bytes(void); /* of cuda->sums */

/* scratch: lt__tile_scratch() bytes. */
template <class A, class B, class O>
lt_status lt__tile_product(const lt_cuda *cuda, const lt_tiles *t, const A &a, const B &b,
                           lt_results<O> r, void *scratch)
{
    if (t->batch < 0)
        return cuda->host->fail(LT_EUNSUPPORTED, "%s: the product is too large", cuda->name);
    r.sums = t->parts > 1 ? (float *)scratch : NULL;
    LT_TRY(lt__launch(cuda, lt__tile_count(t) * t->parts, lt__tile_kernel<A, B, O>, *t, a, b, r));
    if (t->parts == 1)
        return LT_OK;
    return lt__cuda_sum_rows(cuda, r.out, r.dtype, scratch, LT_F32, t->parts,
                             (int64_t)t->batch * t->m * t->n, r.add);
}

/* ==== Matrices ================================================================================ */

/* Axes of a tensor, the innermost first. */
typedef struct lt_axes {
    int n, dims[LT_MAX_DIMS];
    int64_t step[LT_MAX_DIMS]; /* in elements */
} lt_axes;

static inline __device__ int64_t lt__axes_at(const lt_axes &axes, int i)
{
    int64_t at = 0;
#pragma unroll 1
    for (int a = 0; a < axes.n; a++) {
        int next = i / axes.dims[a];
        at += (i - next * axes.dims[a]) * axes.step[a];
        i = next;
    }
    return at;
}

/* A factor of matrices. Terms may go through several of them, one after the other. */
template <class E> struct lt_matrices {
    typedef int64_t Row, Term;
    const E *data;
    bool along;
    int terms;                /* of one matrix */
    int64_t row_step, term_step;
    lt_axes batch, more;      /* matrices of results; matrices whose products are added up */

    __device__ int64_t row(int b, int i) const { return lt__axes_at(batch, b) + i * row_step; }
    __device__ int64_t term(int k) const
    {
        if (more.n == 0)
            return k * term_step;
        int matrix = k / terms;
        return lt__axes_at(more, matrix) + (k - matrix * terms) * term_step;
    }
    __device__ float at(int64_t row, int64_t term) const { return lt__value(data[row + term]); }
};

/* One matrix, or a batch of them that are batch_step apart. */
template <class E>
lt_matrices<E> lt__matrices_of(const void *data, int64_t row_step, int64_t term_step,
                               int batch, int64_t batch_step)
{
    lt_matrices<E> f = {};
    f.data = (const E *)data;
    f.along = term_step == 1;
    f.row_step = row_step;
    f.term_step = term_step;
    if (batch > 1) {
        f.batch.n = 1;
        f.batch.dims[0] = batch;
        f.batch.step[0] = batch_step;
    }
    return f;
}

#endif
