/* partition.h - divides a net into pipeline stages. Private to dist. */
#ifndef LT_DIST_PIPELINE_PARTITION_H
#define LT_DIST_PIPELINE_PARTITION_H

#include "dist/pipeline/schedule.h"

typedef struct lt_pipe_block { /* units that are not divided; numbers of a micro-batch */
    double seconds;            /* of all its passes */
    double cut_bytes;          /* sent in each direction, and kept until the end of the backward
                                * pass, if a stage begins with this block */
    double saved_bytes;        /* memory from the forward pass to the end of the backward pass */
    double state_bytes;        /* parameters, gradients and the optimizer's slots */
} lt_pipe_block;

typedef struct lt_partition_config {
    lt_schedule_kind kind;
    int stages, micro, lag;
    double bytes_per_s; /* of the links between stages */
    double memory;      /* bytes of each stage; 0: no limit */
} lt_partition_config;

/* Divides blocks (n), in the order of the forward pass, into stages. Every stage gets at least one.
 * first (stages + 1): stage i has blocks first[i] to first[i + 1] - 1. The slowest stage or link is
 * as fast as possible: *slowest, in seconds per micro-batch. LT_EINVAL if there are more stages
 * than blocks; LT_ENOMEM, also if the blocks do not fit into the memory of the stages; only then
 * *slowest is INFINITY. */
LT_MUST lt_status lt__partition(const lt_pipe_block *blocks, int n,
                                const lt_partition_config *config, int *first, double *slowest);

#endif
