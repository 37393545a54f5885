/* reducer.h - the inside of a reducer, for those who do parts of its work. Private to this room. */
#ifndef LT_DIST_REDUCER_H
#define LT_DIST_REDUCER_H

#include <pthread.h>

#include "core/tensor.h"
#include "dist/filter.h"
#include "dist/tree_sum.h"
#include "dist/device_exchange.h"
#include "dist/bucket_plan.h"
#include "dist/record.h"
#include "dist/staging.h"

struct lt_reducer {
    lt_ctx *ctx;
    lt_group *group;
    lt_reducer_config config;
    int rank, size;
    lt_bucket_plan plan;
    lt_record record;   /* of parameters in the order of items */
    lt_filter filter;
    lt_device_exchange device_exchange;     /* of accelerators that sum among themselves */
    lt_staging staging; /* where the gradients are on one that does not */
    lt_tensor **sent;   /* room for as many as items */
    double share;       /* rows of this rank / rows of all */
    double began;       /* when the last backward did */
    int backwards;      /* in this step */
    int most_backwards;          /* the most that a step had so far; 0: there was none */
    int expected_backwards;       /* in each step, if that is known; or 0 */
    bool exchanged;         /* an exchange was started since the last update, */
    bool synchronized;       /* is over, and its gradients are known to be there, */
    bool more;          /* and there is more than it had */
    bool broken;        /* a backward failed in the middle of one */
    int64_t begun_step;      /* the last step whose first backward has begun */
    int64_t rows;       /* of the batch of all ranks; 0: not told */
    uint32_t data;      /* see lt_reducer_set_data() */
    uint32_t *written;  /* of each arena: the version of its values when the last record was
                         * written */
    bool looked;        /* lt__agree_look() was called in this step */
    bool disagrees;     /* the last record says that the ranks disagree */
    int shards, shard;  /* of this rank in a step, and the present one; 0: see vranks */
    bool has_share;          /* what the present one has of the batch */
    bool summed;        /* it is in the tree sums, */
    lt_tree_sum *tree_sums;     /* one for each arena, */
    lt_tree_sum record_sum;
    lt_step_status step_status; /* of the last update */
    lt_reduced_step last;
    pthread_mutex_t lock;
    pthread_cond_t ready;
};

/* agree.c: what must be the same on all ranks. */
/* Remembers which parameters are frozen: at the first backward of a step, or before its record if
 * the step has none. */
void lt__agree_look(lt_reducer *r);
/* Fills own->agree and own->writes. */
void lt__agree_write(lt_reducer *r, lt_rank_record *own);
/* After a record in which `agree` differs: LT_EDESYNC with the first difference. A collective, on
 * the rank's thread, as is the next. */
LT_MUST lt_status lt__agree_name(lt_reducer *r);
/* After a record in which `writes` differs: LT_EDESYNC if parameters do, too. */
LT_MUST lt_status lt__agree_compare_weights(lt_reducer *r);

/* On the group's thread: sums what of a bucket some rank has, once it is complete. bucket.c. */
LT_MUST lt_status lt__bucket_reduce(lt_reducer *r, int index);

#endif
