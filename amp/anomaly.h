/* anomaly.h - who was the first that is not finite. Private to this room. */
#ifndef LT_AMP_ANOMALY_H
#define LT_AMP_ANOMALY_H

#include "amp/scale.h"

/* From now on s->detects_anomaly or not; what was found before is forgotten. */
void lt__anomaly_enable(lt_loss_scale *s, bool on);
/* About the first in this step, if need be as far as that can be told from what loss has kept for
 * backward; "": there is none. Borrowed from s. */
const char *lt__anomaly_first(lt_loss_scale *s, lt_tensor *loss);
/* s is in use in ctx from now on, or nothing if it is NULL. */
void lt__anomaly_install(lt_ctx *ctx, lt_loss_scale *s);

#endif
