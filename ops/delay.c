/* delay.c - the update ops of asynchronous training: corrections of delayed gradients (DC-ASGD,
 * gap-aware) and steps with them (DDC-ASGD, ordered momentum). delay.h has the terms.
 *
 * As in update.c, each op is one in-place pass over flat arenas, term by term in the element type;
 * ddc_step computes two norms before it. State (ms, s, v) is zero before the first call.
 */
#include "ops/delay.h"

/* ==== dc_grad ================================================================================= */

static bool has_ms(const lt_call *c) { return c->n_in > LT_DC_MS && c->in[LT_DC_MS]; }

static lt_status dc_shape(lt_call *c)
{
    LT_TRY(lt__check_ranges(c, "+<.+"));
    if (lt__flag(c, DC_ADAPTIVE) && !has_ms(c))
        return lt_fail(LT_EINVAL, "tensor ms is missing; adaptive=true requires it");
    return lt__check_arenas(c, c->n_in);
}

#define DC_ARRAYS LT_ARRAY(g, LT_DC_G) LT_ARRAY(w, LT_DC_W) LT_ARRAY(backup, LT_DC_BACKUP)
LT_UPDATE(dc_plain, LT_DC_NUMBERS, LT_DC_STEP(g[i], w[i], backup[i]), DC_ARRAYS)
LT_UPDATE(dc_adaptive, LT_DC_ADAPTIVE_NUMBERS,
          LT_DC_ADAPTIVE_STEP(g[i], w[i], backup[i], ms[i], LT_SQRT),
          DC_ARRAYS LT_ARRAY(ms, LT_DC_MS))

static lt_status dc(lt_call *c) { return lt__flag(c, DC_ADAPTIVE) ? dc_adaptive(c) : dc_plain(c); }

const lt_op lt__op_dc_grad = {
    .sig = "dc_grad(g, w, backup, ms?; lam#, rho=0.95, adaptive=false, weight_decay=0.0)",
    .doc = "DC-ASGD (Zheng et al., 2017, arXiv 1609.08326), in place: d = g + weight_decay w; "
           "g += lam d^2 (w - backup); or with adaptive=true ms = rho ms + (1 - rho) d^2; g += "
           "lam / sqrt(ms + 1e-7) d^2 (w - backup).",
    .in_place = 1 << LT_DC_G | 1 << LT_DC_MS,
    .shape = dc_shape,
    .fwd = dc,
};

/* ==== gap_grad ================================================================================ */

static lt_status gap_shape(lt_call *c) { return lt__check_update(c, "+><+"); }

LT_UPDATE(gap, LT_GAP_NUMBERS, LT_GAP_STEP(g[i], w[i], backup[i], v[i], ms[i], LT_SQRT),
          LT_ARRAY(g, LT_GAP_G) LT_ARRAY(w, LT_GAP_W) LT_ARRAY(backup, LT_GAP_BACKUP)
              LT_ARRAY(v, LT_GAP_V) LT_ARRAY(ms, LT_GAP_MS))

const lt_op lt__op_gap_grad = {
    .sig = "gap_grad(g, w, backup, v, ms; lr#, correction#, rho=0.999, weight_decay=0.0)",
    .doc = "Gap-aware (Barkai et al., 2020, arXiv 1909.10802), in place: ms = rho ms "
           "+ (1 - rho) v^2; p = 1 + |w - backup| / (lr sqrt(ms / correction) + 1e-8); g = (g + "
           "weight_decay w) / p - weight_decay w. v is the momentum after the last step, or g. "
           "correction is 1 - rho^k in the k-th call.",
    .in_place = 1 << LT_GAP_G | 1 << LT_GAP_MS,
    .shape = gap_shape,
    .fwd = gap,
};

/* ==== ddc_step ================================================================================ */

typedef struct ddc_sums {
    double c, g; /* sums of squares of the compensation and of the gradient */
} ddc_sums;

static lt_status ddc_shape(lt_call *c)
{
    const lt_tensor *stats = c->in[LT_DDC_STATS];
    LT_TRY(lt__check_ranges(c, "+++11++<"));
    if (!lt__is_float((lt_dtype)stats->dtype) || stats->count != LT_DDC_N_STATS)
        return lt_fail(LT_EINVAL, "stats must be %d floats, but is %s", LT_DDC_N_STATS,
                       LT_TEXT(stats));
    return lt__check_arenas(c, LT_DDC_STATS);
}

/* A double for the limit, then one ddc_sums for each block. */
static size_t ddc_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    int64_t blocks = (c->in[LT_DDC_W]->count + LT_UPDATE_BLOCK - 1) / LT_UPDATE_BLOCK;
    return sizeof(double) + (size_t)blocks * sizeof(ddc_sums);
}

/* Adds the squares of element i to lane k. */
#define ADD_SQUARES(i, k)                                                                          \
    LT_DDC_COMPENSATION(w[i], g[i], s[i], backup[i], LT_SQRT)                                      \
    lane_c[k] += (double)compensation * (double)compensation;                                      \
    lane_g[k] += (double)scaled * (double)scaled;

#define DDC_ARRAYS                                                                                 \
    LT_ARRAY(w, LT_DDC_W)                                                                          \
    LT_ARRAY(g, LT_DDC_G) LT_ARRAY(s, LT_DDC_S) LT_ARRAY(backup, LT_DDC_BACKUP) LT_CLIP

/* The sums over elements [first, first + n). */
LT_SIMD static ddc_sums ddc_sum_block(const lt_call *c, int64_t first, int64_t n)
{
    enum { LANES = 16 }; /* partial sums, for vector instructions */
    double lane_c[LANES] = {0}, lane_g[LANES] = {0};
    ddc_sums sum = {0, 0};
    LT_FLOATS(c->in[LT_DDC_W]->dtype, T,
        int64_t i = 0;
        LT_DDC_COMPENSATION_NUMBERS(LT_DECLARE)
        DDC_ARRAYS
        for (; i + LANES <= n; i += LANES)
            for (int k = 0; k < LANES; k++) { ADD_SQUARES(i + k, k)
            }
        for (; i < n; i++) {
            ADD_SQUARES(i, i % LANES)
        }
    );
    for (int k = 0; k < LANES; k++) {
        sum.c += lane_c[k];
        sum.g += lane_g[k];
    }
    return sum;
}

/* Computes the norms and the limit, and updates stats. The sums of the blocks are added in order,
 * so the result does not depend on the number of threads. */
static double ddc_limit(const lt_call *c, ddc_sums *block)
{
    int64_t n = c->in[LT_DDC_W]->count;
    ddc_sums sum = {0, 0};
    LT_PARALLEL_FOR(c, n * c->n_in)
    for (int64_t i = 0; i < n; i += LT_UPDATE_BLOCK)
        block[i / LT_UPDATE_BLOCK] =
            ddc_sum_block(c, i, n - i < LT_UPDATE_BLOCK ? n - i : LT_UPDATE_BLOCK);
    for (int64_t i = 0; i * LT_UPDATE_BLOCK < n; i++) {
        sum.c += block[i].c;
        sum.g += block[i].g;
    }
    double norm_c = sqrt(sum.c), norm_g = sqrt(sum.g);
    double limit = lt__ddc_limit(norm_c, norm_g, lt__number(c, DDC_CAP));
    LT_FLOATS(c->in[LT_DDC_STATS]->dtype, T,
        T *stats = c->in[LT_DDC_STATS]->data;
        stats[0] = (T)((double)stats[0] + lt__ddc_ratio(norm_c, norm_g, limit));
        stats[1] += limit < 1;
        stats[2] += 1;
    );
    return limit;
}

#define DDC_NUMBERS(N) LT_DDC_NUMBERS(N) N(T, limit, *(const double *)c->scratch)
LT_UPDATE(update_by_limit, DDC_NUMBERS,
          LT_DDC_STEP(w[i], g[i], v[i], s[i], backup[i], limit, LT_SQRT),
          DDC_ARRAYS LT_ARRAY(v, LT_DDC_V))

static lt_status ddc(lt_call *c)
{
    double *limit = c->scratch;
    *limit = ddc_limit(c, (ddc_sums *)(limit + 1));
    return update_by_limit(c);
}

const lt_op lt__op_ddc_step = {
    .sig = "ddc_step(w, g, v, s, backup, stats; lr#, momentum=0.9, weight_decay=0.0, r#, q#, "
           "lam=20.0, cap=1.0, rho=0.95)",
    .doc = "DDC-ASGD, which limits the compensation of DC-ASGD (Zheng et al., 2017, arXiv "
           "1609.08326), for one parameter, in place: s = rho s + (1 - rho) g^2; c = lam g^2 "
           "(w - backup) / sqrt(s + 1e-7); f = min(1, cap |g| / (|c| + 1e-7)); d = q (g + f c + "
           "weight_decay w); w -= lr (momentum v + d); v = momentum v + r d. Adds f |c| / |g|, "
           "f < 1 and 1 to the three elements of stats.",
    .in_place = 1 << LT_DDC_W | 1 << LT_DDC_V | 1 << LT_DDC_S | 1 << LT_DDC_STATS,
    .whole_params = true,
    .shape = ddc_shape,
    .scratch = ddc_scratch,
    .fwd = ddc,
};

/* ==== ordered_step ============================================================================ */

static lt_status ordered_shape(lt_call *c) { return lt__check_update(c, "+<+n"); }

LT_UPDATE(ordered, LT_ORDERED_NUMBERS, LT_ORDERED_STEP(w[i], g[i], v[i]),
          LT_ARRAY(w, LT_UPDATE_W) LT_ARRAY(g, LT_UPDATE_G) LT_ARRAY(v, LT_UPDATE_SLOT) LT_CLIP)

const lt_op lt__op_ordered_step = {
    .sig = "ordered_step(w, g, v; lr#, momentum=0.9, weight_decay=0.0, late, opens=false)",
    .doc = "Ordered Momentum (Shi et al., 2024, arXiv 2407.19234), in place, for a gradient of the "
           "momentum bucket that is `late` before the open one: d = g + weight_decay w; with "
           "opens=true, which opens a bucket, v *= momentum and w -= lr v; then w -= lr (1 - "
           "momentum^(late + 1)) / (1 - momentum) d; v += momentum^late d.",
    .in_place = 1 << LT_UPDATE_W | 1 << LT_UPDATE_SLOT,
    .shape = ordered_shape,
    .fwd = ordered,
};
