/* tile.h - matrix products on CUDA, tiled through shared memory. The factors may be matrices, or
 * images read through a window (implicit GEMM).
 *
 *     out[i, j] (+)= bias[j] + the sum over k of a(i, k) b(j, k)
 *
 * for each matrix of a batch. A block computes one tile of the result: slices of both factors pass
 * through shared memory, and each thread accumulates a patch of the tile. Sums are in f32, in the
 * order of the terms. If there are few tiles and many terms, the terms are split into parts
 * (split-K), and another pass adds the parts. The split depends only on the sizes, so that results
 * are bit-identical in every run.
 *
 * Tensor cores are not used. This code is for products that NVIDIA's libraries do not support, and
 * for machines without these libraries.
 */
#ifndef LT_OPS_CUDA_TILE_H
#define LT_OPS_CUDA_TILE_H

#include "ops/cuda/cuda.h"

enum { LT_TILE = 64, LT_SLICE = 8, LT_PATCH = 4 };

typedef struct lt_tiles {
    int batch, m, n, k; /* results are (batch, m, n), each the sum of k terms */
    int part, parts;    /* terms per part; number of parts */
} lt_tiles;

/* A factor is a type with the following members, on the device:
 *     bool along;            true if consecutive terms are adjacent in memory, false if
 *                            consecutive rows are
 *     Row row(int batch, int i) const;             what at() needs to know about row i
 *     Term term(int k) const;                      what at() needs to know about term k
 *     float at(const Row &, const Term &) const;   the value in this row at this term */

/* Strides are in elements; the stride within a row is 1. bias and out have the same type. */
template <class O> struct lt_results {
    O *out;
    int64_t batch, row; /* stride between matrices; between rows */
    int dtype, add;     /* dtype of out; 1 to add to the values in out */
    const O *bias;      /* NULL, or (batch, n) */
    float *sums;        /* (parts, batch, m, n), used if there are several parts */
};

template <class O>
lt_results<O> lt__results_of(void *out, int dtype, int64_t batch, int64_t row, bool add)
{
    return lt_results<O>{(O *)out, batch, row, dtype, add, NULL, NULL};
}

/* ==== A slice of a factor in shared memory ==================================================== */

struct lt_slice {
    alignas(16) float at[LT_SLICE][LT_TILE + LT_PATCH];
};

/* The rows that a thread loads, in the tile that begins at row `first`. Rows beyond the edge repeat
 * the last row; their results are not stored. */
template <class F> struct lt_tile_loader {
    enum { LOADS = LT_TILE * LT_SLICE / LT_THREADS };
    typename F::Row row[LOADS];

    __device__ lt_tile_loader(const F &f, int batch, int first, int rows)
    {
#pragma unroll
        for (int q = 0; q < LOADS; q++) {
            int i = first + (f.along ? (int)threadIdx.x / LT_SLICE + q * (LT_THREADS / LT_SLICE)
                                     : (int)threadIdx.x % LT_TILE);
            row[q] = f.row(batch, i < rows ? i : rows - 1);
        }
    }

    /* Loads the terms starting at `first` into the slice. Terms >= last are zero. */
    __device__ void load(const F &f, lt_slice &slice, int first, int last) const
    {
        int down = threadIdx.x / LT_TILE, across = threadIdx.x % LT_TILE;
        if (f.along) {
            down = threadIdx.x % LT_SLICE;
            across = threadIdx.x / LT_SLICE;
        }
        typename F::Term term = f.term(first + down);
#pragma unroll
        for (int q = 0; q < LOADS; q++) {
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

/* A tile of sums in shared memory. It is stored from there row by row. */
struct lt_tile_sums {
    alignas(16) float at[LT_TILE][LT_TILE + LT_PATCH];
};

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
__global__ void LT_FOUR_BLOCKS lt__tile_kernel(const __grid_constant__ lt_tiles t,
                                               const __grid_constant__ A a,
                                               const __grid_constant__ B b,
                                               const __grid_constant__ lt_results<O> r)
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
    lt_tile_loader<A> rows(a, batch, top, t.m);
    lt_tile_loader<B> columns(b, batch, left, t.n);
#pragma unroll 1
    for (int k = first; k < last; k += LT_SLICE) {
        rows.load(a, of_a, k, last);
        columns.load(b, of_b, k, last);
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
    return lt__ceil_div(t->m, LT_TILE) * lt__ceil_div(t->n, LT_TILE) * t->batch;
}

/* cut: whether the terms may be split into parts, which requires dense results and no bias. If a
 * size does not fit an int, batch is -1 and lt__tile_product() fails. */
static inline lt_tiles lt__tiles_of(int64_t batch, int64_t m, int64_t n, int64_t k, bool cut)
{
    enum { ENOUGH_BLOCKS = 256, MIN_TERMS = 256 };
    const int64_t max = INT32_MAX - LT_TILE;
    lt_tiles t = {(int)batch, (int)m, (int)n, (int)k, (int)k, 1};
    if (batch > max || m > max || n > max || k > max)
        t.batch = -1;
    int64_t tiles = lt__tile_count(&t);
    if (!cut || tiles <= 0 || tiles >= ENOUGH_BLOCKS || k < 2 * MIN_TERMS)
        return t;
    int64_t parts = lt__ceil_div(ENOUGH_BLOCKS, tiles);
    parts = parts < k / MIN_TERMS ? parts : k / MIN_TERMS;
    t.part = (int)(lt__ceil_div(lt__ceil_div(k, parts), LT_SLICE) * LT_SLICE);
    t.parts = (int)lt__ceil_div(k, t.part);
    return t;
}

/* Bytes of scratch for lt__tile_product(): at most 8 MB, for 512 tiles. */
static inline size_t lt__tile_scratch(const lt_tiles *t)
{
    return t->parts > 1 ? (size_t)t->parts * t->batch * t->m * t->n * sizeof(float) : 0;
}

/* to (cols) = the sum over the rows of from (rows, cols), written or added. Both have float dtypes.
 * Sums are in double; partial sums are in cuda->sums. In matmul.cu. */
lt_status lt__cuda_sum_rows(const lt_cuda *cuda, void *to, int to_dtype, const void *from,
                            int from_dtype, int64_t rows, int64_t cols, bool add);
size_t lt__cuda_sum_rows_bytes(void); /* size of cuda->sums */

/* Enqueues the product. scratch: lt__tile_scratch() bytes. LT_EUNSUPPORTED if it is too large. */
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

/* Axes of a tensor, innermost first. */
typedef struct lt_axes {
    int n, dims[LT_MAX_DIMS];
    int64_t step[LT_MAX_DIMS]; /* strides, in elements */
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

/* A matrix factor. Its terms may span several matrices, one after the other. */
template <class E> struct lt_matrices {
    typedef int64_t Row, Term;
    const E *data;
    bool along;
    int terms; /* terms per matrix */
    int64_t row_step, term_step;
    /* axes over the result's matrices; axes over the matrices whose products are summed */
    lt_axes batch, more;

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

/* A single matrix, or a batch of matrices that are batch_step elements apart. */
template <class E>
lt_matrices<E> lt__matrices_of(const void *data, int64_t row_step, int64_t term_step, int batch,
                               int64_t batch_step)
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
