/* scaler.c - how the loss scale changes. */
#include <math.h>

#include "amp/amp.h"

enum {
    TOP = 15,         /* exponent of the largest f16 number */
    MIN_HEADROOM = 2, /* bits of headroom that an adaptive scale needs to grow */
    AMPLE_HEADROOM = 10,
    EARLY_INTERVAL =
        10, /* with AMPLE_HEADROOM bits of headroom it grows after EARLY_INTERVAL steps */
    MAX_HEADROOM = TOP + 25, /* headroom of gradients that are all zero, hence below 2^-24 */
    MIN_INTERVAL = 20,
    MAX_INTERVAL = 2000 /* the shortest and longest interval */
};
/* The first three are constants of LogMax. */
static const double MEAN_DECAY = 0.99, VARIANCE_DECAY = 0.999, QUANTILE = 3.09,
                    MAX_WEIGHT =
                        0.01, /* maximum weight of a step in the variance, from the first step on */
    MAX_VARIANCE = 1e9;       /* limit for valid states; exponents are above -10000 */

static int min(int a, int b) { return a < b ? a : b; }

static int within(int k) { return k < LT_SCALE_MIN ? LT_SCALE_MIN : min(k, LT_SCALE_MAX); }

lt_scaler lt_scaler_init(lt_scale_policy policy, int k, int interval)
{
    return (lt_scaler){.policy = policy,
                       .k = within(k),
                       .interval = policy == LT_SCALE_ADAPTIVE ? MIN_INTERVAL
                                   : interval > 0              ? interval
                                                               : MAX_INTERVAL,
                       .since = MAX_INTERVAL,
                       .old_mean = 1,
                       .old_variance = 1};
}

lt_status lt_scaler_check(const lt_scaler *s)
{
    const char *what = s->policy > LT_SCALE_STATIC ? "policy"
                       : s->k != within(s->k)      ? "k"
                       : s->interval < 1 ||
                               (s->policy == LT_SCALE_ADAPTIVE && s->interval > MAX_INTERVAL)
                           ? "interval"
                       : s->good < 0 || s->good > s->interval                          ? "good"
                       : s->headroom < LT_NO_EXPONENT || s->headroom > -LT_NO_EXPONENT ? "headroom"
                       : s->since < 0 || s->since > MAX_INTERVAL                       ? "since"
                       : s->at_floor < 0 || s->at_floor > s->in_a_row                  ? "at_floor"
                       : s->in_a_row < 0 || s->in_a_row > s->skipped                   ? "in_a_row"
                       : s->skipped > s->steps                                         ? "skipped"
                       : s->steps > (int64_t)1 << 53                                   ? "steps"
                       : !(fabs(s->mean) <= -LT_NO_EXPONENT)                           ? "mean"
                       : !(s->variance >= 0 && s->variance <= MAX_VARIANCE)            ? "variance"
                       : !(s->old_mean >= 0 && s->old_mean <= 1)                       ? "old_mean"
                       : !(s->old_variance >= 0 && s->old_variance <= 1) ? "old_variance"
                                                                         : NULL;
    return what ? lt_fail(LT_EINVAL, "'%s' of a scaler is out of range", what) : LT_OK;
}

/* ==== Predicting overflows ==================================================================== */

/* The weight of a new value in a moving average with this decay, with bias correction: the first
 * value has weight 1, and the average of equal values is exactly their value. */
static double weight(double *old, double decay)
{
    *old *= decay;
    return (1 - decay) / (1 - *old);
}

/* Updates the averages for a step whose unscaled gradients were below 2^x. */
static void update_averages(lt_scaler *s, double x)
{
    double above = s->old_mean < 1 && x > s->mean ? x - s->mean : 0;
    double share = fmin(weight(&s->old_variance, VARIANCE_DECAY), MAX_WEIGHT);
    s->variance += share * (2 * above * above - s->variance);
    s->mean += weight(&s->old_mean, MEAN_DECAY) * (x - s->mean);
}

/* The largest k that will probably keep the next gradients below 2^16. */
static int highest_safe_k(const lt_scaler *s)
{
    if (s->old_mean == 1)
        return LT_SCALE_MAX;
    double x = s->mean + QUANTILE * sqrt(s->variance);
    return x > TOP + 1 - LT_SCALE_MIN ? LT_SCALE_MIN
           : x < -LT_SCALE_MAX        ? LT_SCALE_MAX
                                      : within((int)floor(TOP + 1 - x));
}

/* ==== Steps =================================================================================== */

/* How much an overflow lowers k. */
static int excess(const lt_scaler *s, int exponent)
{
    int64_t doubled = s->in_a_row > 6 ? 64 : 1 << (s->in_a_row - 1);
    return s->policy == LT_SCALE_DYNAMIC ? 1
           : exponent - TOP > doubled    ? exponent - TOP
                                         : (int)doubled;
}

static void shrink(lt_scaler *s, int exponent)
{
    if (s->policy == LT_SCALE_ADAPTIVE) {
        /* A gradient reached 2^16 or more. It counts as below 2^17, or as below the power of two
         * above the largest finite gradient if that is higher. (LogMax takes the number 2^16 as
         * the exponent.) Further overflows in a row come from the same gradients and are not a
         * sign of growth. */
        if (s->in_a_row == 1)
            update_averages(s, (exponent > TOP ? exponent + 1 : TOP + 2) - s->k);
        s->interval = s->since >= s->interval ? MIN_INTERVAL : min(2 * s->interval, MAX_INTERVAL);
    }
    s->k = within(s->k - excess(s, exponent));
    s->good = 0;
}

static void grow(lt_scaler *s, int by)
{
    s->good = 0;
    s->k = within(s->k + by);
    s->since = 0;
}

static void advance_dynamic(lt_scaler *s)
{
    s->good = min(s->good + 1, s->interval);
    if (s->good == s->interval)
        grow(s, 1);
}

/* Growing into the last bits of headroom may be a mistake, so the scale must then wait longer
 * before it grows again. */
static void advance_adaptive(lt_scaler *s, int exponent)
{
    int e = exponent == LT_NO_EXPONENT ? TOP - MAX_HEADROOM : exponent, headroom = TOP - e;
    update_averages(s, e + 1 - s->k);
    s->headroom = s->good == 0 ? headroom : min(s->headroom, headroom);
    s->good = headroom < MIN_HEADROOM ? 0 : min(s->good + 1, s->interval);
    bool is_soon = s->good % EARLY_INTERVAL == 0 && s->headroom >= AMPLE_HEADROOM;
    int half = (s->headroom - MIN_HEADROOM) / 2,
        by = min(half > 0 ? half : 1, highest_safe_k(s) - s->k);
    if (s->good == 0 || by <= 0 || (s->good < s->interval && !is_soon))
        return;
    if (half == 0)
        s->interval = min(2 * s->interval, MAX_INTERVAL);
    grow(s, by);
}

bool lt_scaler_update(lt_scaler *s, int exponent, bool finite)
{
    bool lowest = s->policy == LT_SCALE_STATIC || s->k == LT_SCALE_MIN;
    s->steps++;
    s->skipped += !finite;
    s->in_a_row = finite ? 0 : s->in_a_row + 1;
    s->at_floor = finite ? 0 : s->at_floor + lowest;
    if (s->policy == LT_SCALE_STATIC)
        return finite;
    s->since = min(s->since + 1, MAX_INTERVAL);
    if (!finite)
        shrink(s, exponent);
    else if (s->policy == LT_SCALE_ADAPTIVE)
        advance_adaptive(s, exponent);
    else
        advance_dynamic(s);
    if (s->policy == LT_SCALE_ADAPTIVE)
        s->k = min(s->k, highest_safe_k(s));
    return finite;
}
