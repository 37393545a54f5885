/* data.h - the door of data: sources of images with labels, and batches made from them. */
#ifndef LUATRAIN_DATA_H
#define LUATRAIN_DATA_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Files =================================================================================== */

/* Reads a whole IDX file to the CPU, the format of MNIST (http://yann.lecun.com/exdb/mnist), gzip
 * or plain: bytes become u8, 32-bit integers i32, floats f32 and f64. Signed bytes and 16-bit
 * integers have no dtype here and are refused. The data are counted before memory is taken for
 * them: a header cannot make a small file cost much. Bytes after the data are an error; those after
 * a gzip stream are ignored, as gzip does. New. NULL with LT_EDATA (path and reason) or
 * LT_ENOMEM. */
LT_API lt_tensor *lt_idx_read(lt_ctx *ctx, const char *path);

/* Reads CIFAR-10's binary files (https://www.cs.toronto.edu/~kriz/cifar.html), one after the other,
 * to the CPU: *images (n, 32, 32, 3) u8, *labels (n) u8; both new. LT_EDATA (path and reason: a
 * length that is no multiple of a record's 3073 bytes, a label above 9) or LT_ENOMEM. */
LT_MUST lt_status lt_cifar10_read(lt_ctx *ctx, int n, const char *const *paths, lt_tensor **images,
                                  lt_tensor **labels);

/* Decodes a JPEG or PNG file to (h, w, channels) u8 on the context's device; channels is 1 or 3. Of
 * 16 bits the upper 8 are taken; transparency, colour profiles and EXIF are not looked at. A file
 * that ends early, has more than 64 million pixels, or is a JPEG of more than 100 scans is refused.
 * So is one whose few bytes would take the decoder far too long. New. NULL with LT_EINVAL
 * (channels), LT_EDATA (path and reason) or LT_ENOMEM. */
LT_API lt_tensor *lt_image_read(lt_ctx *ctx, const char *path, int channels);

/* ==== Sources ================================================================================= */

/* Images with labels, read by number in any order and by any thread. Counted references. */
typedef struct lt_source lt_source;

/* Images in memory: images (n, h, w, c), or (n, h, w) for one channel, u8 or a float dtype, with a
 * pixel and a channel at least; labels (n) u8, i32 or i64; both kept, or copied if they are not on
 * the CPU. Threads read them: they must not be written while batches of them are open. New. NULL
 * with LT_EINVAL or LT_ENOMEM. */
LT_API lt_source *lt_source_tensors(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels);
/* Files path/CLASS/NAME.jpg, .jpeg or .png, in the order of their names, byte by byte; so are the
 * classes, which count from 0. A file is decoded when a batch wants it, and brought to height x
 * width, at most 16384 each; 0 x 0: all have one size already, that of the first. Links are
 * followed. Links that lead nowhere are left out, and so are a FIFO, socket, device or folder of
 * such a name; a warning in the log counts them and names the first. A file that may not be read
 * is an error when a batch wants it. New. NULL with LT_EINVAL (channels, sizes), LT_EDATA (no
 * folder, no class, no image) or LT_ENOMEM. */
LT_API lt_source *lt_source_folder(lt_ctx *ctx, const char *path, int64_t height, int64_t width,
                                   int channels);
/* Noise with a colour that tells the class, to try things without data: image i is of class
 * i % classes, and a function of (seed, part, i). New. NULL with LT_EINVAL or LT_ENOMEM. */
LT_API lt_source *lt_source_synthetic(lt_ctx *ctx, uint64_t part, int64_t count, int64_t height,
                                      int64_t width, int64_t channels, int64_t classes);

/* The images of a source, kept, which are u8, brought to height x width when a batch wants them.
 * New. NULL with LT_EINVAL or LT_ENOMEM. */
LT_API lt_source *lt_source_sized(lt_source *source, int64_t height, int64_t width);

LT_API lt_source *lt_source_retain(lt_source *source);
LT_API void lt_source_release(lt_source *source); /* NULL is fine */
LT_API int64_t lt_source_count(const lt_source *source);
LT_API void lt_source_shape(const lt_source *source, int64_t shape[3]); /* (h, w, c) */
/* How many classes there are; 0 when nobody has said. */
LT_API int64_t lt_source_classes(const lt_source *source);
/* Digests of the labels, and of a sample of at most 16 images, spread over the source: the same on
 * all machines that have the same data, wherever it is stored. *labels covers all labels of a
 * source in memory, and the names of all classes and files of a folder. Pixels of a float dtype are
 * left out, as their last bits may depend on the CPU that has computed them. */
LT_API void lt_source_digest(const lt_source *source, uint32_t *labels, uint32_t *images);
/* The name of a folder's class; NULL past the end, and for other sources. Borrowed. */
LT_API const char *lt_source_class(const lt_source *source, int64_t i);

/* ==== Batches ================================================================================= */

/* Of so many rows of a batch rank has rows [*first, *first + *count), of `ranks` parts with as many
 * grains each, or nearly so; a grain is so many rows that stay together. *count may be 0, but not
 * for rank 0 of a batch that has rows. */
LT_API void lt_shard(int64_t rows, int64_t grain, int rank, int ranks, int64_t *first,
                     int64_t *count);

#define LT_MAX_CHANNELS 4 /* that mean and std can be given for */

typedef struct lt_batch_options { /* zero means default, where there is one */
    int64_t batch;                /* images a batch, the last one may be smaller; must be given */
    bool shuffle;                 /* default: in the order of the source */
    uint64_t epoch;               /* with the context's seed: the order, and what is drawn below */
    int64_t first;                /* so many images of the epoch were seen; they are left out */
    int rank, ranks;              /* of each batch, only the shard of this rank; where that has no
                                   * rows the first one of the batch. 0 ranks: all of it */
    int shards;                   /* so many ranks' from this one on, one after the other; 0: 1 */
    int64_t grain;                /* of the shards; 0: 1 */
    lt_dtype dtype;               /* of the images handed out: a float one, or u8: as they are */
    double mean[LT_MAX_CHANNELS]; /* by channel */
    double std[LT_MAX_CHANNELS];  /* by channel; 0 means 1 */

    /* Augmentation of sample i: a function of (seed, epoch, i). */
    int64_t crop; /* moved by up to so many pixels each way; black comes in from outside */
    bool flip;    /* mirrored left to right, every other one */
    double area; /* a random part of at least this share of the area, at an aspect ratio from 3/4 to
                  * 4/3, brought to the full size (Szegedy et al., Going Deeper with Convolutions,
                  * 2014: 0.08); 0 means 1: all of it. Not together with crop. u8 images only */

    int workers; /* threads that make batches ahead; default: 1 for images in memory, as many as
                  * there are CPUs for files; negative: none, the caller waits for each. Where
                  * fewer can be started, that is logged, and those that could be do the work */
} lt_batch_options;

/* One pass over a source. */
typedef struct lt_batches lt_batches;

/* source: kept. The order is fixed now; threads start with the first batch. New. NULL with
 * LT_EINVAL or LT_ENOMEM. */
LT_API lt_batches *lt_batches_new(lt_ctx *ctx, lt_source *source, const lt_batch_options *options);
/* Waits for the threads. NULL is fine. */
LT_API void lt_batches_free(lt_batches *batches);
/* The number of batches in the pass, at most INT64_MAX. */
LT_API int64_t lt_batches_count(const lt_batches *batches);
/* The next batch, on the context's device: *x (b, h, w, c) = (value - mean) / std, where the value
 * of a u8 image is its byte / 255, and *y (b) i64. Both new; both NULL after the last batch. Each
 * image comes once. The same bytes for any number of workers. LT_EDATA names the file of an image
 * that cannot be read; from then on every call fails with it: a pass that lacks images never ends
 * as if it were whole. */
LT_MUST lt_status lt_batches_next(lt_batches *batches, lt_tensor **x, lt_tensor **y);

typedef struct lt_batch_stats {
    double wait_s;  /* seconds that lt_batches_next() has waited */
    double work_s;  /* seconds that the workers have worked, added up */
    int64_t images; /* made by them */
    int workers;
} lt_batch_stats;
/* At any time, in the thread that takes the batches. */
LT_API lt_batch_stats lt_batches_stats(const lt_batches *batches);

#ifdef __cplusplus
}
#endif
#endif
