/* stand_in_cudnn.h - what the two halves of the stand-in for cuDNN share. */
#ifndef TESTS_CUDA_STAND_IN_CUDNN_H
#define TESTS_CUDA_STAND_IN_CUDNN_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* what is declared here is what the library exports */
#include <cudnn.h>

#include "tests/cuda/stand_in.h"
extern stand_in stand_in_state;
#pragma GCC visibility pop

typedef struct attribute {
    int name;
    int64_t n;
    void *values;
    struct attribute *next;
} attribute;

typedef struct descriptor {
    int type;
    bool final;
    attribute *attributes;
    int64_t number, value;          /* for engines, descriptors that contain one, and knobs */
    const struct descriptor *graph; /* for engines and descriptors that contain one */
} descriptor;

/* Notes what was wrong; returns status. */
cudnnStatus_t refuse(cudnnStatus_t status, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* NULL: it is not set. Borrowed. */
const attribute *find(const descriptor *d, int name);
const void *values(const descriptor *d, int name);
const descriptor *linked(const descriptor *d, int name);
int64_t integer(const descriptor *d, int name); /* the first */
int word(const descriptor *d, int name);        /* an enum's; -1: it is not set */

/* Whether the attributes of a tensor, convolution, operation, graph or pack go together. */
cudnnStatus_t check(const descriptor *d);
/* Runs a graph with a pack. */
cudnnStatus_t run_graph(const descriptor *graph, const descriptor *pack);

#endif
