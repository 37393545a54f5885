/* stand_in_nccl.h - how tests control and observe the stand-in for NCCL, which exports one
 * stand_in_nccl by the name stand_in_nccl_state. */
#ifndef TESTS_CUDA_STAND_IN_NCCL_H
#define TESTS_CUDA_STAND_IN_NCCL_H

#include <stdbool.h>

typedef struct stand_in_nccl {
    int version;    /* version of the library; 0: 2.28.9 */
    int slow;       /* polls that report "in progress" before a call completes */
    int fail, hang; /* numbers of two sums, from 1, that never complete; 0: none */
    int rank;       /* rank on which sum `fail` ends with an error instead */
    bool refuses;   /* no communicator can be created */
    bool stuck;     /* ncclCommAbort() does not return before this is false */
    /* Call number refuse_at, from 1, for the communicator of this rank fails with this
     * ncclResult_t. 0: none */
    int refuse_rank, refuse_at, refuse_with;
    int live;          /* communicators created and not freed */
    int unfinished;    /* sums that some ranks have posted and others have not */
    int aborted, sums; /* communicators aborted, and sums started, by all ranks */
} stand_in_nccl;

#endif
