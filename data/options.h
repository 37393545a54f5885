/* options.h - checks the options of a pass and fills in their defaults. Private to data. */
#ifndef LT_DATA_OPTIONS_H
#define LT_DATA_OPTIONS_H

#include "data/source.h"

/* Checks the given options for a pass over source. Copies them to *options, with the defaults
 * filled in; options->workers is then the number of threads, 0 for none. LT_EINVAL. */
LT_MUST lt_status lt__batch_options_read(const lt_source *source, const lt_batch_options *given,
                                         lt_batch_options *options);

#endif
