/* plan.h - predicts how long a step of a pipeline takes, and finds the fastest pipeline for a net.
 * Included by dist.h.
 *
 * An lt_pipe_net describes the units of a net: their times, and the values that they need from
 * earlier units. A profile measures these. A job describes a step and the ranks. A plan divides the
 * net into stages. The prediction simulates a step of the plan, with the code that orders the
 * passes of real pipelines. Planning runs no op and sends no message.
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

/* A unit: a section of a net that is not divided between stages. It begins with an op that is the
 * first to use some parameter, and ends where the next unit begins. Ops without parameters belong
 * to the latest unit that has made or used one of their inputs. */
typedef struct lt_pipe_unit {
    /* Whether a stage may begin with this unit; ignored for unit 0. False if an op of this unit or
     * a later one uses a parameter of an earlier unit, or if an op of an earlier unit uses a value
     * that this unit or a later one has already used. */
    bool may_begin_stage;
    /* Seconds of the forward pass and of the two halves of the backward pass, as in
     * lt_backward_from(), for a micro-batch of each measured size */
    double forward[LT_PIPE_SIZES], inputs[LT_PIPE_SIZES], weights[LT_PIPE_SIZES];
    double update;      /* seconds of the optimizer step */
    double grad_bytes;  /* bytes of gradients, in f32, that the replicas exchange */
    double state_bytes; /* bytes of parameters, buffers, gradients and the optimizer's slots */
    double saved_bytes; /* bytes per image of results, and of data that the backward pass reads */
    double back_bytes;  /* bytes per image of gradients that its largest op reads and writes */
    double work_bytes;  /* working memory to sum the gradients of several micro-batches. The units
                         * of a stage use the same memory, so only the largest size counts */
    char *name;         /* name of its first parameter */
} lt_pipe_unit;

typedef struct lt_pipe_value { /* a result of an op */
    int unit;                  /* the unit that computes it */
    int *uses;                 /* (n) later units that use it, ascending */
    int n;
    double bytes;       /* bytes per image */
    bool requires_grad; /* the stages that use it return a gradient of the same size */
} lt_pipe_value;

enum { LT_PIPE_UNUSED = -1 };
typedef struct lt_pipe_param { /* a parameter or buffer */
    char *name;
    int unit; /* the first unit that uses it, or LT_PIPE_UNUSED */
} lt_pipe_param;

/* The description of a net, from lt_profile_take_net(). The planner does not check its numbers. */
typedef struct lt_pipe_net {
    int n_sizes;
    double sizes[LT_PIPE_SIZES]; /* (n_sizes) numbers of images in the measured micro-batches */
    lt_pipe_unit *units;         /* (n_units) in the order of the forward pass */
    int n_units;
    lt_pipe_value *values; /* (n_values) the values that later units use */
    int n_values;
    lt_pipe_param *params; /* (n_params) in the order of their placement */
    int n_params;
    bool has_batch_norm;
} lt_pipe_net;

/* Frees the contents of a net of lt_profile_take_net(). */
LT_API void lt_pipe_net_free(lt_pipe_net *net);

/* ==== Profiles ================================================================================ */

/* A profile finds the units of a net and, unless it is dry, their times. */
typedef struct lt_profile lt_profile;

/* Starts a profile of the program that runs in ctx next. With passes = 0 the profile is dry: no op
 * of the net runs, parameters have no memory, and nothing is timed. Otherwise the first pass is not
 * timed, and the next `passes` are. lt_backward() fails with LT_EDONE when the profile is complete.
 * Call this before parameters are placed. ctx is kept. New. NULL with LT_EINVAL if passes is
 * negative, if ctx has a pipeline or a profile, in backward or in a dry run; LT_ENOMEM. */
LT_API lt_profile *lt_profile_new(lt_ctx *ctx, int passes);
LT_API void lt_profile_free(lt_profile *profile); /* NULL is allowed */
LT_API bool lt_profile_is_complete(const lt_profile *profile);
/* The units and parameters so far. Borrowed until the next pass. */
LT_API const lt_pipe_net *lt_profile_net(const lt_profile *profile);
/* The first unit that uses a parameter or buffer. LT_PIPE_UNUSED if no unit uses it, or if it is
 * not part of the net. */
LT_API int lt_profile_unit_of(const lt_profile *profile, const lt_tensor *x);
/* Replaces the name of a unit. name is copied. LT_EINVAL if there is no such unit; LT_ENOMEM. */
LT_MUST lt_status lt_profile_rename(lt_profile *profile, int unit, const char *name);
/* Moves the net of a complete profile to *net. The net has no sizes and times yet, and its
 * state_bytes do not include the optimizer's slots. images: number of images in the program's
 * batch. Free the net with lt_pipe_net_free(). LT_ENOMEM. */
LT_MUST lt_status lt_profile_take_net(lt_profile *profile, double images, lt_pipe_net *net);
/* Adds a size to the net, with the times of a complete profile that is not dry, averaged over its
 * passes. A pass takes longer than its ops, so the times of the ops are scaled to add up to the
 * time of the pass. images: number of images in the program's batch. LT_EINVAL if the profile and
 * the net have different numbers of units, or if the net has LT_PIPE_SIZES sizes. */
LT_MUST lt_status lt_profile_add_times(const lt_profile *profile, double images, lt_pipe_net *net);

/* ==== Times =================================================================================== */

/* A pass for a micro-batch of any size takes at_zero + per_image * images seconds. The line is
 * fitted to the measured seconds (n) by least squares, and neither number is negative. With a
 * single size, at_zero is 0. */
typedef struct lt_pipe_line {
    double at_zero, per_image;
} lt_pipe_line;
LT_API lt_pipe_line lt_pipe_fit(const double *sizes, const double *seconds, int n);

/* ==== Jobs ==================================================================================== */

enum {
    LT_PIPE_ANY = -1,         /* the planner chooses */
    LT_PIPE_LAGS = 5,         /* the planner tries lags from 0 to 4; see lt_pipe_plans_find() */
    LT_PIPE_MICRO = 64,       /* the default of most_micro */
    LT_PIPE_MOST_MICRO = 1024 /* more micro-batches are refused */
};

typedef struct lt_pipe_link {    /* each direction of a link between two ranks */
    double latency, bytes_per_s; /* latency in seconds */
} lt_pipe_link;

typedef struct lt_pipe_job {
    int ranks;         /* number of ranks; every plan uses all of them. Required */
    int64_t batch;     /* images in a step, over all replicas. Required */
    lt_pipe_link link; /* carries messages. A rank sends one message at a time. Required */
    /* Carries the gradient exchange. Required. A sum of b bytes over G replicas takes
     * (2 G - 1) latency + 2 (G - 1) / G b / bytes_per_s seconds: the replicas form a ring, and
     * first compare descriptions of the sum. For shared memory, measure bytes_per_s as
     * 2 (G - 1) / G b / seconds */
    lt_pipe_link exchange;
    int wire_bytes;  /* bytes of an element in the exchange, 2 or 4; 0 means 4 */
    bool delay;      /* a step applies the sums of the step before: lt_reducer_config.delay */
    double memory;   /* memory of each rank in bytes; 0 means no limit */
    int least_micro; /* smallest number of images in a micro-batch; 0 means 1. Plans of one stage
                      * may have fewer */
    int most_micro;  /* largest number of micro-batches; 0 means LT_PIPE_MICRO */
    /* Values that every plan must have. LT_PIPE_ANY lets the planner choose a value; 0 does not. If
     * micro is given, least_micro and most_micro are ignored. Otherwise, plans of one stage have
     * one micro-batch. kind and lag are ignored for plans of one stage, and lag also for
     * LT_GPIPE */
    int stages, replicas, micro, lag, kind;
} lt_pipe_job;

/* ==== Plans =================================================================================== */

typedef struct lt_pipe_plan_stage {
    const char *name; /* name of the first unit, or NULL; borrowed from the net */
    int first; /* first unit. For a stage without units: the next unit, or the number of units if
                * there is no next unit */
    /* Predictions for one rank of the stage: */
    double busy;     /* seconds of passes and of the optimizer step */
    double idle;     /* fraction of the step in which the rank is not busy */
    double exchange; /* seconds of the gradient exchange if nothing overlaps with it */
    double exposed;  /* seconds that the rank waits for the gradient exchange */
    double peak_bytes;
    double sent_bytes;      /* bytes of the messages that it sends in a step */
    double exchanged_bytes; /* bytes that it sends in the gradient exchange of a step */
    int in_memory;          /* largest number of micro-batches in memory */
} lt_pipe_plan_stage;

typedef struct lt_pipe_plan {
    int stages, replicas; /* the number of ranks is their product */
    int micro; /* micro-batches of each replica. All have the same number of images, which may be
                * fractional */
    int lag;
    lt_schedule_kind kind;     /* with one stage: LT_1F1B, lag 0 */
    double seconds;            /* predicted time of a step */
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
 * the job allows. Free the plans with lt_pipe_plans_free(). If several numbers of micro-batches
 * give the same size, rounded up, only the smallest is tried. Plans of equal speed are sorted by
 * their memory.
 *
 * Lags are less than the number of micro-batches. With LT_ZERO_BUBBLE and replicas, the planner
 * also tries half of that number, from which on the last stage may leave all second halves of its
 * backward passes to the end, where the gradient exchange overlaps with them; and the largest lag.
 *
 * If a net can be divided into the stages of a plan in at most 1,000 ways, the plan has the fastest
 * division. Examples are 1,000 units in 2 stages, and 45 units in 3 stages. In all other cases, the
 * search begins with the division whose slowest stage or link is fastest, and moves borders as long
 * as the simulated step gets faster. If the ranks have little memory, this search may find no
 * division although one exists. For the 32 fastest plans, the search then tries all divisions if
 * there are at most 20,000; otherwise it tries more moves of borders. Planning for 200 units and 8
 * ranks takes less than a second.
 *
 * LT_EINVAL if a number is out of range, if the job allows no plan, or if the search finds no plan
 * that fits into the memory of the ranks; LT_ENOMEM. */
LT_MUST lt_status lt_pipe_plans_find(const lt_pipe_net *net, const lt_pipe_job *job,
                                     lt_pipe_plans *plans);
LT_API void lt_pipe_plans_free(lt_pipe_plans *plans);

#ifdef __cplusplus
}
#endif
#endif
