/* sample.h - the options of a pass, and how one image is prepared for a batch. Private to data. */
#ifndef LT_DATA_SAMPLE_H
#define LT_DATA_SAMPLE_H

#include "data/source.h"

/* Checks the given options for a pass over source. Copies them to *options, with the defaults
 * filled in; options->workers is then the number of threads, 0 for none. LT_EINVAL. */
LT_NODISCARD lt_status lt__batch_options_read(const lt_source *source,
                                              const lt_batch_options *given,
                                              lt_batch_options *options);

typedef struct lt_sample_spec { /* read-only; shared by all threads */
    lt_source *source;
    lt_batch_options options; /* checked, defaults filled in */
    uint64_t seed;
    const void *table; /* (c, 256) of options.dtype; maps the bytes of each channel */
} lt_sample_spec;

/* Computes the lookup table for spec->table. table has room for (c, 256) values of
 * options.dtype. */
void lt__sample_table(const lt_sample_spec *spec, void *table);
/* Writes image i of the source to x, (h, w, c) of options.dtype, and its label. x = NULL: only the
 * label. LT_EDATA, LT_ENOMEM. */
lt_status lt__sample_make(const lt_sample_spec *spec, int64_t i, lt_sample_buffers *buffers,
                          void *x, int64_t *label);

#endif
