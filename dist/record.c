/* record.c - see record.h. */
#include <stdlib.h>
#include <string.h>

#include "dist/record.h"

/* The numbers: these, then some for each rank, one for each parameter, and the norms. */
enum { LOSS, HEAD };
enum { BACKWARDS, STOP, STEPS, OF_RANK };

static double *of_rank(const lt_record *r, int rank) { return r->data + HEAD + OF_RANK * rank; }
static double *of_parameters(const lt_record *r) { return of_rank(r, r->ranks); }
static double *of_norms(const lt_record *r) { return of_parameters(r) + r->parameters; }

lt_status lt__record_write(lt_record *r, lt_ctx *ctx, int ranks, int parameters, const lt_own *own)
{
    LT_TRY(lt__norms_learn(&r->norms, ctx));
    size_t count = HEAD + OF_RANK * (size_t)ranks + (size_t)parameters +
                   lt__norms_count(&r->norms);
    double *data = realloc(r->data, count * sizeof *data);
    if (!data)
        return lt_fail(LT_ENOMEM, "out of memory for a reducer");
    memset(data, 0, count * sizeof *data);
    r->data = data;
    r->count = count;
    r->ranks = ranks;
    r->parameters = parameters;
    data[LOSS] = own->loss;
    of_rank(r, own->rank)[BACKWARDS] = own->backwards;
    of_rank(r, own->rank)[STOP] = own->stop_reason;
    of_rank(r, own->rank)[STEPS] = own->steps;
    lt__norms_write(&r->norms, ctx, own->counts, of_norms(r));
    return LT_OK;
}

void lt__record_use(lt_record *r, int parameter) { of_parameters(r)[parameter] = 1; }

lt_status lt__record_check(const lt_record *r)
{
    for (int rank = 1; rank < r->ranks; rank++)
        if (of_rank(r, rank)[STEPS] != of_rank(r, 0)[STEPS])
            return lt_fail(LT_EDESYNC, "the ranks disagree: rank %d has not taken the same steps "
                           "of optimizers, with or without clip, as rank 0; what decides about a "
                           "step must be the same on all ranks", rank);
    return LT_OK;
}

bool lt__record_uses(const lt_record *r, int parameter) { return of_parameters(r)[parameter] > 0; }

double lt__record_loss(const lt_record *r) { return r->data[LOSS]; }

int lt__record_backwards(const lt_record *r)
{
    double most = 0;
    for (int rank = 0; rank < r->ranks; rank++)
        if (of_rank(r, rank)[BACKWARDS] > most)
            most = of_rank(r, rank)[BACKWARDS];
    return (int)most;
}

int lt__record_stop_reason(const lt_record *r)
{
    int rank = 0;
    while (rank < r->ranks - 1 && of_rank(r, rank)[STOP] == 0)
        rank++;
    return (int)of_rank(r, rank)[STOP];
}

lt_status lt__record_read_norms(const lt_record *r, lt_ctx *ctx)
{
    return lt__norms_read(&r->norms, ctx, of_norms(r));
}

void lt__record_free(lt_record *r)
{
    lt__norms_free(&r->norms);
    free(r->data);
}
