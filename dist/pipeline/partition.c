/* partition.c - divides a net into pipeline stages; see partition.h.
 *
 * Dynamic programming: best[k][i] is the time of the slowest stage or link if the first i blocks
 * are stages 0 to k. It is the smallest, over h, of the largest of best[k - 1][h], the seconds of
 * blocks h to i - 1, and the seconds of the cut before unit h.
 */
#include <math.h>
#include <stdlib.h>

#include "dist/pipeline/partition.h"

typedef struct sums { /* over the blocks before one */
    double seconds, saved, state;
} sums;

typedef struct table {
    const lt_partition_config *config;
    const lt_pipe_block *blocks;
    int n;
    sums *before; /* (n + 1) */
    double *best; /* (stages, n + 1) */
    int *from;    /* (stages, n + 1) the h of best */
} table;

static bool fits(const table *t, int k, int first, int end)
{
    const lt_partition_config *c = t->config;
    lt_schedule s = {c->kind, c->stages, k, c->lag};
    const sums *a = &t->before[first], *b = &t->before[end];
    double received = k > 0 ? t->blocks[first].cut_bytes : 0;
    double saved = (b->saved - a->saved + received) * lt__schedule_in_memory(&s, c->micro);
    return c->memory == 0 || saved + b->state - a->state <= c->memory;
}

/* The time of stage k if it has blocks first to end - 1, and of the link before it. */
static double cost(const table *t, int k, int first, int end)
{
    double stage = t->before[end].seconds - t->before[first].seconds;
    double link = k > 0 ? t->blocks[first].cut_bytes / t->config->bytes_per_s : 0;
    return fits(t, k, first, end) ? fmax(stage, link) : INFINITY;
}

static void fill_row(table *t, int k)
{
    double *row = t->best + (ptrdiff_t)k * (t->n + 1);
    int *from = t->from + (ptrdiff_t)k * (t->n + 1);
    for (int i = 0; i <= t->n; i++) {
        row[i] = INFINITY;
        for (int h = k; h < i && (k > 0 || h == 0); h++) {
            double slowest = fmax(k > 0 ? row[h - t->n - 1] : 0, cost(t, k, h, i));
            if (slowest < row[i]) {
                row[i] = slowest;
                from[i] = h;
            }
        }
    }
}

static lt_status divide(table *t, int *first, double *slowest)
{
    int stages = t->config->stages, end = t->n;
    for (int i = 0; i < t->n; i++)
        t->before[i + 1] = (sums){t->before[i].seconds + t->blocks[i].seconds,
                                  t->before[i].saved + t->blocks[i].saved_bytes,
                                  t->before[i].state + t->blocks[i].state_bytes};
    for (int k = 0; k < stages; k++)
        fill_row(t, k);
    *slowest = t->best[(ptrdiff_t)stages * (t->n + 1) - 1];
    if (isinf(*slowest))
        return lt_fail(LT_ENOMEM, "the net does not fit into %d pipeline stages of %.4g MB", stages,
                       t->config->memory / 1e6);
    first[stages] = end;
    for (int k = stages - 1; k >= 0; k--)
        first[k] = end = t->from[(ptrdiff_t)k * (t->n + 1) + end];
    return LT_OK;
}

lt_status lt__partition(const lt_pipe_block *blocks, int n, const lt_partition_config *config,
                        int *first, double *slowest)
{
    *slowest = 0;
    if (config->stages < 1 || config->stages > n)
        return lt_fail(LT_EINVAL, "%d blocks cannot be divided into %d pipeline stages", n,
                       config->stages);
    size_t cells = (size_t)config->stages * ((size_t)n + 1);
    table t = {config,
               blocks,
               n,
               calloc((size_t)n + 1, sizeof *t.before),
               malloc(cells * sizeof *t.best),
               calloc(cells, sizeof *t.from)};
    lt_status status = t.before && t.best && t.from
                           ? divide(&t, first, slowest)
                           : lt_fail(LT_ENOMEM, "out of memory to divide a net of %d blocks", n);
    free(t.before);
    free(t.best);
    free(t.from);
    return status;
}
