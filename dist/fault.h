/* fault.h - injects the fault of a rank that a test has set in lt_config. Private to this room. */
#ifndef LT_DIST_FAULT_H
#define LT_DIST_FAULT_H

#include "core/core.h"

/* LT_EUSAGE if the fault of ctx names a rank that is not below `size`. */
lt_status lt__fault_check(const lt_ctx *ctx, int size);
/* Injects the fault of ctx if it is for this rank and its next step. Call it when a step begins.
 * LT_EDONE if the fault is that the rank leaves. */
lt_status lt__fault_trigger(const lt_ctx *ctx, int rank);

#endif
