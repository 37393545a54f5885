/* nets.h - small nets, to plan pipelines for. */
#ifndef LT_TESTS_DIST_NETS_H
#define LT_TESTS_DIST_NETS_H

#include <math.h>
#include <stdlib.h>

#include "dist/pipeline/costs.h"
#include "tests/dist/pick.h"

enum { UNITS = 200, VALUES = 300, STAGES = 8 };
static const double MiB = 1 << 20;

typedef struct net { /* with its arrays, measured for one image */
    lt_pipe_net net;
    lt_pipe_unit units[UNITS];
    lt_pipe_value values[VALUES];
    int uses[VALUES][4];
} net;

static inline net *net_new(void)
{
    net *n = calloc(1, sizeof *n);
    n->net = (lt_pipe_net){.n_sizes = 1, .sizes = {1}, .units = n->units, .values = n->values};
    return n;
}

static inline lt_pipe_unit *add_unit(net *n, double forward, double inputs, double weights)
{
    lt_pipe_unit *u = &n->units[n->net.n_units++];
    *u = (lt_pipe_unit){
        .may_begin_stage = true, .forward = {forward}, .inputs = {inputs}, .weights = {weights}};
    return u;
}

/* A value that up to two units use; b < 0: only one. */
static inline lt_pipe_value *add_value(net *n, int unit, int a, int b, double bytes)
{
    int i = n->net.n_values++;
    lt_pipe_value *v = &n->values[i];
    n->uses[i][0] = a;
    n->uses[i][1] = b;
    *v = (lt_pipe_value){unit, n->uses[i], b < 0 ? 1 : 2, bytes, true};
    return v;
}

static const lt_pipe_job any = {.ranks = 2,
                                .batch = 2,
                                .link = {0.5, 10},
                                .exchange = {0.25, 1 << 20},
                                .stages = LT_PIPE_ANY,
                                .replicas = LT_PIPE_ANY,
                                .micro = LT_PIPE_ANY,
                                .lag = LT_PIPE_ANY,
                                .kind = LT_PIPE_ANY};

/* Stage 0 computes 1 + 1 + 1 s, stage 1 2 + 1 + 1 s, for one image. A message takes 1 s, during
 * which the link is busy, and 0.5 s. */
static inline net *two_units(void)
{
    net *n = net_new();
    *add_unit(n, 1, 1, 1) = (lt_pipe_unit){true, {1}, {1}, {1}, 0.25, 4, 100, 7, 0, 0, NULL};
    *add_unit(n, 2, 1, 1) = (lt_pipe_unit){true, {2}, {1}, {1}, 0.5, 8, 200, 5, 0, 0, NULL};
    add_value(n, 0, 1, -1, 10);
    return n;
}

#endif
