/* costs.h - what the stages of a plan compute, keep and send. Private to dist. */
#ifndef LT_DIST_PIPELINE_COSTS_H
#define LT_DIST_PIPELINE_COSTS_H

#include "dist/pipeline/simulate.h"

typedef struct lt_unit_costs {
    double forward, inputs, weights, saved; /* costs of a micro-batch */
    double update, grads, state;            /* costs of all micro-batches */
} lt_unit_costs;

typedef struct lt_costs {
    const lt_pipe_net *net; /* borrowed, like job */
    const lt_pipe_job *job;
    lt_pipe_line *lines; /* (n_units, 3) forward, inputs, weights */
    int replicas, micro;
    double images;         /* number of images in a micro-batch */
    lt_unit_costs *before; /* (n_units + 1) before[i]: sums over units 0 to i - 1 */
    int *begin;            /* (n_blocks + 1) the first unit of each block, then n_units */
    int n_blocks;          /* a block: units from one that may begin a stage up to the next */
    double *cut_bytes;     /* (n_blocks) bytes in each direction if a stage begins with the block */
} lt_costs;

/* A simulated pipeline and its arrays, for any number of stages. */
typedef struct lt_costed_pipe {
    lt_pipe pipe;
    lt_pipe_stage stage[LT_MAX_STAGES];
    const lt_costs *costs; /* borrowed */
    int first[LT_MAX_STAGES + 1];
    double bytes[LT_MAX_STAGES * LT_MAX_STAGES], grads[LT_MAX_STAGES * LT_MAX_STAGES];
} lt_costed_pipe;

/* LT_EINVAL if a number is out of range. */
LT_NODISCARD lt_status lt__pipe_job_check(const lt_pipe_job *job);
/* Checks what the job says about plans: their stages, replicas, micro, lag and kind. LT_EINVAL. */
LT_NODISCARD lt_status lt__pipe_choices_check(const lt_pipe_job *job, int blocks);

/* Fits the times of a net. net and job are borrowed, and must be valid. LT_EINVAL, LT_ENOMEM; close
 * costs in this case, too. */
LT_NODISCARD lt_status lt__costs_open(lt_costs *costs, const lt_pipe_net *net,
                                      const lt_pipe_job *job);
void lt__costs_close(lt_costs *costs);
/* Computes the costs for these numbers of replicas and of micro-batches of each replica. */
void lt__costs_set(lt_costs *costs, int replicas, int micro);

/* The sum over units first to end - 1. */
lt_unit_costs lt__costs_sum(const lt_costs *costs, int first, int end);
/* A pipeline whose stage i has units first[i] to first[i + 1] - 1, as lt__pipe_simulate() needs it.
 * first (stages + 1). */
void lt__costs_pipe(const lt_costs *costs, const lt_schedule *schedule, const int *first,
                    lt_costed_pipe *pipe);
/* Simulates a step of such a pipeline. LT_EINVAL, LT_ENOMEM. */
LT_NODISCARD lt_status lt__costs_simulate(const lt_costed_pipe *pipe, lt_pipe_result *result);
/* The bytes that units first to end - 1 need in addition to the bytes that they keep between
 * passes. */
double lt__costs_work(const lt_costs *costs, int first, int end);
/* The bytes of memory of stage schedule->stage, with units first to end - 1. */
double lt__costs_memory(const lt_costs *costs, const lt_schedule *schedule, int first, int end);
/* The bytes of gradients that a rank sends for units first to end - 1 in a step. */
double lt__costs_exchanged(const lt_costs *costs, int first, int end);
/* The seconds that these units' gradient exchange takes if nothing overlaps with it. */
double lt__costs_exchange(const lt_costs *costs, int first, int end);

/* Divides the blocks into stages, at most as many as there are blocks. first (stages + 1): stage i
 * has blocks first[i] to first[i + 1] - 1, at least one. The slowest stage or link is as fast as
 * possible. memory: bytes of each stage, or 0 for no limit. *fits: whether there is a division into
 * stages that have enough memory; otherwise, first is not set. LT_ENOMEM. */
LT_NODISCARD lt_status lt__partition(const lt_costs *costs, const lt_schedule *schedule,
                                     double memory, int *first, bool *fits);

#endif
