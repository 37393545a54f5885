/* fault.h - a rank that goes wrong on purpose, for tests; see lt_config. Private to this room. */
#ifndef LT_DIST_FAULT_H
#define LT_DIST_FAULT_H

#include "core/core.h"

/* A fault that names a rank wants one of so many: LT_EUSAGE. */
lt_status lt__fault_check(const lt_ctx *ctx, int size);
/* The rank begins its next step: that is when the fault of ctx is injected. LT_EDONE to leave. */
lt_status lt__fault_trigger(const lt_ctx *ctx, int rank);

#endif
