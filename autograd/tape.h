/* tape.h - nodes, leaves and the state of autograd in a context. Private to autograd.
 *
 * Ownership: a tensor has a reference to the node that made it, or to its leaf. The edges of a node
 * have references to the nodes and leaves of its inputs, and to the inputs saved for backward. An
 * output is saved through a new tensor without history, so there are no reference cycles: a graph
 * is freed with its last tensor. A tape only lists its nodes, in order of recording, which is a
 * topological order; backward walks the list in reverse.
 */
#ifndef LT_AUTOGRAD_TAPE_H
#define LT_AUTOGRAD_TAPE_H

#include "autograd/autograd.h"
#include "autograd/stages.h"
#include "core/tensor.h"

typedef struct lt_hook {
    struct lt_hook *next;
    lt_grad_hook fn;
    void *ud;
    void (*free)(void *ud);
} lt_hook;

enum { LT_MAX_HOOKS = 1000 }; /* hooks of a leaf */

/* LT_RECEIVED: its values come from another stage of a pipeline */
typedef enum lt_role { LT_PLAIN, LT_PARAM, LT_BUFFER, LT_RECEIVED } lt_role;

/* The gradient and hooks of a tensor that no op made, and its role. */
typedef struct lt_leaf {
    atomic_int refs;
    lt_ctx *ctx;
    lt_tensor *x;    /* borrowed; NULL once x is freed */
    lt_tensor *grad; /* its memory stays when the gradient is discarded */
    lt_hook *hooks;
    int n_hooks;
    bool requires_grad;  /* requires a gradient, and is not frozen */
    bool has_grad;       /* grad is a gradient; otherwise the next one overwrites it */
    bool touched;        /* the running backward has added to grad, or is about to */
    bool injects_inf;    /* lt_grad_fault(): its gradient gets an inf */
    lt_tensor *dry_grad; /* in a dry run: the gradient so far in this backward, or NULL */
    /* the gradient in half precision, until the scale converts it to grad; or NULL */
    lt_tensor *unconverted;
    const void *scaled_by; /* ud of the scale that has unscaled the gradient, or NULL */
    int optims;            /* number of optimizers that have it */
    int uses;              /* nodes that may still contribute in the running backward */
    int deferred;          /* contributions that lt_backward_weights() has yet to add */
    lt_role role;
    lt_init init;
    lt_tensor *half;            /* last result of lt_half(); refers to this leaf; freed with x */
    struct lt_segment *segment; /* segment of a placed parameter or buffer */
    int64_t offset;             /* offset of its first element in the segment */
    uint32_t version;           /* updates by optimizers, which bypass the version of the storage */
    uint64_t last; /* number of the backward that added to grad last: see lt__leaf_added() */
    bool is_mixed; /* grad also includes an earlier backward, which a step has used since */
} lt_leaf;

/* Changes whenever the elements of x are written in place. Saved tensors are checked against it. */
static inline uint32_t lt__version_of(const lt_tensor *x)
{
    return atomic_load_explicit(&x->storage->version, memory_order_relaxed) +
           (x->leaf ? x->leaf->version : 0);
}

typedef struct lt_edge {  /* an input of a node */
    struct lt_node *node; /* the node that made the input, or NULL */
    lt_leaf *leaf;        /* the leaf of the input, or NULL. Both NULL: no gradient is needed */
    lt_tensor *saved;     /* the input itself if backward reads it */
    uint32_t version;     /* version of `saved` when it was saved */
    uint8_t out_index;    /* index among the outputs of `node` */
    bool given;           /* false for an optional input that was omitted */
    lt_spec spec;         /* dtype and dims of the input, for its gradient */
} lt_edge;

typedef struct lt_node {
    atomic_int refs;            /* tensors and edges */
    bool freed;                 /* backward has freed the saved tensors */
    bool marked;                /* part of the running backward */
    uint8_t n_in, n_out, n_all; /* inputs; outputs; outputs including the extra ones */
    const lt_def *def;
    lt_ctx *ctx;
    lt_device *device; /* device of all its tensors */
    lt_tape *tape;     /* NULL once unlisted */
    struct lt_node *next, *prev;
    uint64_t seed, rng_stream; /* see lt_call, also for number and first_row */
    uint64_t number;
    int64_t first_row;
    uint32_t same_grad;           /* see lt_call */
    uint64_t later;               /* bit i: lt_backward_weights() computes gradient i */
    lt_tensor *d_out[LT_MAX_OUT]; /* gradients of its outputs so far */
    lt_tensor *saved_out[LT_MAX_OUT];
    uint32_t out_version[LT_MAX_OUT]; /* versions of saved_out when they were saved */
    char where[LT_WHERE_BYTES];
    lt_opt *opt; /* (schema.n_opt) stored after the edges */
    lt_edge edge[];
} lt_node;

struct lt_tape {
    lt_ctx *ctx;
    lt_node *first, *last;
    int nodes;
    int64_t first_row; /* first row of the current pass in the global batch */
    uint64_t draws[2]; /* random calls so far in this pass: gradients on; gradients off */
};

struct lt_deferred_wgrad {
    lt_ctx *ctx;
    lt_deferred_wgrad *next; /* deferred gradients of the next backward, while listed */
    bool is_listed;          /* lt_autograd.weights contains it */
    lt_node *first, *last;   /* nodes in the order of the walk, linked through `next` */
};

typedef struct lt_bn_entry { /* merged batch-norm statistics of one pair of running buffers */
    struct lt_bn_entry *next;
    lt_tensor *running_mean, *running_var, *mean, *var;
    bool is_merged; /* mean and var are copies, with the statistics of several shards */
    int64_t count;
    double momentum;
    uint64_t backward_period; /* 1 + the period in which a backward followed, or 0 */
} lt_bn_entry;

typedef struct lt_dry_run {
    bool on;
    lt_tape tape; /* the tape of the dry run. The rest is restored at its end: */
    lt_tape *before;
    lt_step_part parts[LT_PART_KINDS];
    lt_op_hook_fn op_hook;
    void *op_hook_ud;
    uint64_t seed, draws, trees; /* state of the context, like seeded_at */
    int64_t seeded_at;
} lt_dry_run;

typedef struct lt_pending_step { /* the last step of an optimizer, which embeds it */
    lt_step_status status;
    struct lt_pending_step *next; /* next in lt_deferred_check.steps, while status is LT_PENDING */
} lt_pending_step;

typedef struct lt_deferred_check { /* see lt_synchronize() */
    lt_check_loss_fn check_loss;
    lt_clip_fn clip;
    lt_step_check *on_device, *on_host; /* the check on the device, and its copy; NULL at first */
    uint64_t cleared;                   /* 1 + the period in which on_device was last cleared */
    bool sent;                          /* a copy to on_host is under way, and complete at `mark` */
    uint64_t mark;
    lt_resolve_fn resolve; /* the scale's function for when the copy is complete; or NULL */
    void *resolve_ud;
    int64_t step, norm_step;       /* steps of the last loss and the last norm checked, from 1 */
    double loss, norm;             /* the values if not finite and not reported yet; else 0 */
    bool reported;                 /* an error was reported since on_device was cleared */
    struct lt_pending_step *steps; /* list of the pending steps of optimizers */
} lt_deferred_check;

struct lt_autograd {
    lt_def **defs; /* ops by id */
    int n_defs, capacity;
    uint16_t by_name[512];     /* open addressing: id + 1, or 0 */
    const lt_kernels *kernels; /* the accelerator's kernels, by id; NULL without one */
    int n_kernels;
    int no_grad_depth;           /* nested calls of lt_grad_off(); ops are recorded while it is 0 */
    lt_tape default_tape, *tape; /* the context's own; the current one */
    lt_step_part parts[LT_PART_KINDS]; /* all NULL if they are not set */
    bool has_part[LT_PART_KINDS];
    lt_cast_fn cast;
    void *cast_ud;
    lt_allreduce_fn allreduce;
    void *allreduce_ud;
    lt_where_fn where;
    void *where_ud;
    lt_timer_fn timer;
    void *timer_ud;
    lt_op_hook_fn op_hook;
    void *op_hook_ud;
    lt_dry_run dry_run;
    bool has_stages;
    bool is_accumulating;       /* more micro-batches of this batch follow */
    lt_stage_hooks stages;      /* valid if has_stages is set; see stages.h */
    lt_bn_entry *bn_stats;      /* pending statistics, in order of first arrival */
    lt_deferred_wgrad *weights; /* pending gradients of split backwards, oldest first */
    const lt_leaf *completing;  /* the leaf whose hooks run, or NULL */
    bool weights_discarded;     /* lt_zero_grad() discarded a gradient that they add to */
    bool in_backward;
    bool grads_complete; /* the next step's gradients are complete; its status: */
    lt_step_status step_status;
    lt_deferred_check deferred;
    const int32_t *skip; /* lt_call.skip during an optimizer step, or NULL */
    uint64_t period;     /* incremented when gradients are used or discarded */
    uint64_t backwards;  /* backwards completed so far, excluding dry runs */
    uint64_t used;       /* bit k % 64: a step has used backward k, for the last 64 backwards */
    uint64_t calls;      /* forward calls so far */
    uint32_t optims;     /* optimizers created so far */
    uint32_t digest;     /* see lt_steps_digest() */
    uint32_t settings;   /* see lt_settings_digest(); the rest is for settings.c */
    struct lt_step_settings *noted;
    int n_noted;
    size_t noted_capacity;
    bool noted_read; /* the next step starts a new list */
};

/* The state of autograd in ctx, created on first use. Borrowed. NULL with LT_ENOMEM. */
struct lt_autograd *lt__autograd(lt_ctx *ctx);

lt_leaf *lt__leaf_of(lt_tensor *x); /* created if x has none. Borrowed. NULL with LT_ENOMEM */
void lt__leaf_release(lt_leaf *leaf);
void lt__leaf_forget_grad(lt_leaf *leaf);
/* Records that the running backward, or else the last one, has added to the gradient of leaf. */
void lt__leaf_added(lt_leaf *leaf);
/* Whether an optimizer step has used gradients of backward k, counted from 0. */
bool lt__backward_is_used(const struct lt_autograd *ag, uint64_t k);
/* Increments ag->backwards. */
void lt__count_backward(struct lt_autograd *ag);
/* Creates leaf->grad if needed: in the leaf's arena, or with memory of its own. */
lt_status lt__leaf_need_grad(lt_leaf *leaf);

/* Starts the deferred check of a backward on an accelerator. loss may be NULL. Returns the errors
 * of lt_synchronize(). */
lt_status lt__deferred_check_begin(lt_ctx *ctx, lt_tensor *loss);
/* Allocates the step check of the accelerator, unless an earlier backward has done so. */
lt_status lt__deferred_check_open(lt_ctx *ctx);
/* Marks the error as reported, because a synchronous check of the loss has failed. */
void lt__deferred_check_set_reported(lt_ctx *ctx);
/* Starts the copy of the step check to the host. */
lt_status lt__deferred_check_send(lt_ctx *ctx);
/* Whether the host knows of a loss or norm that is not finite and has not reported it yet. */
bool lt__deferred_check_is_unreported(const lt_deferred_check *check);
/* Frees an entry that is no longer in the list. */
void lt__bn_entry_free(lt_ctx *ctx, lt_bn_entry *entry);
/* lt_bn_stats_commit() for an optimizer step: does not synchronize. */
lt_status lt__bn_stats_commit(lt_ctx *ctx);
/* Keeps pending statistics until the optimizer step of their batch. */
void lt__bn_stats_keep(struct lt_autograd *ag);
/* Sets the error for a loss that is not finite. why: a sentence, or "". LT_ENUMERIC. */
lt_status lt__fail_loss(int64_t step, double value, const char *why);
/* Sets the error for a gradient norm that is not finite. LT_ENUMERIC. */
lt_status lt__fail_norm(int64_t step, double norm);
typedef struct
    lt_step_settings { /* the settings of one parameter group in a step of an optimizer */
    uint32_t optim;    /* the optimizer's number */
    int group;
    const lt_def *def;
    double clip; /* the largest norm; 0: no clipping */
    lt_opt opt[LT_MAX_OPT];
} lt_step_settings;

/* Adds the settings of a step to the digest and to the list. LT_ENOMEM. */
LT_NODISCARD lt_status lt__record_settings(struct lt_autograd *ag, uint32_t optim,
                                           const lt_def *def, const lt_opt *const *options,
                                           int n_groups, double clip);

/* Appends a node for the call to the tape, and sets it as the history of the outputs. */
lt_status lt__record(struct lt_autograd *ag, const lt_def *def, const lt_call *call,
                     int64_t first_row);
void lt__node_release(lt_node *node);
/* Releases the saved tensors and edges of a node, without recursion. Unlists it. */
void lt__node_free_saved(lt_node *node);

/* ==== Backward ================================================================================ */

/* The tape of the roots, or NULL if all are leaves. Borrowed. */
lt_tape *lt__tape_of(lt_tensor *const *roots, int n);
/* Marks the nodes that the roots were computed from, and counts the uses of their leaves; a root
 * that is a leaf is one use of it. LT_EINVAL if an earlier backward has freed some of the nodes. */
lt_status lt__mark(lt_tensor *const *roots, int n);
/* Clears the marks of a tape, and discards the partial gradients of a backward that failed. tape
 * may be NULL. */
void lt__unmark(lt_tape *tape);
/* Ends a backward for the first `begun` parts of the step. Counts it if it succeeded. Returns the
 * result. */
lt_status lt__backward_end(lt_ctx *ctx, int begun, lt_status status, bool is_dry);
/* A call of a node's op, with these inputs (n_in) and its saved outputs and gradients. in is
 * borrowed. */
lt_call lt__node_call(const lt_node *node, lt_tensor **in);

/* Computes the gradients of the inputs of node. split: sets node->later, and leaves those for
 * lt__node_back_later(). */
lt_status lt__node_back(lt_node *node, bool split);
lt_status lt__node_back_later(lt_node *node);
/* Prefixes the message of an error with the node's place. Returns the error. */
lt_status lt__node_failed(const lt_node *node);
/* dst += src. Through a half copy, src is f16 or bf16 while the parameter's gradient is f32. */
lt_status lt__grad_add(lt_tensor *dst, lt_tensor *src);
/* Passes grad itself on to the edge, as a view with the edge's dims, or adds it there. */
lt_status lt__edge_add(lt_edge *e, lt_tensor *grad);
/* Runs the hooks of a leaf whose gradient is complete. node used the leaf last; NULL if the leaf is
 * a root. A hook may release the tensor. */
lt_status lt__leaf_complete(struct lt_autograd *ag, lt_leaf *leaf, const lt_node *node);
/* LT_EINVAL if a deferred contribution of an earlier backward must be added first. */
lt_status lt__leaf_check_order(const lt_leaf *leaf);
/* After a backward that failed: discards what it has added, if that is still scaled. */
void lt__leaf_abandon(lt_leaf *leaf);
void lt__leaf_drop_dry_grad(lt_leaf *leaf);

lt_deferred_wgrad *lt__wgrad_new(lt_ctx *ctx); /* an empty list. New. NULL with LT_ENOMEM */
/* Adds a node whose `later` is not 0. Takes the walk's reference to it. */
void lt__wgrad_add(lt_deferred_wgrad *weights, lt_node *node);
lt_node *lt__wgrad_take(lt_deferred_wgrad *weights); /* removes and returns its first node. New */
/* Moves to the front the first node that adds to a gradient of `like`. Returns false if there is
 * none. */
bool lt__wgrad_bring(lt_deferred_wgrad *weights, const lt_node *like);
/* Adds it to the end of the lists of its context, or removes it from there. */
void lt__wgrad_list(lt_deferred_wgrad *weights);
void lt__wgrad_unlist(lt_deferred_wgrad *weights);
/* Frees a list that is not listed. NULL is allowed. */
void lt__wgrad_drop(lt_deferred_wgrad *weights);
/* Empties the lists of a context that closes. */
void lt__weights_close(lt_ctx *ctx);
/* LT_EINVAL if there is a list: "WHO WHAT while gradients of parameters are pending; ...". */
lt_status lt__weights_check_none(const struct lt_autograd *ag, const char *who, const char *what);
/* LT_EINVAL if there is a list and a part of the step is exclusive. */
lt_status lt__weights_check_overlap(const struct lt_autograd *ag);

/* ==== The parts of a step (step.c) ============================================================ */

static inline const lt_step_part *lt__step_scale(const struct lt_autograd *ag)
{
    return &ag->parts[LT_PART_SCALE];
}
/* The part that has `apply`, or NULL. Borrowed. */
const lt_step_part *lt__step_applier(const struct lt_autograd *ag);
/* *begun: the number of parts that have begun, including one that failed. */
lt_status lt__step_begin(struct lt_autograd *ag, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad,
                         int *begun);
lt_status lt__step_grad_begin(struct lt_autograd *ag, lt_tensor *x, lt_tensor *grad);
lt_status lt__step_grad_ready(struct lt_autograd *ag, lt_tensor *x, lt_tensor *grad);
/* Ends a backward of the training for the first `begun` parts. Returns the result. */
lt_status lt__step_end(struct lt_autograd *ag, lt_ctx *ctx, int begun, lt_status status);
/* Whether a part is exclusive, and none has is_last. */
bool lt__step_is_exclusive(const struct lt_autograd *ag);
/* Waits until no other thread writes gradients. Does nothing in backward: the exchange that writes
 * them cannot end before backward does. */
void lt__step_synchronize(struct lt_autograd *ag);
/* Sets ag->is_accumulating, and if so, the step's status. */
lt_status lt__step_prepare(struct lt_autograd *ag);
/* Completes the gradients and decides on the step. Sets its status. */
lt_status lt__step_decide(struct lt_autograd *ag, lt_ctx *ctx);
/* Whether other ranks take part in steps. */
bool lt__step_has_ranks(const struct lt_autograd *ag);

/* ==== Kernels ================================================================================= */

/* Whether a call is recorded: its op has a backward, and an input requires a gradient. dtype: of
 * its first result. */
bool lt__is_recorded(const struct lt_autograd *ag, const lt_op *op, lt_tensor *const *in, int n_in,
                     lt_dtype dtype);
/* Finds the stage of a parameter whose tree is placed. On other stages, x becomes a meta tensor.
 * LT_EINVAL if the stage does not exist. */
LT_NODISCARD lt_status lt__stages_assign(struct lt_autograd *ag, const char *name, lt_tensor *x);
/* Prepares a call in a pipeline. *stage: its stage. On this stage, all inputs have values
 * afterwards. On other stages, the results are made, as meta tensors. LT_EUSAGE if the op uses
 * parameters of two stages; LT_ENOMEM; the errors of the shape rule and of lt_stage_hooks. */
LT_NODISCARD lt_status lt__stages_apply(struct lt_autograd *ag, lt_ctx *ctx, const lt_def *def,
                                        lt_tensor **in, int n_in, const lt_opt *opts,
                                        lt_tensor **out, int *stage);
/* Where the values of a tensor are. Tensors that all ranks have need no home. */
struct lt_home {
    int stage;          /* the stage that has the values */
    bool requires_grad; /* x is a meta tensor here, but has a history on its stage */
    uint64_t sent_to;   /* stages to which the values were sent, as bits */
};
/* Whether x has no values here, but a history on its stage. */
bool lt__requires_grad_elsewhere(const lt_tensor *x);
/* The functions of lt_slots for tensors with a home. */
void lt__home_forget(lt_tensor *x, bool gone);
lt_status lt__home_inherit(lt_tensor *y, const lt_tensor *x);
lt_status lt__home_refuse(const lt_tensor *x);

/* A forward call. The caller sets the device and the remaining members. */
static inline lt_call lt__call_of(lt_ctx *ctx, const lt_def *def, lt_tensor **in, int n_in,
                                  const lt_opt *opts)
{
    return (lt_call){.ctx = ctx,
                     .op = def->op,
                     .schema = &def->schema,
                     .opt = opts,
                     .n_in = n_in,
                     .in = in,
                     .save = def->op->save,
                     .same_grad = def->op->same_grad};
}
/* Runs the forward or backward kernel of a call on its device. On the CPU: the fast or the
 * reference kernel, with f32 copies of halves if needed. Allocates scratch memory. */
lt_status lt__run_kernel(lt_call *call, const lt_def *def, bool backward);
/* Like lt_apply() for n > 0 calls of an in-place op, with their `in`, `n_in` and complete `opt`:
 * checks all, then runs them at once if the device can. Without casts and op hooks. */
lt_status lt__apply_all(lt_ctx *ctx, const lt_def *def, lt_call *calls, int n);
/* Whether all n tensors that a kernel of op would write are empty or NULL. The kernel must not run
 * then: another axis may be so long that its loops would practically never end. False if op needs
 * sums over ranks, since the other ranks wait for them. */
bool lt__is_idle(const lt_op *op, lt_tensor *const *to, int n);
/* The accelerator's kernels for an op, or NULL. */
const lt_kernels *lt__kernels_of(const struct lt_autograd *ag, const lt_def *def);

/* The flat arenas of one dtype: values and gradients. */
typedef struct lt_segment {
    atomic_int refs; /* trees, leaves, optimizers */
    lt_ctx *ctx;
    lt_dtype dtype;
    int64_t count;              /* elements, including padding */
    lt_storage *values, *grads; /* grads: created, zeroed, with the first gradient */
    uint32_t updates;           /* updates by optimizers, which bypass the version of `values` */
    lt_storage *half;           /* `values` converted to half_dtype, or NULL */
    lt_dtype half_dtype;
    uint32_t half_stamp; /* version of `values` + `updates` at the conversion */
} lt_segment;

/* A segment with zeroed values for count elements. New. NULL with LT_ENOMEM. */
lt_segment *lt__segment_new(lt_ctx *ctx, lt_dtype dtype, int64_t count);
lt_segment *lt__segment_retain(lt_segment *segment);
void lt__segment_release(lt_segment *segment);
lt_status lt__segment_need_grads(lt_segment *segment);

#endif
