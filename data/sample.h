/* sample.h - what one image goes through on its way into a batch. Private to this room. */
#ifndef LT_DATA_SAMPLE_H
#define LT_DATA_SAMPLE_H

#include "data/source.h"

typedef struct lt_sample_spec { /* only read, by any number of threads */
    lt_source *source;
    lt_batch_options options; /* checked, with all defaults in place */
    uint64_t seed;
    const void *table; /* (c, 256) of options.dtype: what the bytes of a channel become */
} lt_sample_spec;

/* Fills recipe->table. */
void lt__sample_table(const lt_sample_spec *spec, void *table);
/* Writes image i of the source, (h, w, c) of options.dtype, and its label. LT_EDATA, LT_ENOMEM. */
lt_status lt__sample_make(const lt_sample_spec *spec, int64_t i, lt_sample_buffers *buffers,
                          void *x, int64_t *label);
void lt__sample_buffers_free(lt_sample_buffers *buffers);

#endif
