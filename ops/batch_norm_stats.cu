/* batch_norm_stats.cu - the CUDA side of the two ops of batch_norm.c that update running
 * statistics, once per step and with one value per channel. */
#include "ops/batch_norm.h"
#include "ops/cuda/cuda.h"

/* The operands of a call: the mean and variance to update, and those to update with. */
typedef struct statistics {
    lt_numbers mean, var, mean2, var2;
    int64_t n;           /* number of channels */
    const int32_t *skip; /* the call's skip flag, or NULL */
} statistics;

static statistics statistics_of(const lt_call *c)
{
    statistics s = {lt__numbers_of(c->in[0]), lt__numbers_of(c->in[1]), lt__numbers_of(c->in[2]),
                    lt__numbers_of(c->in[3]), c->in[0]->count,          c->skip};
    return s;
}

/* Finds the channel of a thread in block `block` of the call. Returns false if it has none, or if
 * the step is skipped. */
__device__ static bool find_channel(const statistics &s, unsigned block, int64_t *k)
{
    *k = (int64_t)block * LT_THREADS + threadIdx.x;
    return *k < s.n && !(s.skip && *s.skip);
}

/* part: the fraction of all values that mean2 and var2 describe. */
static LT_KERNEL merge_kernel(const __grid_constant__ statistics s, double part)
{
    int64_t k;
    if (!find_channel(s, blockIdx.x, &k))
        return;
    double mean = lt__number_at(s.mean, k), mean2 = lt__number_at(s.mean2, k);
    double var = lt__number_at(s.var, k), var2 = lt__number_at(s.var2, k);
    var = lt__merged_var(mean, var, mean2, var2, part);
    lt__put_number(s.var, k, false, (float)var);
    lt__put_number(s.mean, k, false, (float)lt__merged_mean(mean, mean2, part));
}

static lt_status batch_norm_merge_fwd(lt_call *c)
{
    double count = lt__number(c, 0), count2 = lt__number(c, 1);
    LT_TRY(lt__require_kernels(lt__cuda(c->ctx), c->in, 4));
    if (count2 == 0)
        return LT_OK;
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(c->in[0]->count, LT_THREADS), merge_kernel,
                      statistics_of(c), count2 / (count + count2));
}

/* One launch updates the running statistics of many layers. */
typedef struct layer {
    statistics s;
    double unbias, momentum;
} layer;
enum { LAYERS = 4000 / sizeof(layer) }; /* a kernel has at most 4096 bytes of parameters */
typedef struct layers {
    layer at[LAYERS];
} layers;

/* each: blocks per layer. */
static LT_KERNEL update_kernel(const __grid_constant__ layers all, unsigned each)
{
    const layer &l = all.at[blockIdx.x / each];
    const statistics &s = l.s;
    int64_t k;
    if (!find_channel(s, blockIdx.x % each, &k))
        return;
    double mean =
        lt__running_update(lt__number_at(s.mean, k), lt__number_at(s.mean2, k), l.momentum);
    double var = lt__running_update(lt__number_at(s.var, k), l.unbias * lt__number_at(s.var2, k),
                                    l.momentum);
    lt__put_number(s.mean, k, false, (float)mean);
    lt__put_number(s.var, k, false, (float)var);
}

static lt_status update_layers(lt_call *calls, int n)
{
    const lt_cuda *cuda = lt__cuda(calls->ctx);
    layers all = {};
    int64_t used = 0, each = 0;
    for (int i = 0; i < n; i++) {
        const lt_call *c = &calls[i];
        double count = lt__number(c, 0);
        if (count == 0)
            continue;
        all.at[used++] = layer{statistics_of(c), lt__unbias(count), lt__number(c, 1)};
        int64_t blocks = lt__ceil_div(c->in[0]->count, LT_THREADS);
        each = each > blocks ? each : blocks;
    }
    return lt__launch(cuda, used * each, update_kernel, all, (unsigned)each);
}

static lt_status batch_norm_update_all(lt_call *calls, int n)
{
    for (int i = 0; i < n; i++)
        LT_TRY(lt__require_kernels(lt__cuda(calls->ctx), calls[i].in, 4));
    for (int i = 0; i < n; i += LAYERS)
        LT_TRY(update_layers(calls + i, n - i < LAYERS ? n - i : (int)LAYERS));
    return LT_OK;
}

static lt_status batch_norm_update_fwd(lt_call *c) { return batch_norm_update_all(c, 1); }

void lt__cuda_batch_norm_stats(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_batch_norm_merge], NULL, batch_norm_merge_fwd, NULL);
    lt__set_kernels(&op[LT_OP_batch_norm_update], NULL, batch_norm_update_fwd, NULL);
    op[LT_OP_batch_norm_update].fwd_all = batch_norm_update_all;
}
