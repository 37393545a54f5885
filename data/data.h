/* data.h - the door of data: files of images and labels, and batches made from them. */
#ifndef LUATRAIN_DATA_H
#define LUATRAIN_DATA_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== IDX files =============================================================================== */

/* Reads a whole IDX file, the format of MNIST (http://yann.lecun.com/exdb/mnist), gzip or plain:
 * bytes become u8, 32-bit integers i32, floats f32 and f64. Signed bytes and 16-bit integers have
 * no dtype here and are refused. The data are counted before memory is taken for them: a header
 * cannot make a small file cost much. Bytes after the data are an error; those after a gzip
 * stream are ignored, as gzip does. New. NULL with LT_EDATA (path and reason) or LT_ENOMEM. */
LT_API lt_tensor *lt_idx_read(lt_ctx *ctx, const char *path);

/* ==== Batches ================================================================================= */

#define LT_MAX_CHANNELS 4 /* that mean and std can be given for */

typedef struct lt_batch_options { /* zero means default, where there is one */
    int64_t batch;                /* images a batch, the last one may be smaller; must be given */
    bool shuffle;                 /* default: in the order of the files */
    uint64_t epoch;               /* with the context's seed: the order, when shuffled */
    lt_dtype dtype;               /* of the images handed out, a float one; default: f32 */
    double mean[LT_MAX_CHANNELS]; /* by channel */
    double std[LT_MAX_CHANNELS];  /* by channel; 0 means 1 */
} lt_batch_options;

/* One pass over images (n, h, w, c) or (n, h, w), which stands for one channel, and labels (n). */
typedef struct lt_batches lt_batches;

/* images: u8 or a float dtype; labels: u8, i32 or i64; both kept.
 * New. NULL with LT_EINVAL or LT_ENOMEM. */
LT_API lt_batches *lt_batches_new(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels,
                                  const lt_batch_options *options);
LT_API void lt_batches_free(lt_batches *batches);
/* The number of batches in the pass. */
LT_API int64_t lt_batches_count(const lt_batches *batches);
/* The next batch: *x (b, h, w, c) = (value - mean) / std, where the value of a u8 image is its
 * byte / 255, and *y (b) i64. Both new; both NULL after the last batch. Each image comes once. */
LT_MUST lt_status lt_batches_next(lt_batches *batches, lt_tensor **x, lt_tensor **y);

#ifdef __cplusplus
}
#endif
#endif
