/* autograd.h - public header of autograd: ops, the tape, backward, hooks. It includes params.h,
 * optim.h, step.h and callbacks.h.
 *
 * An op is a constant lt_op: a signature, a shape rule and kernels. A context registers ops by
 * name. lt_apply() runs one: it checks the arguments, applies the shape rule, creates the outputs,
 * runs the kernel and records a node. Only optimizers bypass lt_apply(): they run their update op
 * directly on the arenas. Backward walks the nodes in reverse order. It is not recorded itself, so
 * second derivatives are not supported.
 *
 * Precondition. A function that takes an lt_ctx requires a context with ops: one from lt_open(), or
 * one from lt_ctx_new() after the first lt_op_register(). Before that, call only lt_op_register(),
 * lt_op_find(), lt_op_at() and constructors.
 */
#ifndef LUATRAIN_AUTOGRAD_H
#define LUATRAIN_AUTOGRAD_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Signatures and options ================================================================== */

/* "conv2d(x, w, b?; stride=1, pad=0, dilation=1, groups=1)"
 *
 * Inputs come before the semicolon: `b?` is optional, `x...` means one or more tensors. Options
 * follow. The form of the default determines the kind of an option:
 *   stride=1        integers: one, or a list of them, such as a value per axis
 *   eps=1e-5        a number (its default has a point or an exponent, or is inf or -inf)
 *   lr#             a number, required
 *   train=false     true or false
 *   act=none|relu   one of these words; the first is the default
 *   dtype=f32       a dtype
 *   stride=kernel   integers that default to the value of an earlier option, here `kernel`
 *   kernel          integers, required
 *   axis?           integers, optional
 * An option named dtype is a dtype even without a default.
 *
 * Options named axis, axes, first and last are positions: C counts them from 0, Lua from 1.
 * Negative positions count from the end in both. */
enum { LT_MAX_IN = 6, LT_MAX_OUT = 4, LT_MAX_OPT = 8, LT_MAX_LIST = 64 };

typedef enum lt_kind {
    LT_KIND_INTS,
    LT_KIND_NUMBER,
    LT_KIND_BOOL,
    LT_KIND_DTYPE,
    LT_KIND_WORD
} lt_kind;

typedef struct lt_opt { /* one option of one call */
    uint8_t kind;       /* lt_kind */
    uint8_t n;          /* number of values; 0 if it is not given and has no default */
    union {
        /* LT_KIND_INTS; the other kinds store a bool, an lt_dtype or the index of a word in i[0] */
        int64_t i[LT_MAX_DIMS];
        double f; /* LT_KIND_NUMBER */
    };
} lt_opt;

typedef struct lt_schema {
    char name[24];
    int n_in, min_in; /* number of inputs, and of required inputs */
    bool variadic;    /* the last input is a list of one or more tensors */
    int n_opt;
    struct {
        char name[16];
        bool optional;
    } in[LT_MAX_IN];
    struct {
        char name[16];
        bool optional, position; /* an option such as `axis?`; a position, see above */
        int8_t same_as;          /* index of the option whose value is the default, or -1 */
        lt_opt value;            /* the kind and the default */
        const char *words;       /* LT_KIND_WORD: the word list within the signature. Borrowed */
    } opt[LT_MAX_OPT];
} lt_schema;

/* Parses a signature. LT_EINVAL, with the position, if it is malformed. The schema borrows
 * signature. */
LT_MUST lt_status lt_schema_parse(const char *signature, lt_schema *schema);
/* Index of an option by name, or -1. Sets no error. */
LT_API int lt_schema_index(const lt_schema *schema, const char *option);
/* Like lt_schema_index(), but sets an error if there is no such option: "unknown option 'strides'
 * (did you mean 'stride'?)". */
LT_API int lt_schema_find(const lt_schema *schema, const char *option);
/* Index of a word in the word list of option k, an LT_KIND_WORD. If the word is not in the list,
 * returns -1 with an error such as "option 'act' must be none, relu or relu6, but is 'rellu' (did
 * you mean 'relu'?)". */
LT_API int lt_schema_word(const lt_schema *schema, int k, const char *word);
/* Fills opts[0..n_opt) from the defaults and a string such as "stride=2 pad=1,1 train=true". text
 * may be NULL. LT_EINVAL if an option is unknown, malformed or given twice, or a required one is
 * missing. */
LT_MUST lt_status lt_opts_parse(const lt_schema *schema, const char *text, lt_opt *opts);
/* The two halves of lt_opts_parse(), for bindings. lt_opts_clear() marks all options as not given;
 * lt_opts_complete() fills in the defaults. LT_EINVAL if a required option is missing. */
LT_API void lt_opts_clear(const lt_schema *schema, lt_opt *opts);
LT_MUST lt_status lt_opts_complete(const lt_schema *schema, lt_opt *opts);

/* ==== Op definitions ========================================================================== */

typedef struct lt_op lt_op;
typedef struct lt_def lt_def;
typedef struct lt_call lt_call;

typedef struct lt_spec { /* an output that has no memory yet */
    lt_dtype dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    int view;       /* 1 + index of the input that it views; 0 if it has its own memory */
    int64_t offset; /* offset of the view, in elements */
} lt_spec;

/* One run of a kernel. Forward reads `in` and writes `out`. Backward reads the saved tensors and
 * d_out, and writes each d_in that is not NULL: it overwrites d_in[i], or adds to it if bit i of
 * `add` is set. */
struct lt_call {
    lt_ctx *ctx;
    struct lt_device *device; /* device of all tensors of the call; see tensor.h */
    const lt_op *op;
    const lt_schema *schema;  /* names, for messages */
    const lt_opt *opt;        /* options, in the order of the signature */
    int n_in;                 /* inputs of the call; absent optional ones are NULL */
    lt_tensor **in;           /* backward: NULL unless saved */
    lt_tensor **out;          /* outputs, then extra ones; backward: NULL unless saved */
    lt_tensor **d_out;        /* one gradient per output; NULL means zero */
    lt_tensor **d_in;         /* (n_in) NULL where no gradient is needed */
    uint64_t add;             /* bit i: add to d_in[i] */
    uint64_t leaves;          /* backward, bit i: d_in[i] is the gradient of a leaf */
    uint32_t save, same_grad; /* as in lt_op, but the shape rule may change them */
    lt_spec *spec;            /* shape rule only: one per element of `out` */
    bool draws;               /* a shape rule sets it if the kernel uses `rng_stream` */
    void *scratch;            /* device memory of scratch() bytes, 64-byte aligned */
    size_t scratch_bytes;
    double *sums; /* n_sums numbers, or NULL; see lt_op.sums */
    bool summed;  /* `sums` contains the sums over all ranks */
    int64_t n_sums;
    int threads;
    /* keys of random numbers. rng_stream is lt_random_step() << 32 | index of this call among the
     * random calls of its pass. With gradients off, bit 63 is set, and the calls are counted
     * separately */
    uint64_t seed, rng_stream;
    uint64_t number;   /* number of the forward call in its context */
    int64_t first_row; /* index of row 0 in the global batch */
    /* in-place ops on an accelerator: flag in device memory, or NULL. If the flag is not 0 when the
     * kernel runs, the kernel changes nothing */
    const int32_t *skip;
    /* update ops: factor for the gradients, in memory of the device; NULL means 1 */
    const double *factor;
};

typedef lt_status (*lt_kernel)(lt_call *call);

/* Statistics of numbers such as gradients. */
typedef struct lt_grad_stats {
    double largest;     /* largest finite magnitude; 0 if no number is finite */
    int64_t not_finite; /* number of infs and NaNs */
} lt_grad_stats;

/* The state of a step in the memory of an accelerator. The host gets a copy later. */
typedef struct lt_step_check {
    int32_t skip; /* not 0: the step changes nothing */
    int32_t padding;
    double loss;         /* the first loss that is not finite, or 0 */
    lt_grad_stats grads; /* statistics of checked gradients; not_finite > 0 sets skip */
    /* factor: multiplies the gradients, to clip them. norm: the norm of the gradients if it is not
     * finite, which sets skip; otherwise 0 */
    double factor, norm;
} lt_step_check;

#define LT_SCRATCH_FAILED SIZE_MAX

/* The kernels of an accelerator for one op. They accept f16 and bf16 tensors directly, and return
 * when the work is queued in the stream of the device. The rules of lt_op.grad_in_place and
 * lt_call.add apply to them too. */
typedef struct lt_kernels {
    /* Returns the number of bytes of device memory that the kernel needs as lt_call.scratch; on
     * failure, LT_SCRATCH_FAILED with this thread's message set. NULL means 0 bytes. */
    size_t (*scratch)(const lt_call *call, bool backward);
    lt_kernel fwd, bwd; /* kernels, or NULL. LT_EUNSUPPORTED for other dtypes or options */
    /* Runs n forward calls of an in-place op at once. NULL: fwd runs them one by one */
    lt_status (*fwd_all)(lt_call *calls, int n);
    /* Called for an input i that is the half copy of a parameter, in f16 or bf16. Returns whether
     * bwd of this call writes the gradient of the input in f32. Otherwise d_in[i] has the dtype of
     * the input, and is converted after bwd. NULL: never. The function must not use call->d_in */
    bool (*f32_grad)(const lt_call *call, int i);
} lt_kernels;

/* Tensors that backward may read: inputs, outputs, extra outputs. LT_SAVE_IN(7) means input 7 and
 * all later ones. */
#define LT_SAVE_IN(i) (1u << (i))
#define LT_SAVE_OUT(i) (1u << (8 + (i))) /* i counts outputs, then extra outputs */

/* What autocast does to an op. */
typedef enum lt_cast_policy {
    LT_CAST_ANY,   /* nothing: it gets its inputs as they are */
    LT_CAST_HALF,  /* runs it in half precision */
    LT_CAST_F32,   /* runs it in f32 */
    LT_CAST_WIDEST /* converts its inputs to the widest of their dtypes */
} lt_cast_policy;

struct lt_op {
    const char *sig;
    const char *doc; /* one sentence with the formula */
    lt_cast_policy cast;
    uint8_t n_out; /* number of tensors it returns; 0 means 1, or none if in_place is set */
    uint8_t n_aux; /* extra outputs, visible to backward and `after` only */
    /* bit i: the op writes input i. An op with such a bit returns nothing, is never recorded, and
     * is not part of the Lua API */
    uint8_t in_place;
    bool whole_params; /* an update op that must run on one whole parameter at a time */
    bool to_floats;    /* integer inputs are cast to the dtype of the float input, else to f32 */
    bool any_dtype;    /* kernels take f16 and bf16 directly; otherwise they get f32 copies */
    /* the fast kernels take bf16 directly. Some tensors of such a call are f32: parameters, and the
     * gradients of half copies (lt_half). When the fast kernels return LT_EUNSUPPORTED, the
     * reference kernel gets f32 copies */
    bool fast_bf16;
    uint32_t save; /* LT_SAVE_* */
    /* bit i: the gradient of input i is d_out[0] itself, if their counts and dtypes are equal */
    uint32_t same_grad;
    /* bit i, set for at most one input: d_in[i] may share the memory of d_out[0] if nothing else
     * reads d_out[0]. The kernel must read an element before it writes it, and write all other d_in
     * first */
    uint8_t grad_in_place;
    /* bit i: the gradient of input i, a parameter, may be computed by a second call of backward,
     * see lt_backward_from(). The first call then has d_in[i] = NULL */
    uint8_t weights;
    /* Returns whether the backward of this call, on the CPU, gives the same bits when it is split.
     * d_in[i] has the dtype and dims of the gradient of input i, and must not be written. NULL
     * means that the bits are always the same. */
    bool (*can_split)(const lt_call *call);
    lt_status (*shape)(lt_call *call);                     /* checks in and opt, fills spec */
    size_t (*scratch)(const lt_call *call, bool backward); /* NULL: no scratch memory */
    /* Returns how many numbers of the kernel must be summed over all ranks; the first one is a
     * count. NULL means 0. With several ranks (lt_set_allreduce()) the kernel runs twice. In the
     * first run it fills call->sums. In the second run call->summed is set, and the kernel uses the
     * sums over all ranks. In all other cases call->sums is NULL, and the kernel uses the numbers
     * that it computes itself. */
    int64_t (*sums)(const lt_call *call, bool backward);
    /* An op without bwd, fast_bwd and same_grad is not differentiable. */
    lt_kernel fwd, bwd; /* reference kernels, or NULL. Views need no fwd */
    lt_kernel fast_fwd,
        fast_bwd; /* fast CPU kernels, or NULL. After LT_EUNSUPPORTED the reference kernel runs */
    lt_status (*after)(lt_call *call); /* called after each forward, recorded or not; or NULL */
};

struct lt_def { /* an op as registered in one context */
    const lt_op *op;
    lt_schema schema;
    lt_opt defaults[LT_MAX_OPT]; /* valid unless must_give */
    bool must_give;              /* some option is required */
    int id;                      /* order of registration */
};

/* How many tensors op returns. In lt_call.out, the n_aux extra outputs follow these tensors. */
static inline int lt_op_outputs(const lt_op *op) { return op->n_out ? op->n_out : !op->in_place; }
/* Registers op, which is borrowed as long as ctx exists. LT_EINVAL if the signature is malformed,
 * the name is taken, the doc, shape rule or kernels are missing, or a limit is exceeded;
 * LT_ENOMEM. */
LT_MUST lt_status lt_op_register(lt_ctx *ctx, const lt_op *op);
/* The op with this name. NULL with LT_EINVAL and a suggestion, or with LT_ENOMEM. Borrowed. */
LT_API const lt_def *lt_op_find(lt_ctx *ctx, const char *name);
/* Op i in order of registration; NULL past the end. Borrowed. */
LT_API const lt_def *lt_op_at(lt_ctx *ctx, int i);
/* Checks a loss of one element on an accelerator, in its stream. If the loss is not finite, sets
 * check->skip, and stores the loss in check->loss unless an earlier loss is stored there. */
typedef lt_status (*lt_check_loss_fn)(lt_tensor *loss, lt_step_check *check);
/* Sets check->factor = min(1, max_norm / norm), also in the stream. `squares` is an f64 scalar, the
 * square of the norm. If the norm is not finite, stores it in check->norm and sets check->skip. */
typedef lt_status (*lt_clip_fn)(lt_tensor *squares, double max_norm, lt_step_check *check);
/* Sets the accelerator's kernels for ops 0..n-1, by lt_def.id. kernels is borrowed as long as ops
 * run. */
LT_API void lt_set_kernels(lt_ctx *ctx, const lt_kernels *kernels, int n,
                           lt_check_loss_fn check_loss, lt_clip_fn clip);

/* ==== Running ops ============================================================================= */

/* Runs an op: out[0..n_out) = def(in[0..n_in)). The outputs are new. opts: NULL for all defaults,
 * or n_opt complete options. Absent optional inputs are NULL or omitted. LT_EINVAL for invalid
 * inputs or options; LT_EUNSUPPORTED if no kernel supports the call; LT_ENOMEM; or the device's
 * error. out is not set on failure. */
LT_MUST lt_status lt_apply(lt_ctx *ctx, const lt_def *def, lt_tensor *const *in, int n_in,
                           const lt_opt *opts, lt_tensor **out);
/* Runs an op that returns one tensor, by its name and an option string, which may be NULL. The list
 * of inputs ends with NULL. New. NULL with the errors of lt_op_find(), lt_opts_parse() and
 * lt_apply(). A missing input may be the NULL of a nested call that failed. So if a required input
 * is missing and the thread has an earlier error, this call fails with the code of the earlier
 * error, and its message ends with the earlier message.
 *     lt_tensor *y = lt_run(ctx, "conv2d", "stride=2 pad=1", x, w, b, NULL); */
LT_API lt_tensor *lt_run(lt_ctx *ctx, const char *op, const char *options, ...)
    __attribute__((sentinel));
/* Like lt_run(), with the inputs in an array. */
LT_API lt_tensor *lt_runv(lt_ctx *ctx, const char *op, const char *options, lt_tensor *const *in,
                          int n_in);

/* lt_grad_off() stops the recording of ops until the matching lt_grad_on(). Calls nest; an
 * unmatched lt_grad_on() does nothing. */
LT_API void lt_grad_off(lt_ctx *ctx);
LT_API void lt_grad_on(lt_ctx *ctx);
LT_API bool lt_grad_enabled(const lt_ctx *ctx);

/* ==== The tape and backward =================================================================== */

/* If `on` is true, makes x a leaf that collects a gradient; otherwise x no longer collects a
 * gradient. LT_EINVAL if x is dead or the result of a recorded op, or if `on` is true and x is a
 * buffer or does not have a float dtype; LT_ENOMEM. */
LT_MUST lt_status lt_set_requires_grad(lt_tensor *x, bool on);
/* True for leaves that collect a gradient and for all tensors computed from them. */
LT_API bool lt_requires_grad(const lt_tensor *x);
/* The gradient of a leaf, or NULL if none was computed since lt_zero_grad(). Borrowed. */
LT_API lt_tensor *lt_grad(lt_tensor *x);
/* Discards the gradient: the next backward overwrites the tensor that lt_grad() returned instead of
 * adding to it. */
LT_API void lt_zero_grad(lt_tensor *x);
/* The values of x without its history, as a view. New. NULL with the errors of lt_view(). */
LT_API lt_tensor *lt_detach(lt_tensor *x);

/* Adds d loss / d leaf to the gradient of every leaf that loss was computed from. grad is the
 * gradient of the loss, with the same dims, dtype and device; NULL means 1, and requires a loss of
 * one element. grad is not changed. Backward frees the saved tensors, so a second one through the
 * same nodes fails with LT_EINVAL. LT_EINVAL also for a loss that requires no gradient, and in a
 * hook. LT_ENUMERIC for a loss of one element that is not finite; on an accelerator this error is
 * deferred, see lt_synchronize(). Also LT_ENOMEM, and the errors of kernels and hooks. */
LT_MUST lt_status lt_backward(lt_tensor *loss, lt_tensor *grad);

/* The second half of a split backward: gradients of parameters that the first half has not
 * computed. */
typedef struct lt_deferred_wgrad lt_deferred_wgrad;

/* Runs one backward from several roots, as if from the sum of roots[i] * grads[i]. A rank of a
 * pipeline starts from the gradients that the next rank has sent. grads[i] is like the argument of
 * lt_backward(), but already scaled if there is a loss scale. One grads[i] may be NULL: then
 * roots[i] is the loss, as in lt_backward(loss, NULL). Roots are on one tape and may depend on each
 * other; gradients of equal roots are added in their order. With n = 0 only the parts of the step
 * run.
 *
 * If weights is NULL, runs a whole backward. Otherwise the backward is split (zero bubble,
 * arXiv:2401.10241): lt_backward_weights() computes the gradients of the parameters of convolutions
 * and linear layers, with the same bits. The gradients of a layer are not deferred if a parameter
 * has another use in this backward, or if its kernels could then give other bits (bf16 on some
 * CPUs). *weights is new. The backward ends with lt_backward_weights(), which calls
 * lt_step_part.end. Until then the saved tensors that the second half needs must stay alive and
 * unchanged. A dry run is not split.
 *
 * While gradients are pending, lt_optim_step() fails with LT_EINVAL, parts of the step must not be
 * replaced (lt_set_part()), and lt_grad() does not wait for other ranks. Another backward fails if
 * its first half would add to a pending gradient, or if a part is exclusive. A reducer is exclusive
 * unless it is blocking, has vranks or belongs to a pipeline.
 *
 * The errors of lt_backward(); also LT_EINVAL if a root belongs to another context, if the roots
 * are on several tapes, or if more than one of grads is NULL. *weights is NULL on failure. */
LT_MUST lt_status lt_backward_from(lt_ctx *ctx, lt_tensor *const *roots, lt_tensor *const *grads,
                                   int n, lt_deferred_wgrad **weights);
/* Computes the pending gradients and runs their hooks, in the order of a whole backward. weights is
 * taken. LT_EINVAL if an earlier backward is pending, if lt_zero_grad() has discarded a pending
 * gradient, in a hook, or in a dry run that began after the first half. In these cases the pending
 * gradients are discarded, as by lt_deferred_wgrad_free(). Also the errors of kernels, hooks and
 * parts. */
LT_MUST lt_status lt_backward_weights(lt_deferred_wgrad *weights);
/* Computes the pending gradients of all split backwards of ctx, with the same bits as
 * lt_backward_weights() for each of them, the oldest first. But it works layer by layer, from the
 * last to the first, and completes all gradients of a layer at once. So a reducer can send them
 * early. The backwards end together. Each lt_deferred_wgrad must still be freed. The errors of
 * lt_backward_weights(). An error discards all pending gradients, unless the call was in a hook or
 * in a dry run. */
LT_MUST lt_status lt_backward_weights_all(lt_ctx *ctx);
/* Discards the pending gradients, and ends the backward: calls lt_step_part.end with LT_EINVAL.
 * NULL is allowed. */
LT_API void lt_deferred_wgrad_free(lt_deferred_wgrad *weights);

/* An accelerator runs asynchronously, and decides itself whether a step is applied. The host learns
 * the decision later: at the latest at the start of the next backward, which waits for the work
 * queued before the last optimizer step. Until then
 *   - a loss that is not finite, or such a gradient norm in lt_optim_step_clipped(), has not caused
 *     an error yet. The next backward or lt_synchronize() reports it. The step with this loss or
 *     norm changes no weights, slots or running statistics. Later steps change nothing either,
 *     until a step or lt_zero_grad() discards gradients and a new backward starts;
 *   - the status of an optimizer step is LT_PENDING.
 * Deferred and immediate decisions give bit-identical results. With a timer, a trace or an op hook,
 * each loss is checked synchronously.
 *
 * Blocks until all decisions on the accelerator are known. LT_ENUMERIC for a loss or norm as above,
 * once; LT_OK; or the accelerator's error. Does nothing without an accelerator. */
LT_MUST lt_status lt_synchronize(lt_ctx *ctx);
/* Like lt_synchronize(), for callers that cannot report an error. The next lt_synchronize() reports
 * the error instead. */
LT_API void lt_synchronize_quiet(lt_ctx *ctx);

/* A tape stores the state of one pass over one part of the batch: its nodes, its first row in the
 * global batch and its count of random calls. Each context has a default tape; pipelines use
 * several. Recording an op fails with LT_EINVAL if an input was recorded on a tape other than the
 * current one. */
typedef struct lt_tape lt_tape;
LT_API lt_tape *lt_tape_new(lt_ctx *ctx); /* new; NULL with LT_ENOMEM */
/* Frees the tape and its nodes. If it is the current tape, the default tape is used from now on.
 * NULL is allowed. */
LT_API void lt_tape_free(lt_tape *tape);
/* Records on tape from now on; NULL selects the default tape. tape is borrowed until the next call.
 * Returns the previous tape. Borrowed. */
LT_API lt_tape *lt_tape_use(lt_ctx *ctx, lt_tape *tape);
LT_API lt_tape *lt_tape_current(lt_ctx *ctx); /* borrowed */
/* Starts a pass over rows of the global batch from first_row on, and restarts the count of random
 * calls. So micro-batches draw the same numbers as the whole batch, and a step draws the same
 * numbers whatever ran before it. An optimizer step does this with row 0 for the current tape. */
LT_API void lt_tape_set_first_row(lt_tape *tape, int64_t first_row);
LT_API int lt_tape_nodes(const lt_tape *tape); /* number of nodes on the tape */
/* Tensor i among the tensors saved for the backward of the op that made x: inputs, then outputs.
 * NULL past the last one, or if x has no history. Borrowed. */
LT_API lt_tensor *lt_saved(const lt_tensor *x, int i);

/* ==== Hooks =================================================================================== */

/* Called once per backward for leaf x, after the last contribution to its gradient. grad is that
 * gradient, including contributions of earlier backward passes. x and grad are borrowed. An error
 * ends the backward. Hooks run in order of registration, and ops in them are not recorded. A hook
 * may change grad. If it discards grad with lt_zero_grad() and other ranks need it, backward fails
 * with LT_EINVAL. A hook may release x, which lives until all its hooks have run. Hooks registered
 * while hooks of x run are first called in the next backward. Hooks must not call backward or free
 * the tape. */
typedef lt_status (*lt_grad_hook)(void *ud, lt_tensor *x, lt_tensor *grad);
/* ud is taken: free(ud), if not NULL, is called when the leaf is freed, or at once on failure. A
 * hook lives as long as its leaf. LT_EINVAL for the result of an op, and for the 1001st hook;
 * LT_ENOMEM. */
LT_MUST lt_status lt_on_grad(lt_tensor *x, lt_grad_hook hook, void *ud, void (*free)(void *ud));

/* For tests: declares param as the parameter NAME of the fault inf:rank=0:step=7:param=NAME, see
 * lt_config. rank is this rank. If the fault is for this rank, the gradient of param gets an inf in
 * that step. In a context with such a fault, lt_optim_step() fails with LT_EUSAGE until this
 * function is called. */
LT_API void lt_grad_fault(lt_tensor *param, int rank);

/* The outcome of an optimizer step. */
typedef enum lt_step_status {
    LT_APPLIED,
    LT_SKIPPED,      /* nothing changes, not even the running statistics */
    LT_ACCUMULATING, /* no step yet: more micro-batches of this batch follow */
    LT_PENDING       /* applied or skipped; only the accelerator knows: see lt_synchronize() */
} lt_step_status;

/* ==== Batch-norm statistics =================================================================== */

/* Batch norm computes the mean and the biased variance of its shard. The running values are updated
 * once per step from the statistics of all shards, weighted by count. This function adds one
 * shard's statistics of `count` values per channel for the given running buffers. The tensors are
 * kept; mean and var must not be changed while these statistics are pending. Shards of the same
 * buffers are merged by Chan's formula in order of arrival. LT_EINVAL if count is negative or the
 * sum of counts overflows; LT_ENOMEM. This section requires a context from lt_open(). */
LT_MUST lt_status lt_bn_stats_add(lt_ctx *ctx, lt_tensor *running_mean, lt_tensor *running_var,
                                  lt_tensor *mean, lt_tensor *var, int64_t count, double momentum);
/* Updates the running values from the pending statistics, and then discards these statistics. Each
 * applied optimizer step does the same. Calls lt_synchronize() first and returns its errors. */
LT_MUST lt_status lt_bn_stats_commit(lt_ctx *ctx);
/* Like lt_bn_stats_commit(), for code that reads the running values, such as module:eval() and
 * saving. Leaves statistics pending if they were pending during a backward and neither an optimizer
 * step nor lt_zero_grad() has followed, so that reading does not change the training. */
LT_MUST lt_status lt_bn_stats_synchronize(lt_ctx *ctx);
LT_API int lt_bn_stats_pending(const lt_ctx *ctx); /* number of pending entries */
typedef struct lt_bn_stats {
    lt_tensor *running_mean, *running_var, *mean, *var;
    int64_t count;
    double momentum;
} lt_bn_stats;
/* Gets entry i of the pending statistics, with the shards merged. Returns false past the last
 * entry. The tensors are borrowed until the pending statistics change. */
LT_API bool lt_bn_stats_at(const lt_ctx *ctx, int i, lt_bn_stats *stats);
/* Discards all pending statistics. */
LT_API void lt_bn_stats_clear(lt_ctx *ctx);

#ifdef __cplusplus
}
#endif

#include "autograd/params.h"
#include "autograd/optim.h"
#include "autograd/step.h"
#include "autograd/callbacks.h"

#endif
