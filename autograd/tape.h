/* tape.h - nodes, leaves and the state of autograd in a context. Private to this room.
 *
 * Who holds whom: a tensor holds the node that made it, or its leaf; a node's edges hold the
 * nodes and leaves of its inputs and what is saved for backward. A saved output is held through
 * a fresh handle without history, so nothing is held in a circle: when the last tensor of a
 * graph goes, the graph goes. A tape only lists its nodes, in order of recording, which is an
 * order of computation; backward walks that list in reverse.
 */
#ifndef LT_AUTOGRAD_TAPE_H
#define LT_AUTOGRAD_TAPE_H

#include "autograd/autograd.h"
#include "core/tensor.h"

typedef struct lt_hook {
    struct lt_hook *next;
    lt_grad_hook fn;
    void *ud;
    void (*free)(void *ud);
} lt_hook;

enum { LT_MAX_HOOKS = 1000 }; /* on one leaf */

typedef enum lt_role { LT_PLAIN, LT_PARAM, LT_BUFFER } lt_role;

/* Where the gradient of a tensor goes that no op made. */
typedef struct lt_leaf {
    atomic_int refs;
    lt_ctx *ctx;
    lt_tensor *x;             /* borrowed; NULL when x is gone */
    lt_tensor *grad;          /* its memory stays when the gradient is forgotten */
    lt_hook *hooks;
    int n_hooks;
    bool collects;              /* collects */
    bool has_grad;            /* grad holds a gradient; else the next one is written over it */
    bool touched;                /* something came in the running backward, or is about to */
    bool injects_inf;               /* its gradient is to have an inf: see lt_grad_fault() */
    lt_tensor *dry_grad;     /* what has come so far in the backward of a dry run, or NULL */
    const void *scaled_by;    /* ud of who has scaled the gradient, or NULL */
    int optims;               /* that have it */
    int uses;                 /* nodes that may still contribute in the running backward */
    lt_role role;
    lt_init init;
    lt_tensor *half;          /* what lt_half() gave last. It holds this leaf; it ends with x */
    struct lt_segment *segment; /* of a placed parameter or buffer: its arena, and where in it */
    int64_t offset;
    uint32_t version; /* counts updates by an optimizer, which writes many parameters at once */
} lt_leaf;

/* Changes whenever the elements of x are written in place. */
static inline uint32_t lt__version_of(const lt_tensor *x)
{
    return atomic_load_explicit(&x->storage->version, memory_order_relaxed) +
           (x->leaf ? x->leaf->version : 0);
}

typedef struct lt_edge {      /* an input of a node */
    struct lt_node *node;     /* the node that made it, */
    lt_leaf *leaf;            /* or the leaf that it is; neither: no gradient is wanted */
    lt_tensor *saved;         /* the input itself if backward reads it */
    uint32_t version;         /* of its storage when it was saved */
    uint8_t out_index;
    lt_spec spec;             /* dtype and dims, for its gradient */
} lt_edge;

typedef struct lt_node {
    atomic_int refs;          /* tensors and edges */
    bool freed;               /* backward has been here: nothing is saved any more */
    bool marked;              /* part of the running backward */
    uint8_t n_in, n_out, n_all; /* inputs; outputs; outputs with the extra ones */
    const lt_def *def;
    lt_ctx *ctx;
    lt_device *device;        /* of all its tensors */
    lt_tape *tape;            /* NULL once unlisted */
    struct lt_node *next, *prev;
    uint64_t stream;
    int64_t first_row;
    uint32_t same_grad;       /* as the op has it, for this call */
    lt_tensor *d_out[LT_MAX_OUT];     /* gradients that have come */
    lt_tensor *saved_out[LT_MAX_OUT];
    uint32_t out_version[LT_MAX_OUT]; /* of their storages when they were saved */
    char where[LT_WHERE_BYTES];
    lt_opt *opt;              /* schema.n_opt of them, behind the edges */
    lt_edge edge[];
} lt_node;

struct lt_tape {
    lt_ctx *ctx;
    lt_node *first, *last;
    int nodes;
    int64_t first_row;        /* in the global batch, of the pass that runs */
    uint64_t draws[2];        /* drawing calls so far in this pass; those with gradients off */
};

typedef struct lt_bn_entry {      /* merged statistics of one pair of buffers */
    struct lt_bn_entry *next;
    lt_tensor *running_mean, *running_var, *mean, *var;
    int64_t count;
    double momentum;
    uint64_t backward_period;           /* 1 + the period in which backward came by, or 0 */
} lt_bn_entry;

typedef struct lt_dry_run {
    bool on;
    lt_tape tape;             /* its own; and all that is to be put back: */
    lt_tape *before;
    lt_scaling scaling;
    lt_op_hook_fn op_hook;
    void *op_hook_ud;
    uint64_t draws;           /* of the context */
} lt_dry_run;

typedef struct lt_deferred_check {      /* of an accelerator: see lt_synchronize() */
    lt_check_loss_fn check_loss;
    lt_clip_fn clip;
    lt_step_check *on_device,
        *on_host; /* its own; memory of the CPU that it is sent to. NULL at first */
    uint64_t cleared;         /* 1 + the period in which it was */
    bool sent;                /* it is on its way, with mark behind it */
    uint64_t mark;
    lt_scaling pending_scaling;         /* whose resolve() waits for it; all NULL: nobody's */
    int64_t step, norm_step;  /* of the losses in it, and of the last norm, from 1 */
    double loss, norm;        /* not finite, and it has not failed yet; or 0 */
    bool reported;              /* since it was cleared: once is enough */
    struct lt_optim *pending_optims; /* optimizers whose last step is pending */
} lt_deferred_check;

struct lt_autograd {
    lt_def **defs;            /* by id */
    int n_defs, room;
    uint16_t by_name[512];    /* open addressing: id + 1, or 0 */
    const lt_kernels *kernels; /* of the accelerator, by id; NULL: there is none */
    int n_kernels;
    int no_grad_depth;                  /* depth of lt_grad_off */
    lt_tape default_tape, *tape;       /* the context's own; the current one */
    lt_grad_slots slots;
    lt_scaling scaling;       /* all NULL: there is none */
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
    lt_bn_entry *bn_stats;           /* in order of first appearance */
    uint64_t trees;           /* placed so far */
    bool in_backward;
    bool grads_complete;            /* slots.update was called since the last backward, */
    lt_step_status step_status;       /* and said so */
    lt_deferred_check deferred;
    const int32_t *skip;      /* for the calls of an optimizer step, or NULL */
    uint64_t period;          /* from one use of gradients, or their end, to the next */
    uint64_t backwards;       /* completed so far, without dry runs */
    uint32_t optims;          /* made so far */
    uint32_t digest;          /* see lt_steps_digest() */
    uint32_t settings;        /* see lt_settings_digest(), and settings.c for the rest */
    struct lt_noted *noted;
    int n_noted, noted_room;
    bool noted_read;          /* the next step begins the list anew */
};

/* The state of autograd in ctx, made on first use. NULL with LT_ENOMEM. */
struct lt_autograd *lt__autograd(lt_ctx *ctx);

lt_leaf *lt__leaf_of(lt_tensor *x); /* made if x has none. Borrowed. NULL with LT_ENOMEM */
void lt__leaf_release(lt_leaf *leaf);
void lt__leaf_forget_grad(lt_leaf *leaf);
/* leaf->grad exists: in its arena, or on its own. */
lt_status lt__leaf_need_grad(lt_leaf *leaf);

/* Before backward of a loss on an accelerator, which is looked at there. Fails as lt_synchronize()
 * does. */
lt_status lt__deferred_check_begin(lt_tensor *loss);
/* There is a step check on the accelerator, if no backward there has made one yet. */
lt_status lt__deferred_check_open(lt_ctx *ctx);
/* The failure for a loss has come otherwise. */
void lt__deferred_check_set_reported(lt_ctx *ctx);
/* What the step comes to is sent. */
lt_status lt__deferred_check_send(lt_ctx *ctx);
/* The host has heard that the step is none, and has not failed by it yet. */
bool lt__deferred_check_is_unreported(const lt_deferred_check *check);
/* lt_bn_stats_commit() of an optimizer step, which need not be synchronized. */
lt_status lt__bn_stats_commit(lt_ctx *ctx);
/* It is forgotten, with its memory. */
void lt__deferred_check_free(lt_ctx *ctx);
/* What a loss fails with that is not finite. */
lt_status lt__refuse_loss(int64_t step, double value, const char *why);
/* And that of clipping. */
lt_status lt__refuse_norm(int64_t step, double norm);
typedef struct lt_noted {     /* the settings of a group of parameters in a step of an optimizer */
    uint32_t optim;           /* its number */
    int group;
    const lt_def *def;
    double clip;              /* 0: none */
    lt_opt opt[LT_MAX_OPT];
} lt_noted;

/* Adds the settings of a step to the digest and to the list. LT_ENOMEM. */
LT_MUST lt_status lt__note_settings(struct lt_autograd *ag, uint32_t optim, const lt_def *def,
                                    const lt_opt *const *options, int n_groups, double clip);
/* The step that an optimizer is waiting for was applied or skipped: of all that are. */
void lt__optims_resolve(struct lt_deferred_check *check, lt_step_status step_status);

/* Appends a node for the call, with its outputs' and inputs' handles. */
lt_status lt__record(struct lt_autograd *ag, const lt_def *def, const lt_call *call,
                     int64_t first_row);
void lt__node_release(lt_node *node);
/* Lets go of all that backward would need. */
void lt__node_free_saved(lt_node *node);

/* Marks the nodes that from's results were computed from, and counts the uses of their leaves.
 * LT_EINVAL when an earlier backward has been through a part of them. */
lt_status lt__mark(lt_node *from);
/* From the last node of the tape: no mark is left behind, nor what came in a backward that has
 * failed. */
void lt__unmark(lt_node *last);

/* Runs forward or backward of call on its device. On the CPU: fast kernel or reference, halves
 * widened; either way scratch found. */
lt_status lt__run_kernel(lt_call *call, const lt_def *def, bool backward);
/* Whether all n tensors that a kernel of op would write to are empty or NULL. The kernel must not
 * run then: an axis beside the empty one may be so long that its loops would not end. */
bool lt__is_idle(const lt_op *op, lt_tensor *const *to, int n);
/* The accelerator's kernels for an op; NULL: it has none. */
const lt_kernels *lt__kernels_of(const struct lt_autograd *ag, const lt_def *def);

/* One dtype's flat arena. */
typedef struct lt_segment {
    atomic_int refs;          /* trees, leaves, optimizers */
    lt_ctx *ctx;
    lt_dtype dtype;
    int64_t count;            /* elements, padding included */
    lt_storage *values, *grads; /* grads: made, as zeros, when the first gradient comes */
    uint32_t updates;         /* by optimizers, which do not count in the version of values */
    lt_storage *half;         /* values in half_dtype, or NULL; made of them as of half_stamp */
    lt_dtype half_dtype;
    uint32_t half_stamp;      /* the version of values + updates */
} lt_segment;

void lt__segment_release(lt_segment *segment);
lt_status lt__segment_need_grads(lt_segment *segment);

#endif
