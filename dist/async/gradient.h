/* gradient.h - the packed gradient of one optimizer step: what a worker pushes to the server.
 * Private to dist.
 *
 * The gradients of the parameters that have one follow each other in one storage. Each starts at a
 * multiple of 64 bytes, after zeros, so parameters that are adjacent in an arena are adjacent here,
 * too. The server applies gradients where they are: in a simulation in memory of the device, in
 * live training in the message that pushes them. Such a message contains, each part padded to 64
 * bytes: whether each parameter has a gradient; the options of each group; an lt_bn_entry for each
 * batch norm; the means and variances of the batch norms; the gradients.
 */
#ifndef LT_DIST_ASYNC_GRADIENT_H
#define LT_DIST_ASYNC_GRADIENT_H

#include "core/tensor.h"
#include "dist/async/image.h"
#include "dist/mail/mail.h"

typedef struct lt_bn_entry { /* a batch norm, in a message */
    int64_t mean, var;       /* indices of the running statistics in the net's buffers */
    int64_t count;           /* see lt_bn_stats, also for momentum */
    double momentum;
} lt_bn_entry;

typedef struct lt_gradient { /* all zeros: not open */
    const lt_image *net;     /* borrowed */
    bool is_live;            /* the gradient is stored in a message */
    bool skip;               /* the worker skipped the step: there is no gradient */
    double loss, lr;         /* see lt_async_event */
    bool *present;           /* (parameters) whether each one has a gradient */
    size_t *at;              /* (parameters) where these gradients start in the storage, in bytes */
    size_t end;              /* end of the last gradient in the storage, in bytes */
    int n_groups, n_bn;
    lt_opt *opt;            /* (n_groups, LT_MAX_OPT) options of the step */
    const lt_opt **options; /* (n_groups) pointers into opt */
    lt_bn_stats *bn;        /* (n_bn) batch-norm statistics; the tensors are kept */
    lt_storage *storage;
    lt_message *message; /* the message that a worker will send, or NULL */
} lt_gradient;

/* Opens a gradient of net, which is borrowed. is_live: the storage is a message. LT_ENOMEM. */
LT_NODISCARD lt_status lt__gradient_open(lt_gradient *g, const lt_image *net, bool is_live);
void lt__gradient_close(lt_gradient *g); /* does nothing if g is not open */

/* gradient.c: on a worker. */
/* Stores the gradient of a step, for lt_step_part.apply: copies the gradients of the optimizer
 * times factor, the options and the pending batch-norm statistics of the context. LT_ENOMEM;
 * LT_EUSAGE if a message cannot have the statistics, because their running values are not buffers
 * of the net; or the device's error. */
LT_NODISCARD lt_status lt__gradient_store(lt_gradient *g, const lt_opt *const *options,
                                          lt_step_status step_status, double factor);
/* Makes room in the storage for the gradients of the parameters in g->present, and sets them to
 * zero. LT_ENOMEM, or the device's error. */
LT_NODISCARD lt_status lt__gradient_place(lt_gradient *g);

/* The bytes of the message that pushes this gradient, whether or not the gradient is in one. */
size_t lt__gradient_message_bytes(const lt_gradient *g);

/* gradient_view.c: on the server. */
/* Makes g a view of the gradient in a message, valid as long as the message exists. LT_EDESYNC if
 * the message does not fit the net; LT_ENOMEM. */
LT_NODISCARD lt_status lt__gradient_view(lt_gradient *g, const lt_message *message);
/* Updates the running statistics of batch norm. */
LT_NODISCARD lt_status lt__gradient_commit_bn(const lt_gradient *g);

/* Both: */
/* The number of groups whose options the step needs: all up to the last one with a gradient. */
int lt__gradient_count_groups(const lt_gradient *g);
/* The gradients of a range of parameters that all have one. New. NULL with LT_ENOMEM. */
lt_tensor *lt__gradient_range(const lt_gradient *g, const lt_optim_range *range);
/* Makes room for the options of n_groups groups and for the statistics of n_bn batch norms, and
 * clears the statistics. LT_ENOMEM. */
LT_NODISCARD lt_status lt__gradient_reserve(lt_gradient *g, int n_groups, int n_bn);
/* Sets g->at and g->end: the first gradient starts at `begin`. */
void lt__gradient_set_places(lt_gradient *g, size_t begin);
/* Replaces the storage by the data of a message, which is borrowed. LT_ENOMEM. */
LT_NODISCARD lt_status lt__gradient_set_message(lt_gradient *g, const lt_message *message);
static inline size_t lt__gradient_padded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#endif
