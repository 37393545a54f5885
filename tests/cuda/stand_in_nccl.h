/* stand_in_nccl.h - how tests control and observe the stand-in for NCCL, which exports one
 * stand_in_nccl by the name stand_in_nccl_state. */
#ifndef TESTS_CUDA_STAND_IN_NCCL_H
#define TESTS_CUDA_STAND_IN_NCCL_H

#include <stdbool.h>

typedef struct stand_in_nccl {
    int version;       /* of the library; 0: 2.28.9 */
    int slow;          /* polls that report "in progress" before a call completes */
    int fail, hang;    /* number of the sum, from 1, that never completes; 0: none */
    int rank;          /* on this rank the sum `fail` ends with an error */
    bool refuses;      /* no communicator can be created */
    int live;          /* communicators created and not freed */
    int aborted, sums; /* aborted communicators and sums, of all ranks together */
} stand_in_nccl;

#endif
