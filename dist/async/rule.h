/* rule.h - the rules of asynchronous training: how the server applies a gradient that was computed
 * from older weights. Private to dist.
 *
 * If a gradient has no delay, every rule but dana and ormo takes the momentum step of the script's
 * optimizer. Some rules change the gradient before that step, others replace the step:
 *
 *   asgd   changes nothing
 *   sa     divides the gradient by its delay (staleness-aware; Zhang et al. 2016, arXiv:1511.05950)
 *   dc-c   adds lam g g (w - backup), with constant lam (DC-ASGD; Zheng et al. 2017,
 *          arXiv:1609.08326); backup: the weights that the worker read
 *   dc-a   the same with lam / sqrt(moving mean of g g)
 *   dc-m   like dc-a, but g includes weight decay, as in MXNet's DCASGD with momentum
 *   gap    divides the gradient by 1 + |w - backup| / mean step (gap-aware; Barkai et al. 2020,
 *          arXiv:1909.10802)
 *   dana   Nesterov momentum with a velocity per worker (DANA-Slim; Hakimi et al. 2019,
 *          arXiv:1907.11612)
 *   ormo   adds gradients to the momentum in the order of their versions (Shi et al. 2024,
 *          arXiv:2407.19234)
 *   ddc    a velocity per worker; the weights of momentum and of the delayed gradient follow each
 *          delay; compensation as in dc-a, limited to the norm of the gradient
 */
#ifndef LT_DIST_ASYNC_RULE_H
#define LT_DIST_ASYNC_RULE_H

#include "dist/async/flat.h"
#include "dist/async/gradient.h"

typedef enum lt_rule {
    LT_RULE_ASGD,
    LT_RULE_SA,
    LT_RULE_DC_C,
    LT_RULE_DC_A,
    LT_RULE_DC_M,
    LT_RULE_GAP,
    LT_RULE_DANA,
    LT_RULE_ORMO,
    LT_RULE_DDC,
    LT_RULES
} lt_rule;

/* The name of a rule, as in --parallel async=RULE. Borrowed. */
const char *lt__rule_name(lt_rule rule);
/* Finds a rule by its name. LT_EUSAGE, with all names. */
LT_NODISCARD lt_status lt__rule_find(const char *name, lt_rule *rule);

typedef struct lt_rule_config {
    lt_rule rule;
    int workers;
    double lam;  /* strength of compensation; 0: the rule's default */
    double cap;  /* ddc: limit of |compensation| / |gradient|; 0: the default, 1 */
    double rho;  /* decay of moving means of squares; 0: the rule's default */
    bool follow; /* ddc: false fixes r = q = 1 */
    bool late;   /* memory for a worker is allocated at its first pull */
} lt_rule_config;

typedef struct lt_rule_push {
    int worker;
    int64_t version, delay; /* versions made before this push, and since the worker's pull */
    const lt_gradient *gradient;
} lt_rule_push;

typedef struct lt_rule_stats { /* compensation by ddc, of the parameters of a group */
    double strength;           /* sum of |compensation| / |gradient| */
    double capped, n;          /* parameters that were capped, and all */
} lt_rule_stats;

typedef struct lt_rule_state lt_rule_state;

/* The state of a rule that updates the optimizer's parameters. optim is borrowed. New. NULL with
 * LT_EUSAGE for a wrong lam, or if the optimizer's op is not supported by the rule; LT_ENOMEM. */
lt_rule_state *lt__rule_new(lt_optim *optim, const lt_rule_config *config);
void lt__rule_free(lt_rule_state *state); /* NULL is allowed */
/* LT_EUSAGE if an option of the step is not supported: nesterov, or a momentum of 1 or more, with
 * dana, ormo or ddc. */
LT_NODISCARD lt_status lt__rule_check(lt_rule rule, const lt_def *def, const lt_opt *const *options,
                                      int n_groups);
/* Whether the server can apply a gradient from another process. LT_EUSAGE as above; LT_EINVAL if an
 * option is out of range; LT_ENOMEM. */
LT_NODISCARD lt_status lt__rule_check_push(lt_rule_state *state, const lt_gradient *gradient);
/* Allocates the memory for a worker, if that was not done before. LT_ENOMEM. */
LT_NODISCARD lt_status lt__rule_open_worker(lt_rule_state *state, int worker);
/* A worker reads the current values. Stores a copy of them if the rule needs it. LT_ENOMEM, or the
 * device's error. */
LT_NODISCARD lt_status lt__rule_pull(lt_rule_state *state, int worker);
/* Updates the parameters. Changes the gradient. */
LT_NODISCARD lt_status lt__rule_apply(lt_rule_state *state, const lt_rule_push *push);
/* Memory per worker, in bytes. */
size_t lt__rule_bytes_per_worker(const lt_rule_state *state);
/* Reads and clears the statistics of a group. Zeros for rules other than ddc. LT_ENOMEM, or the
 * device's error. */
LT_NODISCARD lt_status lt__rule_stats(lt_rule_state *state, int group, lt_rule_stats *stats);

/* Flat i of the state, for checkpoints, and its name: "backup.3" for worker 3, or "squares". A flat
 * of a worker without memory is not open. Returns false past the last one. Borrowed. */
bool lt__rule_flat(const lt_rule_state *state, int i, char name[32], const lt_flat_buffers **flat);
/* The numbers of the state, for checkpoints. */
enum { LT_RULE_NUMBERS = 2 };
void lt__rule_save(const lt_rule_state *state, double numbers[LT_RULE_NUMBERS]);
void lt__rule_load(lt_rule_state *state, const double numbers[LT_RULE_NUMBERS]);

#endif
