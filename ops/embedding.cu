/* embedding.cu - the CUDA side of embedding.c, and the check of ids.
 *
 * Backward. Each block owns a few neighbouring rows of the table. It reads all ids, 256 at a time,
 * and adds the gradients of those that refer to its rows, in the order of the ids. So no atomics
 * are needed and the bits equal those of the CPU. Each of at most 1024 blocks reads all ids once,
 * from the cache; the gradients of a frequent row are added one after the other by one block. The
 * gradient of an f16 or bf16 table is summed in f32.
 */
#include "ops/cuda/reduction.h"

enum { W, IDS };

/* ==== Ids out of range ======================================================================== */

/* The id that is largest as an unsigned number, so a negative one if there is any; the first of
 * equal ones. */
typedef struct far_id {
    uint64_t id;
    int64_t place; /* -1 if there is none */
} far_id;

struct furthest {
    static __device__ far_id start() { return far_id{0, -1}; }
    static __device__ far_id join(far_id a, far_id b)
    {
        bool further = a.place < 0 || b.id > a.id || (b.id == a.id && b.place < a.place);
        return b.place >= 0 && further ? b : a;
    }
    /* e.divisor is the limit, e.dtype the kind. */
    static __device__ void end(const lt_reduction_end &e, int64_t, far_id a)
    {
        lt_bad_id *bad = (lt_bad_id *)e.out;
        if (a.place < 0 || a.id < (uint64_t)e.divisor || bad->kind != LT_NO_BAD_ID)
            return;
        bad->place = a.place;
        bad->id = (int64_t)a.id;
        bad->limit = (int64_t)e.divisor;
        bad->kind = e.dtype;
    }
};

struct joined_ids : furthest {
    typedef far_id In, Acc;
    typedef joined_ids Joined;
    static __device__ far_id reduce(far_id a, far_id b, int64_t) { return join(a, b); }
};

template <class E> struct far_ids : furthest {
    typedef E In;
    typedef far_id Acc;
    typedef joined_ids Joined;
    static __device__ far_id reduce(far_id a, E id, int64_t place)
    {
        return join(a, far_id{(uint64_t)(int64_t)id, place});
    }
};

size_t lt__cuda_ids_scratch(const lt_tensor *ids)
{
    lt_reduction_plan plan = lt__plan_all(ids->count, lt__cuda_dtype_bytes(ids->dtype));
    return lt__reduction_scratch(&plan, sizeof(far_id));
}

lt_status lt__cuda_check_ids(const lt_cuda *cuda, const lt_tensor *ids, int64_t limit, int kind,
                             void *scratch)
{
    lt_reduction_plan plan = lt__plan_all(ids->count, lt__cuda_dtype_bytes(ids->dtype));
    lt_reduction_end end = {cuda->bad_id, kind, false, false, (double)limit};
    switch (ids->dtype) {
    case LT_I64: return lt__reduce<far_ids<int64_t>>(cuda, &plan, ids->data, end, scratch);
    case LT_I32: return lt__reduce<far_ids<int32_t>>(cuda, &plan, ids->data, end, scratch);
    default: return lt__reduce<far_ids<uint8_t>>(cuda, &plan, ids->data, end, scratch);
    }
}

lt_status lt__cuda_report_bad_id(const lt_cuda *cuda)
{
    lt_bad_id bad = *cuda->bad_id;
    if (bad.kind == LT_NO_BAD_ID)
        return LT_OK;
    return cuda->host->fail(LT_EDATA,
                            bad.kind == LT_BAD_LABEL ? "cross_entropy: " LT_BAD_LABEL_TEXT
                                                     : "embedding: " LT_BAD_ROW_TEXT,
                            (lt_ll)bad.place + 1, (lt_ll)bad.id, (lt_ll)bad.limit);
}

/* ==== Forward ================================================================================= */

typedef struct table {
    const void *ids;
    int64_t dtype;          /* dtype of ids */
    int64_t rows, width, n; /* rows and columns of the table; number of ids */
} table;

static table table_of(const lt_call *c, const lt_tensor *w)
{
    const lt_tensor *ids = c->in[IDS];
    int64_t rows = w->dims[0];
    table t = {ids->data, ids->dtype, rows, rows > 0 ? w->count / rows : 0, ids->count};
    return t;
}

/* Copies rows in units U, as bytes. A row for a bad id has all bits set, which is NaN for
 * floats. */
template <class U> LT_KERNEL gather_kernel(U *to, const U *from, const __grid_constant__ table t)
{
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (i >= t.n * t.width)
        return;
    int64_t id = lt__id(t.ids, (int)t.dtype, i / t.width);
    U unit;
    memset(&unit, 0xff, sizeof unit);
    if (id >= 0 && id < t.rows)
        unit = from[id * t.width + i % t.width];
    to[i] = unit;
}

template <class U>
static lt_status gather(const lt_cuda *cuda, const table &t, void *to, const void *from)
{
    return lt__launch(cuda, lt__ceil_div(t.n * t.width, LT_THREADS), gather_kernel<U>, (U *)to,
                      (const U *)from, t);
}

static size_t scratch(const lt_call *c, bool backward)
{
    if (!backward)
        return lt__cuda_ids_scratch(c->in[IDS]);
    const lt_tensor *dw = c->d_in[W];
    return dw->dtype == LT_F32 ? 0 : (size_t)dw->count * sizeof(float);
}

static lt_status embedding_fwd(lt_call *c)
{
    typedef lt_pack<uint32_t, 4> pack;
    lt_cuda *cuda = lt__cuda(c->ctx);
    const lt_tensor *w = c->in[W], *y = c->out[0];
    table t = table_of(c, w);
    int64_t bytes = t.width * (int64_t)lt__cuda_dtype_bytes(w->dtype);
    LT_TRY(lt__cuda_check_ids(cuda, c->in[IDS], t.rows, LT_BAD_ROW, c->scratch));
    if (bytes % 16 == 0 && lt__are_wide((char *)w->data, (char *)y->data)) {
        t.width = bytes / 16;
        return gather<pack>(cuda, t, y->data, w->data);
    }
    LT_CUDA_SIZES(w->dtype, U, return gather<U>(cuda, t, y->data, w->data);)
}

/* ==== Backward ================================================================================ */

enum { MAX_BLOCKS = 1024 };

/* Sets the initial f32 sums of a block's rows. A column always belongs to the same thread. */
template <class E>
__device__ void begin_rows(const table &t, int64_t first, int64_t last, float *sums, const E *dw,
                           bool add)
{
    for (int64_t r = first; r < last; r++)
        for (int64_t k = threadIdx.x; k < t.width; k += LT_THREADS)
            sums[r * t.width + k] = add ? lt__value(dw[r * t.width + k]) : 0;
}

/* rows: number of rows per block. sums: dw itself if dw is f32. */
template <class E>
LT_KERNEL scatter_kernel(const __grid_constant__ table t, int64_t rows, float *sums, E *dw,
                         const E *dy, bool add)
{
    __shared__ int64_t ids[LT_THREADS];
    __shared__ unsigned mine[LT_THREADS / 32]; /* bits of the ids that refer to rows of the block */
    int64_t first = blockIdx.x * rows, last = first + rows < t.rows ? first + rows : t.rows;
    bool apart = (void *)sums != (void *)dw;
    if (apart || !add)
        begin_rows(t, first, last, sums, dw, add);
    for (int64_t from = 0; from < t.n; from += LT_THREADS) {
        int64_t i = from + threadIdx.x, id = i < t.n ? lt__id(t.ids, (int)t.dtype, i) : -1;
        unsigned bits = __ballot_sync(~0u, id >= first && id < last);
        ids[threadIdx.x] = id;
        if (threadIdx.x % 32 == 0)
            mine[threadIdx.x / 32] = bits;
        __syncthreads();
        for (int word = 0; word < LT_THREADS / 32; word++)
            for (unsigned left = mine[word]; left; left &= left - 1) {
                int at = word * 32 + __ffs((int)left) - 1;
                for (int64_t k = threadIdx.x; k < t.width; k += LT_THREADS)
                    sums[ids[at] * t.width + k] += lt__value(dy[(from + at) * t.width + k]);
            }
        __syncthreads();
    }
    for (int64_t r = first; r < last && apart; r++)
        for (int64_t k = threadIdx.x; k < t.width; k += LT_THREADS)
            dw[r * t.width + k] = lt_element<E>::of(sums[r * t.width + k]);
}

template <class E> static lt_status scatter(lt_call *c)
{
    lt_tensor *dw = c->d_in[W];
    table t = table_of(c, dw);
    int64_t rows = lt__ceil_div(t.rows, MAX_BLOCKS);
    float *sums = (float *)(dw->dtype == LT_F32 ? dw->data : c->scratch);
    return lt__launch(lt__cuda(c->ctx), t.width > 0 && rows > 0 ? lt__ceil_div(t.rows, rows) : 0,
                      scatter_kernel<E>, t, rows, sums, (E *)dw->data, (const E *)c->d_out[0]->data,
                      lt__adds(c, W));
}

LT_CUDA_CALL(embedding_bwd, FLOATS, c->d_in[W], scatter<E>(c))

void lt__cuda_embedding(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_embedding], scratch, embedding_fwd, embedding_bwd);
}
