/* plan.h - predicts how long a step of a pipeline takes, and finds the fastest pipeline for a net.
 * Included by dist.h.
 *
 * A net says how long each of its units computes, and which values it needs from earlier units. A
 * job says what a step does, and on how many ranks. A plan divides the net into stages. Its step is
 * simulated by the code that orders the passes of real pipelines. Nothing here runs a net or sends
 * a message, so the numbers may come from a run or from a file.
 *
 * The prediction assumes that messages and the gradient exchange do not slow down computing or each
 * other, that replicas do not slow down each other, that all stages begin a step at the same time,
 * and that all ranks compute equally fast.
 */
#ifndef LUATRAIN_DIST_PLAN_H
#define LUATRAIN_DIST_PLAN_H

#include "dist/pipeline.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Nets ==================================================================================== */

enum { LT_PIPE_SIZES = 3 };

typedef struct lt_pipe_net_unit { /* see lt_profile_unit */
    bool may_begin_stage;         /* of unit 0, it does not matter */
    /* Seconds of the forward pass and of the two halves of the backward pass, as in
     * lt_backward_from(), for a micro-batch of each measured size */
    double forward[LT_PIPE_SIZES], inputs[LT_PIPE_SIZES], weights[LT_PIPE_SIZES];
    double update;      /* seconds of the optimizer step */
    double grad_bytes;  /* of the gradients, in f32, that the replicas exchange */
    double state_bytes; /* of parameters, buffers, gradients and the optimizer's slots */
    double saved_bytes; /* per image, from the forward pass until the backward pass is done */
    double back_bytes;  /* per image, of the gradients that its largest op reads and writes */
    double work_bytes;  /* of memory that a stage needs once, for the largest of its units, while it
                         * adds up the gradients of several micro-batches */
} lt_pipe_net_unit;

typedef struct lt_pipe_net_value { /* see lt_profile_value */
    int unit;                      /* that makes it */
    const int *uses;               /* (n) later units that use it, ascending */
    int n;
    double bytes; /* per image */
    bool tracked; /* the stages that use it return a gradient of the same size */
} lt_pipe_net_value;

typedef struct lt_pipe_net { /* arrays are borrowed for the call */
    int n_sizes;
    double sizes[LT_PIPE_SIZES];   /* (n_sizes) images of the measured micro-batches */
    const lt_pipe_net_unit *units; /* (n_units) in the order of the forward pass */
    int n_units;
    const lt_pipe_net_value *values; /* (n_values) */
    int n_values;
} lt_pipe_net;

/* The seconds of a pass for any micro-batch are at_zero + per_image * images. The line is fitted to
 * the measured seconds (n) by least squares, with neither number negative. With a single size,
 * at_zero is 0. */
typedef struct lt_pipe_line {
    double at_zero, per_image;
} lt_pipe_line;
LT_API lt_pipe_line lt_pipe_fit(const double *sizes, const double *seconds, int n);

/* ==== Jobs ==================================================================================== */

enum {
    LT_PIPE_ANY = -1,         /* the planner chooses */
    LT_PIPE_LAGS = 5,         /* it tries lags from 0 to 4 */
    LT_PIPE_MICRO = 64,       /* the default of most_micro */
    LT_PIPE_MOST_MICRO = 1024 /* more micro-batches are refused */
};

typedef struct lt_pipe_link { /* between two ranks, in each direction */
    double latency, bytes_per_s;
} lt_pipe_link;

typedef struct lt_pipe_job { /* zero means default, except for the last five numbers */
    int ranks;               /* every plan uses all of them. Required */
    int64_t batch;           /* images of a step, of all replicas. Required */
    lt_pipe_link link;       /* of messages. A rank sends one after the other. Required */
    /* Of the gradient exchange. Required. A sum of b bytes over G replicas takes
     * (2 G - 1) latency + 2 (G - 1) / G b / bytes_per_s. This is a ring, whose ranks first compare
     * what they sum. For shared memory, measure bytes_per_s as 2 (G - 1) / G b / seconds */
    lt_pipe_link exchange;
    int wire_bytes;  /* of an element in the exchange: 2 or 4, the default */
    double memory;   /* bytes of each rank; 0: no limit */
    int least_micro; /* least number of images in a micro-batch; default 1. A plan of one stage and
                      * one micro-batch may have fewer */
    int most_micro;  /* largest number of micro-batches; default LT_PIPE_MICRO */
    /* What every plan must have; LT_PIPE_ANY: the planner chooses. If micro is given, least_micro
     * and most_micro are ignored. Plans of one stage ignore kind and lag, and LT_GPIPE ignores
     * lag */
    int stages, replicas, micro, lag, kind;
} lt_pipe_job;

/* ==== Plans =================================================================================== */

typedef struct lt_pipe_plan_stage {
    int first; /* its first unit. A stage without units has the first unit of the next stage, or
                * the number of units if none follows */
    /* Predicted, for one of its ranks: */
    double busy;    /* seconds of passes and of the optimizer step */
    double idle;    /* share of the step that is not busy */
    double exposed; /* seconds that the gradient exchange takes after the last pass */
    double peak_bytes;
    double sent_bytes;      /* of messages, in a step */
    double exchanged_bytes; /* that it sends in the gradient exchange of a step */
    int in_memory;          /* largest number of micro-batches */
} lt_pipe_plan_stage;

typedef struct lt_pipe_plan {
    int stages, replicas; /* the number of ranks is their product */
    int micro; /* micro-batches of each replica. All have the same number of images, which may be
                * fractional */
    int lag;
    lt_schedule_kind kind;     /* with one stage, LT_1F1B without lag, which does not matter */
    double seconds;            /* predicted, of a step */
    lt_pipe_plan_stage *stage; /* (stages) */
} lt_pipe_plan;

typedef struct lt_pipe_plans {
    lt_pipe_plan *plan; /* (n) the fastest one first */
    int n;
} lt_pipe_plans;

/* Predicts a step of a plan. The caller sets stages, replicas, micro, lag, kind and the first unit
 * of each stage; the function sets the rest. The limits and choices of the job are ignored.
 * LT_EINVAL if a number is out of range; LT_ENOMEM. */
LT_MUST lt_status lt_pipe_plan_predict(const lt_pipe_net *net, const lt_pipe_job *job,
                                       lt_pipe_plan *plan);

/* Finds a plan for each number of stages, replicas and micro-batches, each kind and each lag that
 * the job allows. Free them with lt_pipe_plans_free(). If several numbers of micro-batches give the
 * same size, rounded up, only the smallest is tried. Plans of equal speed are sorted by their
 * memory.
 *
 * A plan's division is the fastest of all if there are at most 1,000 possible ones: 2 stages of
 * 1,000 units, or 3 of 45. Otherwise, the search begins with the division whose slowest stage or
 * link is fastest, and moves borders as long as the simulated step gets faster. If the ranks have
 * little memory, it may then find no division although one exists. For the fastest 32 plans, it
 * tries all divisions up to 20,000, or more moves. With 200 units and 8 ranks, this takes less than
 * a second.
 *
 * LT_EINVAL if a number is out of range, if the job allows no plan, or if none is found that fits
 * into the memory of the ranks; LT_ENOMEM. */
LT_MUST lt_status lt_pipe_plans_find(const lt_pipe_net *net, const lt_pipe_job *job,
                                     lt_pipe_plans *plans);
LT_API void lt_pipe_plans_free(lt_pipe_plans *plans);

#ifdef __cplusplus
}
#endif
#endif
