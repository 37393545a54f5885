/* rows.h - matrices on CUDA: rows that are each processed by a few threads, and sums over rows for
 * each column.
 *
 * The assignment of elements to threads depends only on the shape, so that sums are bit-identical
 * in every run.
 */
#ifndef LT_OPS_CUDA_ROWS_H
#define LT_OPS_CUDA_ROWS_H

#include "ops/cuda/reduction.h"

/* ==== Rows ==================================================================================== */

/* `outer` times `stride` rows, each of n elements that are `stride` apart. */
typedef struct lt_row_plan {
    int64_t outer, n, stride;
    unsigned blocks; /* blocks that cover the `stride` adjacent rows */
    /* threads of a block along the adjacent rows, within a row, and along outer. Their product is
     * LT_THREADS */
    int columns, lanes, group;
} lt_row_plan;

static inline lt_row_plan lt__rows_over(int64_t outer, int64_t n, int64_t stride)
{
    enum { RUN = 8 }; /* minimum number of elements per thread */
    lt_row_plan p = {};
    p.outer = outer;
    p.n = n;
    p.stride = stride;
    p.columns = lt__next_power_of_two(stride, 32);
    p.lanes = lt__next_power_of_two(lt__ceil_div(n, RUN), LT_THREADS / p.columns);
    p.group = LT_THREADS / p.columns / p.lanes;
    p.blocks = (unsigned)lt__ceil_div(stride, p.columns);
    return p;
}

static inline int64_t lt__row_blocks(const lt_row_plan *p)
{
    return lt__ceil_div(p->outer, p->group) * p->blocks;
}

/* The row of a thread. */
typedef struct lt_row {
    bool valid;           /* false if this thread has no row */
    int64_t index, first; /* index of the row; offset of its first element */
    int lane;
} lt_row;

__device__ inline lt_row lt__row_of(const lt_row_plan &p)
{
    int64_t column = (int64_t)(blockIdx.x % p.blocks) * p.columns + threadIdx.x % p.columns;
    int64_t o = (int64_t)(blockIdx.x / p.blocks) * p.group + threadIdx.x / (p.columns * p.lanes);
    lt_row r;
    r.valid = column < p.stride && o < p.outer;
    r.index = o * p.stride + column;
    r.first = o * p.n * p.stride + column;
    r.lane = (int)threadIdx.x / p.columns % p.lanes;
    return r;
}

/* Joins the accumulators of the threads of a row, and returns the result to all of them. */
template <class F>
__device__ inline typename F::Acc lt__join_row(const lt_row_plan &p, typename F::Acc a)
{
    return lt__join_lanes<F>(a, p.columns, p.lanes);
}

/* ==== Sums over rows ========================================================================== */

/* The rows are split into parts. A block sums some columns of one part, strided over its threads;
 * another kernel joins the parts. */
typedef struct lt_column_plan {
    int64_t rows, width;    /* a column may also be a pack of columns */
    int64_t part;           /* rows per part */
    unsigned parts, blocks; /* parts of the rows; blocks that cover the columns */
    int columns, lanes;     /* threads of a block along the columns; along the rows */
} lt_column_plan;

enum { LT_ENOUGH_BLOCKS = 512 }; /* more parts are not needed to fill the device */

/* enough: the number of blocks for which the rows are split. It must be a constant, so that bits do
 * not depend on the device. */
static inline lt_column_plan lt__columns_over(int64_t rows, int64_t width, int64_t enough)
{
    enum {
        MIN_ROWS = 8, /* minimum rows per thread, to limit the cost of joining parts */
        /* maximum rows per thread, as the rounding error of f32 sums grows with them */
        MAX_ROWS = 256
    };
    lt_column_plan p = {};
    p.rows = rows;
    p.width = width;
    p.columns = lt__next_power_of_two(width, 32);
    p.lanes = LT_THREADS / p.columns;
    p.blocks = (unsigned)lt__ceil_div(width, p.columns);
    if (width == 0)
        return p;
    int64_t parts = lt__min(lt__ceil_div(enough, p.blocks), rows / (MIN_ROWS * p.lanes));
    int64_t min = lt__ceil_div(rows, (int64_t)MAX_ROWS * p.lanes);
    parts = parts > min ? parts : min;
    p.part = parts > 0 ? lt__ceil_div(lt__ceil_div(rows, parts), p.lanes) * p.lanes : 1;
    p.parts = (unsigned)lt__ceil_div(rows, p.part);
    return p;
}

typedef struct lt_column {      /* the column and rows of a thread */
    bool valid;                 /* false if this thread has no column */
    int64_t index, first, last; /* column; rows [first, last) of its part */
    int64_t part;
    int lane, among; /* index down the rows; index among the block's columns */
} lt_column;

__device__ inline lt_column lt__column_of(const lt_column_plan &p)
{
    lt_column c;
    c.among = (int)threadIdx.x % p.columns;
    c.lane = (int)threadIdx.x / p.columns;
    c.index = (int64_t)(blockIdx.x % p.blocks) * p.columns + c.among;
    c.valid = c.index < p.width;
    c.part = blockIdx.x / p.blocks;
    c.first = c.part * p.part;
    c.last = c.first + p.part < p.rows ? c.first + p.part : p.rows;
    return c;
}

static inline int64_t lt__column_blocks(const lt_column_plan *p)
{
    return (int64_t)p->parts * p->blocks;
}

/* Threads of a block that joins parts. A block processes few columns, so that there are many blocks
 * with few iterations each. Four columns of a row are 64 bytes of memory, two full sectors. */
enum { LT_JOINED_COLUMNS = 4, LT_JOINING_LANES = LT_THREADS / LT_JOINED_COLUMNS };

typedef struct lt_two {
    double a, b;
} lt_two;

struct lt_two_sums {
    typedef lt_two Acc;
    static __device__ lt_two start() { return lt_two{0, 0}; }
    static __device__ lt_two join(lt_two x, lt_two y) { return lt_two{x.a + y.a, x.b + y.b}; }
};

/* Sums `rows` rows of (rows, width) for this thread's column, and returns the sums to all threads
 * of that column. */
__device__ inline lt_two lt__join_parts(const lt_two *from, int64_t rows, int64_t width,
                                        int64_t column)
{
    lt_two sums = lt_two_sums::start();
    int64_t end = column < width ? rows : 0;
    for (int64_t r = threadIdx.x / LT_JOINED_COLUMNS; r < end; r += LT_JOINING_LANES)
        sums = lt_two_sums::join(sums, from[r * width + column]);
    return lt__join_lanes<lt_two_sums>(sums, LT_JOINED_COLUMNS, LT_JOINING_LANES);
}

__device__ inline int64_t lt__joined_column(void)
{
    return (int64_t)blockIdx.x * LT_JOINED_COLUMNS + threadIdx.x % LT_JOINED_COLUMNS;
}

template <class E>
LT_KERNEL lt__put_columns_kernel(const lt_two *parts, int64_t n_parts, int64_t width, E *da,
                                 bool add_a, E *db, bool add_b)
{
    int64_t k = lt__joined_column();
    lt_two sums = lt__join_parts(parts, n_parts, width, k);
    if (k >= width || threadIdx.x >= LT_JOINED_COLUMNS)
        return;
    if (da)
        lt__put_sum<E>(da, k, add_a, sums.a);
    if (db)
        lt__put_sum<E>(db, k, add_b, sums.b);
}

/* The gradients of the inputs a and b, each (width), (+)= the sums over parts (n_parts, width).
 * Skips a gradient that is not needed. */
template <class E>
lt_status lt__put_columns(const lt_call *c, const lt_two *parts, int64_t n_parts, int64_t width,
                          int a, int b)
{
    lt_tensor *da = c->d_in[a], *db = c->d_in[b];
    if (!da && !db)
        return LT_OK;
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(width, LT_JOINED_COLUMNS),
                      lt__put_columns_kernel<E>, parts, n_parts, width, (E *)lt__data(da),
                      lt__adds(c, a), (E *)lt__data(db), lt__adds(c, b));
}

#endif
