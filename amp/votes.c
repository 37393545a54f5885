/* votes.c - the bucket filter by which ranks make the same decision about a step, and about the
 * wire scale of each bucket in f16; see amp.h.
 */
#include <math.h>
#include <stdio.h>

#include "amp/scale.h"
#include "core/tensor.h"

/* A vote has one number per exponent: how many ranks have it as their largest. Exponents out of
 * range count as the first or the last one. */

static void pack_exponent(double magnitude, float *numbers)
{
    int exponent = lt__exponent_of(magnitude);
    if (exponent != LT_NO_EXPONENT)
        numbers[exponent - LT_EXPONENT_LOW] = 1;
}

/* LT_NO_EXPONENT if no rank has an exponent. */
static int largest_packed(const float *numbers)
{
    int i = LT_EXPONENTS - 1;
    while (i >= 0 && numbers[i] == 0)
        i--;
    return i < 0 ? LT_NO_EXPONENT : i + LT_EXPONENT_LOW;
}

/* ==== The step ================================================================================ */

/* The numbers of a vote: how many ranks have a gradient that is not finite; then the exponents of
 * the largest finite gradients, scaled. */
enum { NOT_FINITE, EXPONENTS };

void lt__vote_pack(lt_loss_scale *s, const lt_grad_stats *stats, float *numbers)
{
    s->found_inf_here |= stats->not_finite > 0;
    numbers[NOT_FINITE] = stats->not_finite > 0;
    pack_exponent(ldexp(stats->largest, s->scaler.k), numbers + EXPONENTS);
}

void lt__vote_start(lt_loss_scale *s)
{
    s->reduced = (lt_grad_stats){0};
    s->found_inf_here = false;
    s->is_reduced = true;
}

void lt__vote_unpack(lt_loss_scale *s, const float *numbers)
{
    int exponent = largest_packed(numbers + EXPONENTS);
    s->reduced.not_finite += (int64_t)numbers[NOT_FINITE];
    if (exponent != LT_NO_EXPONENT)
        s->reduced.largest = fmax(s->reduced.largest, ldexp(1, exponent));
}

/* ==== Wire scales ============================================================================= */

enum {
    FIRST = 24, /* initial wire scale; if it is too high, the first step sends the bucket twice */
    TOP = 14,   /* the largest exponent of a sum that stays below 2^15 */
    LOW = 0,    /* 14 bits above the smallest normal f16 number */
    MIN_HEADROOM = 2 /* bits by which gradients may grow from one step to the next */
};

lt_wire_scales lt_wire_scales_init(void)
{
    lt_wire_scales w = {.used = 0};
    for (int i = 0; i < LT_WIRE_SCALES; i++)
        w.exponent[i] = FIRST;
    return w;
}

int lt__wire_scales_pack(const lt_wire_scales *w, int bucket, double largest, float *numbers)
{
    int exponent = w->exponent[bucket % LT_WIRE_SCALES];
    pack_exponent(ldexp(largest, exponent), numbers);
    return exponent;
}

static int exponent_for(int true_exponent)
{
    int exponent = TOP - MIN_HEADROOM - true_exponent;
    return exponent < LT_WIRE_SCALE_MIN   ? LT_WIRE_SCALE_MIN
           : exponent > LT_WIRE_SCALE_MAX ? LT_WIRE_SCALE_MAX
                                          : exponent;
}

/* If the largest exponent is outside the range of a vote, each resend brings it closer to that
 * range. */
bool lt__wire_scales_unpack(lt_wire_scales *w, int bucket, const float *numbers)
{
    int packed = largest_packed(numbers), *exponent = &w->exponent[bucket % LT_WIRE_SCALES];
    if (packed == LT_NO_EXPONENT)
        return false;
    int next = exponent_for(packed - *exponent);
    bool again = (packed > TOP || packed < LOW) && next != *exponent;
    if (bucket >= w->used && bucket < LT_WIRE_SCALES)
        w->used = bucket + 1;
    *exponent = next;
    w->resends += again;
    return again;
}

/* ==== The bucket filter ======================================================================= */

/* The tail of a bucket has the numbers of the vote if there is a loss scale, and then those of the
 * wire scale if buckets travel in f16. Its length depends on both, so a rank without a scaler is
 * never mistaken for one that has one. */

static lt_grad_stats measure_complete(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x;
    (void)grad;
    return lt__loss_scale_last(ud);
}

static lt_grad_stats measure(void *ud, const lt_tensor *grad)
{
    (void)ud;
    return lt_grad_stats_of(grad);
}

static void trace(const lt_packet *p, const char *what)
{
    char text[64];
    snprintf(text, sizeof text, "bucket %d is %s", p->bucket, what);
    lt_trace(p->ctx, LT_TRACK_COMM, text, lt__seconds(), 0);
}

static void start(void *ud) { lt__vote_start(ud); }

static void pack(void *ud, lt_packet *p)
{
    lt_loss_scale *s = ud;
    lt__vote_pack(s, &p->stats, p->tail);
    if (p->in_f16)
        p->exponent =
            lt__wire_scales_pack(s->wires, p->bucket, p->largest, p->tail + LT_VOTE_NUMBERS);
}

static bool unpack(void *ud, const lt_packet *p)
{
    lt_loss_scale *s = ud;
    lt__vote_unpack(s, p->tail);
    bool again = p->in_f16 &&
                 lt__wire_scales_unpack(s->wires, p->bucket, p->tail + LT_VOTE_NUMBERS);
    trace(p, p->tail[NOT_FINITE] > 0 ? "not finite" : again ? "sent again" : "finite");
    return again;
}

static void pack_without_vote(void *ud, lt_packet *p)
{
    if (p->in_f16)
        p->exponent = lt__wire_scales_pack(ud, p->bucket, p->largest, p->tail);
}

static bool unpack_without_vote(void *ud, const lt_packet *p)
{
    bool again = p->in_f16 && lt__wire_scales_unpack(ud, p->bucket, p->tail);
    trace(p, again ? "sent again" : "finite");
    return again;
}

/* The order of the calls ensures that the group's thread does not use a scale or wires that the
 * caller frees next. */
lt_status lt_reducer_use_loss_scale(lt_reducer *r, lt_loss_scale *s, lt_wire_scales *wires)
{
    const lt_bucket_filter vote = {s,    LT_VOTE_NUMBERS, measure_complete, measure, start,
                                   pack, unpack},
                           without_vote = {.ud = wires,
                                           .measure_late = measure,
                                           .pack = pack_without_vote,
                                           .unpack = unpack_without_vote};
    bool in_f16 = lt_reducer_wire(r) == LT_F16;
    lt_bucket_filter filter = s ? vote : without_vote;
    if (in_f16 && !wires)
        return lt_fail(LT_EINVAL, "the reducer sends gradients in f16, which requires wire scales");
    LT_TRY(lt_use_loss_scale(lt_reducer_ctx(r), s));
    LT_TRY(lt_reducer_set_filter(r, NULL));
    if (s)
        s->wires = wires;
    filter.tail += in_f16 ? LT_WIRE_SCALE_NUMBERS : 0;
    return lt_reducer_set_filter(r, s || in_f16 ? &filter : NULL);
}
