/* stand_in_cudnn.h - what the two source files of the stand-in for cuDNN share. */
#ifndef TESTS_CUDA_STAND_IN_CUDNN_H
#define TESTS_CUDA_STAND_IN_CUDNN_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* the library exports the declarations below */
#include <cudnn.h>

#include "tests/cuda/stand_in.h"
extern stand_in stand_in_state;
#pragma GCC visibility pop

/* The operations of a convolution: names of its descriptor and attributes, and the tensor that is
 * its result. */
#define CONV_OPS(EACH)                                                                             \
    EACH(FORWARD, FORWARD, X, W, Y, Y_OF)                                                          \
    EACH(BACKWARD_DATA, BWD_DATA, DX, W, DY, X_OF)                                                 \
    EACH(BACKWARD_FILTER, BWD_FILTER, X, DW, DY, W_OF)
#define CONV_TYPE(type) CUDNN_BACKEND_OPERATION_CONVOLUTION_##type##_DESCRIPTOR
#define CONV_ATTR(prefix, name) CUDNN_ATTR_OPERATION_CONVOLUTION_##prefix##_##name

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
    int64_t number, value;          /* of an engine, a descriptor that contains one, or a knob */
    const struct descriptor *graph; /* of an engine or a descriptor that contains one */
} descriptor;

/* Records an error message; returns status. */
cudnnStatus_t refuse(cudnnStatus_t status, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* The attribute, its values, or the descriptor that it refers to. Borrowed, or NULL if it is not
 * set. */
const attribute *find(const descriptor *d, int name);
const void *values(const descriptor *d, int name);
const descriptor *linked(const descriptor *d, int name);
int64_t integer(const descriptor *d, int name); /* its first value */
int word(const descriptor *d, int name);        /* the value of an enum, or -1 if it is not set */

/* Whether the attributes of a tensor, convolution, operation, graph or variant pack are consistent.
 */
cudnnStatus_t check(const descriptor *d);
/* Computes a graph on the tensors of a variant pack. */
cudnnStatus_t run_graph(const descriptor *graph, const descriptor *pack);

#endif
