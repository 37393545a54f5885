/* schedule.c - the order of the passes of a pipeline stage; see schedule.h. */
#include "core/tensor.h"
#include "dist/pipeline/schedule.h"

int lt__schedule_in_flight(const lt_schedule *s, int micro)
{
    return s->kind == LT_GPIPE ? micro : LT_MIN(s->stages - s->stage + s->lag, micro);
}

int lt__schedule_in_memory(const lt_schedule *s, int micro)
{
    int flight = lt__schedule_in_flight(s, micro);
    return s->kind == LT_ZERO_BUBBLE ? LT_MIN(flight + s->lag, micro) : flight;
}

lt_action lt__schedule_next(const lt_schedule *s, const lt_stage_state *state)
{
    bool split = s->kind == LT_ZERO_BUBBLE;
    bool weights = split && state->weights < state->backward; /* a pass for weights is possible */
    int flight = state->forward - state->backward;
    bool forward_due = state->forward < state->micro &&
                       flight < lt__schedule_in_flight(s, state->micro);
    if (!forward_due && flight > 0)
        return state->grads > state->backward ? LT_BACKWARD : weights ? LT_WEIGHTS : LT_WAIT;
    if (!forward_due)
        return weights ? LT_WEIGHTS : LT_DONE;
    if (weights && state->forward - state->weights >= lt__schedule_in_memory(s, state->micro))
        return LT_WEIGHTS; /* frees memory for the forward pass */
    return state->inputs > state->forward ? LT_FORWARD : weights ? LT_WEIGHTS : LT_WAIT;
}

const char *lt_schedule_name(lt_schedule_kind kind)
{
    static const char *const names[] = {
        [LT_GPIPE] = "gpipe", [LT_1F1B] = "1f1b", [LT_ZERO_BUBBLE] = "zb"};
    return names[kind];
}
