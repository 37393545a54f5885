/* stand_in_nccl.h - what the tests tell the stand-in for NCCL, which exports one such struct by the
 * name stand_in_nccl_state, and hear from it. */
#ifndef TESTS_CUDA_STAND_IN_NCCL_H
#define TESTS_CUDA_STAND_IN_NCCL_H

#include <stdbool.h>

typedef struct stand_in_nccl {
    int version;       /* of the library; 0: 2.28.9 */
    int slow;          /* so often each call is in progress still, when somebody asks */
    int fail, hang;    /* the sum, from 1, that never ends; 0: none does. The first is an */
    int rank;          /* error on this rank */
    bool refuses;      /* to come together */
    int live;          /* communicators that were made and not freed */
    int aborted, sums; /* so many there were, of all ranks */
} stand_in_nccl;

#endif
