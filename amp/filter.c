/* filter.c - the bucket filter that carries the votes of votes.c; see amp.h. */
#include <stdio.h>

#include "amp/scale.h"
#include "core/tensor.h"

/* The tail of a bucket has the numbers of the vote if there is a loss scale, followed by the
 * numbers of the wire scale if buckets travel in f16. So its length shows whether a rank uses a
 * scaler. */

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
    trace(p, p->tail[LT_VOTE_NOT_FINITE] > 0 ? "not finite" : again ? "sent again" : "finite");
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
    if (s && lt_reducer_has_delay(r))
        return lt_fail(LT_EUSAGE,
                       "a delay cannot be combined with a loss scale, which decides about a step "
                       "before its gradients are summed; use bf16, or no delay");
    LT_TRY(lt_use_loss_scale(lt_reducer_ctx(r), s));
    LT_TRY(lt_reducer_set_filter(r, NULL));
    if (s)
        s->wires = wires;
    filter.tail += in_f16 ? LT_WIRE_SCALE_NUMBERS : 0;
    return lt_reducer_set_filter(r, s || in_f16 ? &filter : NULL);
}
