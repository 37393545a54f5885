/* ranks.c - what several ranks tell each other, so that they decide alike about a step; see amp.h.
 */
#include <math.h>

#include "amp/scale.h"

/* The numbers of a bucket: how many ranks have something in it that is not finite; then for each
 * exponent how many have it as their largest. They are those on its way in f16, whether it goes
 * that way or not. What is beyond the first or the last is told as this; in f16 it is nearer to
 * what can be told when the bucket is sent again. */
enum { NOT_FINITE, EXPONENTS };

_Static_assert(LT_SCALE_NUMBERS == EXPONENTS + LT_EXPONENT_HIGH - LT_EXPONENT_LOW + 1,
               "a number for each exponent");

enum {
    WIRE_TOP = 14,  /* the largest exponent of a sum below 2^15 */
    WIRE_LOW = 0,   /* 14 bits above the smallest normal number of f16 */
    WIRE_SPARE = 2, /* bits by which gradients may grow from one step to the next */
    WIRE_LEAST = -120, WIRE_MOST = 100 /* of f32, with bits to spare for shares */
};

lt_found lt_loss_scale_found(lt_loss_scale *s, lt_found found)
{
    found.largest = ldexp(found.largest, s->scaler.k);
    s->here |= found.not_finite > 0;
    return found;
}

void lt_loss_scale_tell(const lt_loss_scale *s, int bucket, double largest, int64_t not_finite,
                        float *numbers, int *wire)
{
    *wire = s->wire[bucket % LT_SCALE_WIRES];
    int exponent = lt__exponent_of(ldexp(largest, *wire - s->scaler.k));
    numbers[NOT_FINITE] = not_finite > 0;
    if (exponent != LT_NO_EXPONENT)
        numbers[EXPONENTS + exponent - LT_EXPONENT_LOW] = 1;
}

/* The largest exponent that some rank has told; LT_NO_EXPONENT: none has. */
static int largest_of(const float *numbers)
{
    int exponent = LT_EXPONENT_HIGH;
    while (exponent >= LT_EXPONENT_LOW && numbers[EXPONENTS + exponent - LT_EXPONENT_LOW] == 0)
        exponent--;
    return exponent < LT_EXPONENT_LOW ? LT_NO_EXPONENT : exponent;
}

static int wire_for(int true_exponent)
{
    int wire = WIRE_TOP - WIRE_SPARE - true_exponent;
    return wire < WIRE_LEAST ? WIRE_LEAST : wire > WIRE_MOST ? WIRE_MOST : wire;
}

void lt_loss_scale_listen(lt_loss_scale *s) { s->heard = (lt_found){0}; }

bool lt_loss_scale_hear(lt_loss_scale *s, int bucket, const float *numbers, bool in_f16)
{
    int exponent = largest_of(numbers), *wire = &s->wire[bucket % LT_SCALE_WIRES];
    s->heard.not_finite += (int64_t)numbers[NOT_FINITE];
    if (exponent == LT_NO_EXPONENT)
        return false;
    int true_exponent = exponent - *wire;
    int next = in_f16 ? wire_for(true_exponent) : *wire;
    bool again = (exponent > WIRE_TOP || exponent < WIRE_LOW) && next != *wire;
    if (!again)
        s->heard.largest = fmax(s->heard.largest, ldexp(1, true_exponent + s->scaler.k));
    if (in_f16 && bucket >= s->wires && bucket < LT_SCALE_WIRES)
        s->wires = bucket + 1;
    *wire = next;
    s->sent_again += again;
    return again;
}

int64_t lt_loss_scale_sent_again(const lt_loss_scale *s) { return s->sent_again; }

int lt_loss_scale_wires(lt_loss_scale *s, int **wire)
{
    *wire = s->wire;
    return s->wires;
}

void lt_loss_scale_set_wires(lt_loss_scale *s, int wires)
{
    s->wires = wires < LT_SCALE_WIRES ? wires : LT_SCALE_WIRES;
}

void lt_loss_scale_agree(lt_loss_scale *s)
{
    s->elsewhere = !s->here && s->heard.not_finite > 0;
    s->agreed = true;
}
