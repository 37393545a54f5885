/* delay.cu - the CUDA side of delay.c. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/update.h"
#include "ops/delay.h"

typedef float T; /* dtype of the numbers and of each step */

/* ==== dc_grad and gap_grad ==================================================================== */

LT_CUDA_UPDATE(dc, 3, 1 << LT_DC_G, false, LT_DC_NUMBERS,
               LT_DC_STEP(x[LT_DC_G], x[LT_DC_W], x[LT_DC_BACKUP]))
LT_CUDA_UPDATE(dc_adaptive, 4, 1 << LT_DC_G | 1 << LT_DC_MS, false, LT_DC_ADAPTIVE_NUMBERS,
               LT_DC_ADAPTIVE_STEP(x[LT_DC_G], x[LT_DC_W], x[LT_DC_BACKUP], x[LT_DC_MS], sqrtf))
LT_CUDA_UPDATE(gap, 5, 1 << LT_GAP_G | 1 << LT_GAP_MS, false, LT_GAP_NUMBERS,
               LT_GAP_STEP(x[LT_GAP_G], x[LT_GAP_W], x[LT_GAP_BACKUP], x[LT_GAP_V], x[LT_GAP_MS],
                           sqrtf))

static lt_status dc(lt_call *c)
{
    return lt__flag(c, DC_ADAPTIVE) ? lt__update(c, dc_adaptive_update::of(c))
                                    : lt__update(c, dc_update::of(c));
}

static lt_status gap(lt_call *c) { return lt__update(c, gap_update::of(c)); }

/* ==== ddc_step ================================================================================ */

enum { PART = 16 * LT_THREADS }; /* elements that a block sums */
enum { NUMBERS = 64 };           /* bytes at the start of scratch, for the limit */

#define DDC_NUMBERS(N) LT_DDC_NUMBERS(N) N(const double *, limit, c->scratch)
LT_CUDA_UPDATE(ddc, 5, 1 << LT_DDC_W | 1 << LT_DDC_V | 1 << LT_DDC_S, true, DDC_NUMBERS,
               LT_DDC_STEP(x[LT_DDC_W], x[LT_DDC_G], x[LT_DDC_V], x[LT_DDC_S], x[LT_DDC_BACKUP],
                           (T)*limit, sqrtf))

struct ddc_sums {
    double c, g; /* sums of squares of the compensation and of the gradient */
};

struct ddc_join {
    typedef ddc_sums Acc;
    static __device__ Acc join(Acc a, Acc b) { return {a.c + b.c, a.g + b.g}; }
};

/* part[b] = the sums of the elements of block b. */
template <class E>
LT_KERNEL ddc_sum_parts(ddc_update f, const __grid_constant__ lt_arenas<E> a, ddc_sums *part)
{
    T lam = f.lam, rho = f.rho, one_minus_rho = f.one_minus_rho;
    T scale = a.factor ? f.scale * (T)*a.factor : f.scale;
    int64_t first = (int64_t)blockIdx.x * PART, last = first + PART;
    ddc_sums sum = {0, 0};
    if (last > a.count)
        last = a.count;
#pragma unroll 4
    for (int64_t i = first + threadIdx.x; i < last; i += LT_THREADS) {
        T w = lt__value(a.at[LT_DDC_W][i]), g = lt__value(a.at[LT_DDC_G][i]);
        T s = lt__value(a.at[LT_DDC_S][i]), backup = lt__value(a.at[LT_DDC_BACKUP][i]);
        LT_DDC_COMPENSATION(w, g, s, backup, sqrtf)
        sum.c += (double)compensation * (double)compensation;
        sum.g += (double)scaled * (double)scaled;
    }
    sum = lt__join_lanes<ddc_join>(sum, 1, LT_THREADS);
    if (threadIdx.x == 0)
        part[blockIdx.x] = sum;
}

static __device__ void add_to_stats(void *stats, int dtype, int64_t i, double value)
{
    if (dtype == LT_F64)
        ((double *)stats)[i] += value;
    else
        lt__put_float(stats, dtype, i, false,
                      (float)((double)lt__get_float(stats, dtype, i) + value));
}

/* One block: joins the n parts, computes the limit and updates stats. */
static LT_KERNEL ddc_find_limit(const ddc_sums *part, int64_t n, double cap, double *limit,
                                lt_numbers stats, const int32_t *skip)
{
    ddc_sums sum = {0, 0};
    for (int64_t i = threadIdx.x; i < n; i += LT_THREADS)
        sum = ddc_join::join(sum, part[i]);
    sum = lt__join_lanes<ddc_join>(sum, 1, LT_THREADS);
    if (threadIdx.x > 0 || (skip && *skip))
        return;
    double norm_c = sqrt(sum.c), norm_g = sqrt(sum.g);
    *limit = lt__ddc_limit(norm_c, norm_g, cap);
    add_to_stats(stats.at, (int)stats.dtype, 0, lt__ddc_ratio(norm_c, norm_g, *limit));
    add_to_stats(stats.at, (int)stats.dtype, 1, *limit < 1);
    add_to_stats(stats.at, (int)stats.dtype, 2, 1);
}

static int64_t ddc_parts(const lt_call *c) { return lt__ceil_div(c->in[LT_DDC_W]->count, PART); }

static size_t ddc_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    return NUMBERS + (size_t)ddc_parts(c) * sizeof(ddc_sums);
}

template <class E> static lt_status launch_ddc(lt_call *c, const ddc_update &f)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    ddc_sums *part = (ddc_sums *)((char *)c->scratch + NUMBERS);
    LT_TRY(lt__launch(cuda, ddc_parts(c), ddc_sum_parts<E>, f, lt__arenas_of<E>(c, f.N), part));
    LT_TRY(lt__launch(cuda, 1, ddc_find_limit, (const ddc_sums *)part, ddc_parts(c),
                      lt__number(c, DDC_CAP), (double *)c->scratch,
                      lt__numbers_of(c->in[LT_DDC_STATS]), c->skip));
    return lt__launch_update<ddc_update, E>(c, f);
}

static lt_status ddc(lt_call *c)
{
    ddc_update f = ddc_update::of(c);
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->in[LT_DDC_W]->dtype, E, return launch_ddc<E>(c, f);)
}

/* ==== ordered_step ============================================================================ */

LT_CUDA_UPDATE(ordered, 3, 1 << LT_UPDATE_W | 1 << LT_UPDATE_SLOT, true, LT_ORDERED_NUMBERS,
               LT_ORDERED_STEP(x[LT_UPDATE_W], x[LT_UPDATE_G], x[LT_UPDATE_SLOT]))

static lt_status ordered(lt_call *c) { return lt__update(c, ordered_update::of(c)); }

void lt__cuda_delay(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_dc_grad], NULL, dc, NULL);
    lt__set_kernels(&op[LT_OP_gap_grad], NULL, gap, NULL);
    lt__set_kernels(&op[LT_OP_ddc_step], ddc_scratch, ddc, NULL);
    lt__set_kernels(&op[LT_OP_ordered_step], NULL, ordered, NULL);
}
