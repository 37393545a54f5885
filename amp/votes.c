/* votes.c - the numbers by which ranks make the same decision about a step, and about the wire
 * scale of each bucket in f16; see amp.h.
 */
#include <math.h>

#include "amp/scale.h"

int lt__exponent_of(double magnitude)
{
    if (magnitude == 0)
        return LT_NO_EXPONENT;
    int exponent = ilogb(magnitude);
    return exponent < LT_EXPONENT_LOW    ? LT_EXPONENT_LOW
           : exponent > LT_EXPONENT_HIGH ? LT_EXPONENT_HIGH
                                         : exponent;
}

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
enum { NOT_FINITE = LT_VOTE_NOT_FINITE, EXPONENTS };

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
    for (int i = 0; i < LT_WIRE_SCALE_COUNT; i++)
        w.exponent[i] = FIRST;
    return w;
}

int lt__wire_scales_pack(const lt_wire_scales *w, int bucket, double largest, float *numbers)
{
    int exponent = w->exponent[bucket % LT_WIRE_SCALE_COUNT];
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
    int packed = largest_packed(numbers), *exponent = &w->exponent[bucket % LT_WIRE_SCALE_COUNT];
    if (packed == LT_NO_EXPONENT)
        return false;
    int next = exponent_for(packed - *exponent);
    bool again = (packed > TOP || packed < LOW) && next != *exponent;
    if (bucket >= w->used && bucket < LT_WIRE_SCALE_COUNT)
        w->used = bucket + 1;
    *exponent = next;
    w->resends += again;
    return again;
}
