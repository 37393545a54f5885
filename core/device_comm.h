/* device_comm.h - device communicator: sums gradients over the accelerators of several ranks
 * without copying them to the host. Included by device.h.
 *
 * A plugin supplies one table of calls for an accelerator that supports this. No call waits for the
 * device or for another rank. Operations run asynchronously. The caller calls poll() until they are
 * done, and enforces the timeout. Only one thread at a time may make calls for a communicator. A
 * failure of the communication library is reported as LT_EPEER with that library's message, a
 * failure of the device as LT_EENV. After a failure only close() may be called.
 */
#ifndef LT_CORE_DEVICE_COMM_H
#define LT_CORE_DEVICE_COMM_H

#include "core/core.h"

struct lt_device;

enum {
    LT_COMM_ID_BYTES = 128, /* bytes of an id that all communicators of a job share */
    LT_COMM_NAME_BYTES = 64,
    LT_COMM_TAIL = 256 /* maximum length of a tail */
};

typedef struct lt_device_comm { /* the communicator of one rank; the plugin adds private fields */
    const struct lt_device_comm_calls *calls;
    /* statistics from prepare(), valid once poll() has set *done: largest finite magnitude, or 0;
     * number of elements that are not finite */
    double largest;
    int64_t not_finite;
    /* (LT_COMM_TAIL) in CPU memory. The caller writes it before a sum; afterwards it contains the
     * sums over all ranks */
    float *tail;
} lt_device_comm;

typedef struct lt_bucket_range { /* a range of elements of a bucket */
    int64_t at, count;
} lt_bucket_range;

typedef struct lt_device_sum { /* data = sum over all ranks of scale * data */
    void *data;                /* (count) on the device */
    int64_t count;
    lt_dtype dtype; /* a float dtype */
    lt_dtype wire;  /* dtype of the sum: same as dtype, or f16 or bf16 if dtype is f32 */
    /* (count) values of dtype wire, on the device. NULL if wire == dtype: then data is summed */
    void *on_wire;
    /* the factor of this rank. The product is computed in f32, or in f64 if dtype is f64, and then
     * rounded to wire */
    double scale;
    int n_tail; /* numbers of comm->tail to sum */
} lt_device_sum;

typedef struct lt_device_comm_calls {
    /* Writes a name of the device that is unique across machines, and the communication library
     * with its version, which must be the same on all ranks. LT_EENV if the library is missing; the
     * name is written even then. */
    lt_status (*identify)(struct lt_device *device, char name[LT_COMM_NAME_BYTES],
                          char library[LT_COMM_NAME_BYTES]);
    /* Makes the id that all communicators of a job are opened with. One rank calls it. */
    lt_status (*make_id)(struct lt_device *device, char id[LT_COMM_ID_BYTES]);
    /* Starts to connect to the other ranks, which make the same call. New. Also LT_ENOMEM. */
    lt_status (*open)(struct lt_device *device, const char id[LT_COMM_ID_BYTES], int rank, int size,
                      lt_device_comm **comm);
    /* *done = whether all operations started so far have finished. */
    lt_status (*poll)(lt_device_comm *comm, bool *done);
    /* After the mark `after` of the device: zeroes n ranges of data. If finds is set, it then
     * measures the whole bucket: the number of non-finite elements and the largest finite
     * magnitude. */
    lt_status (*prepare)(lt_device_comm *comm, void *data, int64_t count, lt_dtype dtype,
                         const lt_bucket_range *zeros, int n, bool finds, uint64_t after);
    /* After the operations started so far: scales data and sums it over all ranks, in sum->on_wire,
     * or in data if on_wire is NULL. */
    lt_status (*allreduce)(lt_device_comm *comm, const lt_device_sum *sum);
    /* After the sum: data = factor * on_wire, computed in f32. */
    lt_status (*unpack)(lt_device_comm *comm, const lt_device_sum *sum, double factor);
    /* Starts to disconnect from the other ranks. Only poll() and close() may follow. */
    lt_status (*finalize)(lt_device_comm *comm);
    /* Frees the communicator and abandons unfinished operations; the other ranks cannot continue
     * without this one. */
    void (*close)(lt_device_comm *comm);
    const char *thread_hazard; /* why the ranks should not be threads of a process, or NULL */
} lt_device_comm_calls;

#endif
