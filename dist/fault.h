/* fault.h - injects the fault that a test has set for one rank; see lt_config. Private to dist. */
#ifndef LT_DIST_FAULT_H
#define LT_DIST_FAULT_H

#include "core/core.h"
#include "dist/mail/mail.h"

/* LT_EUSAGE if the fault of ctx names a rank that is not below `size`. */
lt_status lt__fault_check(const lt_ctx *ctx, int size);
/* Injects the fault of ctx if it is for this rank and this step, from 1. A delay is injected in
 * every step. Call it when a step begins. LT_EDONE if the fault makes the rank leave. */
lt_status lt__fault_trigger(const lt_ctx *ctx, int rank, int64_t step);
/* Delays the messages of a run if the fault of ctx is a latency. Call it when the run begins. */
void lt__fault_add_latency(const lt_ctx *ctx, lt_mail *mail);
/* LT_EUSAGE if the fault of ctx is a latency: for training without messages. */
LT_NODISCARD lt_status lt__fault_refuse_latency(const lt_ctx *ctx);

#endif
