/* device_comm.h - what the accelerators of several ranks do among themselves: sums of gradients
 * that never leave their devices. A part of tensor.h.
 *
 * An accelerator that can do so has a table of calls, as a plugin supplies it. None of them waits
 * for the device, nor for another rank: what was begun goes on until poll() says that it is done,
 * and who asks has the patience. All calls for a rank's communicator come from one thread at a
 * time. What the library fails with is LT_EPEER, with its own sentence; the device, LT_EENV. Then
 * only close() is left.
 */
#ifndef LT_CORE_DEVICE_COMM_H
#define LT_CORE_DEVICE_COMM_H

#include "core/core.h"

struct lt_device;

enum {
    LT_COMM_ID_BYTES = 128,        /* bytes of what the communicators of a job have in common */
    LT_COMM_NAME_BYTES = 64,
    LT_COMM_TAIL = 256       /* numbers that may go with a sum */
};

typedef struct lt_device_comm {     /* this rank's end; the plugin's own part follows */
    const struct lt_device_comm_calls *calls;
    double largest;           /* what was looked for, when it is done: of what is finite, 0 if */
    int64_t not_finite;       /* nothing is; and how many are not */
    float *tail;              /* LT_COMM_TAIL numbers: written before a sum, of which they are then
                               * those of all ranks. On the CPU */
} lt_device_comm;

typedef struct lt_bucket_range {     /* elements of a bucket */
    int64_t at, count;
} lt_bucket_range;

typedef struct lt_device_sum { /* data = the sum over all ranks of scale * data */
    void *data;               /* (count) on the device, like all that follows */
    int64_t count;
    lt_dtype dtype;           /* a float dtype */
    lt_dtype wire;            /* what is summed: dtype, or a half where that is f32 */
    void *on_wire;            /* (count) of that; NULL where wire is dtype: data itself then */
    double scale;             /* of this rank; applied in f32, of f64 in f64, and then rounded */
    int n_tail;               /* numbers of peers->tail */
} lt_device_sum;

typedef struct lt_device_comm_calls {
    /* A name of this device that no other has, on any machine. LT_EENV: what is missing. */
    lt_status (*identify)(struct lt_device *device, char name[LT_COMM_NAME_BYTES]);
    /* What all communicators open with: one of them makes it. */
    lt_status (*make_id)(struct lt_device *device, char id[LT_COMM_ID_BYTES]);
    /* Begins to come together with the others, which do the same. New. LT_ENOMEM too. */
    lt_status (*open)(struct lt_device *device, const char id[LT_COMM_ID_BYTES], int rank, int size,
                      lt_device_comm **comm);
    /* *done = whether all that was begun is done. */
    lt_status (*poll)(lt_device_comm *comm, bool *done);
    /* Behind the mark `after` of the device: data = 0 in n pieces of a bucket; then, if finds, what
     * of the whole bucket is not finite, and the largest of the rest. */
    lt_status (*prepare)(lt_device_comm *comm, void *data, int64_t count, lt_dtype dtype,
                      const lt_bucket_range *zeros, int n, bool finds, uint64_t after);
    /* Behind what was done: sum->on_wire, or data where there is none. */
    lt_status (*allreduce)(lt_device_comm *comm, const lt_device_sum *sum);
    /* Behind that, data = factor * on_wire; in f32. */
    lt_status (*unpack)(lt_device_comm *comm, const lt_device_sum *sum, double factor);
    /* Begins to part from the others: nothing but poll() and close() may come then. */
    lt_status (*finalize)(lt_device_comm *comm);
    /* Frees; what is not done is given up, and the others cannot go on without this one. */
    void (*close)(lt_device_comm *comm);
} lt_device_comm_calls;

#endif
