/* anomaly.h - finds the first result that is not finite. Private to amp. */
#ifndef LT_AMP_ANOMALY_H
#define LT_AMP_ANOMALY_H

#include "amp/scale.h"

/* Turns anomaly detection on or off for the next step, and discards earlier findings. */
void lt__anomaly_enable(lt_loss_scale *s, bool on);
/* Returns a description of the first result in this step that is not finite, or "". Without anomaly
 * detection it replays the ops of loss, as far as the saved tensors allow. Borrowed from s. */
const char *lt__anomaly_first(lt_loss_scale *s, lt_tensor *loss);
/* Sets the op hook of s in ctx, if s detects anomalies; otherwise, or if s is NULL, removes it. */
void lt__anomaly_install(lt_ctx *ctx, lt_loss_scale *s);

#endif
