/* data.h - public header of data: sources of labelled images, and batches made from them. */
#ifndef LUATRAIN_DATA_H
#define LUATRAIN_DATA_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Files =================================================================================== */

/* Reads a whole IDX file, the format of MNIST (http://yann.lecun.com/exdb/mnist), gzip-compressed
 * or plain, to the CPU. The dtype is u8, i32, f32 or f64, as in the file. Signed bytes and 16-bit
 * integers have no dtype here and are rejected. The data are counted before memory is allocated for
 * them, so a wrong header cannot make a small file use much memory. Bytes after the data are an
 * error; bytes after a gzip stream are ignored, as gzip does. New. NULL with LT_EDATA (path and
 * reason; also for a dim of 0 or more than 8 dims) or LT_ENOMEM. */
LT_API lt_tensor *lt_idx_read(lt_ctx *ctx, const char *path);

/* Reads n binary files of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html) in this order to
 * the CPU: *images (count, 32, 32, 3) u8 and *labels (count) u8. Both new; NULL on failure.
 * LT_EDATA (path and reason: a length that is not a multiple of the record length 3073, a label
 * above 9) or LT_ENOMEM. */
LT_MUST lt_status lt_cifar10_read(lt_ctx *ctx, int n, const char *const *paths, lt_tensor **images,
                                  lt_tensor **labels);

/* Decodes a JPEG or PNG file to (h, w, channels) u8 on the context's device. channels is 1 or 3.
 * 16-bit samples are truncated to their upper 8 bits; transparency, colour profiles and EXIF data
 * are ignored. Rejects truncated files, images of more than 64 million pixels, PNGs of more than
 * 256 MiB of pixels, JPEGs with more than 100 scans, and small files that would take
 * disproportionately long to decode. New. NULL with LT_EINVAL (channels), LT_EDATA (path and
 * reason), LT_ENOMEM or the device's error. */
LT_API lt_tensor *lt_image_read(lt_ctx *ctx, const char *path, int channels);

/* ==== Sources ================================================================================= */

/* A source of labelled images, read by index, in any order and from any thread. Reference
 * counted. */
typedef struct lt_source lt_source;

/* A source of images in memory. images is (n, h, w, c), or (n, h, w) for one channel, of dtype u8
 * or a float dtype, with at least one pixel and one channel. labels is (n) u8, i32 or i64. Both are
 * kept, even beyond their scope, or copied if they are not on the CPU. Worker threads read them, so
 * do not write to them while an lt_batches over the source exists. New. NULL with LT_EINVAL or
 * LT_ENOMEM. */
LT_API lt_source *lt_source_tensors(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels);
/* A source of u8 images from files path/CLASS/NAME.jpg, .jpeg or .png, in upper or lower case.
 * channels is 1 or 3. Classes and files are sorted by name, bytewise; class numbers count from 0. A
 * file is decoded when a batch needs it. An image whose size is not height x width (at most 16384
 * each) is resized, uncropped unless lt_batch_options sets center_crop or area. 0 x 0 means no
 * resizing: all images must have the size of the first. Names that start with a dot are ignored.
 * Symbolic links are followed. Other files, folders within a class, images outside of a class and
 * broken links are left out; one warning in the log counts them by kind and gives the first name.
 * An unreadable file is an error when a batch needs it. New. NULL with LT_EINVAL (channels, sizes),
 * LT_EDATA (no folder, no class, a class without images, or with 0 x 0 an unreadable first image)
 * or LT_ENOMEM. */
LT_API lt_source *lt_source_folder(lt_ctx *ctx, const char *path, int64_t height, int64_t width,
                                   int channels);
/* A source of generated u8 images, for trials without data: noise with a class-specific colour.
 * Image i has class i % classes and depends only on (seed, part, i) and the sizes; seed is the seed
 * of ctx. part must be below 2^24 and count at least 1. height and width are from 1 to 16384,
 * channels from 1 to LT_MAX_CHANNELS, and classes from 1 to 2^20. New. NULL with LT_EINVAL or
 * LT_ENOMEM. */
LT_API lt_source *lt_source_synthetic(lt_ctx *ctx, uint64_t part, int64_t count, int64_t height,
                                      int64_t width, int64_t channels, int64_t classes);

/* A source with the images of another source, resized to height x width pixels. height and width
 * are from 1 to 16384. An image is resized when a batch needs it, as in lt_source_folder(). source
 * must have u8 images; it is kept. New. NULL with LT_EINVAL or LT_ENOMEM. */
LT_API lt_source *lt_source_resized(lt_source *source, int64_t height, int64_t width);

LT_API lt_source *lt_source_retain(lt_source *source); /* adds a reference; returns source */
LT_API void lt_source_release(lt_source *source);      /* drops a reference; NULL is allowed */
LT_API int64_t lt_source_count(const lt_source *source);
LT_API void lt_source_shape(const lt_source *source, int64_t shape[3]); /* (h, w, c) */
/* The number of classes, or 0 if unknown. */
LT_API int64_t lt_source_classes(const lt_source *source);
/* Digests for comparing data between machines. Equal data have equal digests, wherever they are
 * stored. *images covers at most 16 images, spread evenly over the source. Pixels of a float dtype
 * are not included, because their last bits may depend on the CPU that computed them. *labels
 * covers the labels of these images. It also covers all labels of a source in memory, or all class
 * and file names of a folder. */
LT_API void lt_source_digest(const lt_source *source, uint32_t *labels, uint32_t *images);
/* The name of class i of a folder, resized or not; NULL past the end, and for other sources.
 * Borrowed. */
LT_API const char *lt_source_class_name(const lt_source *source, int64_t i);

/* ==== Batches ================================================================================= */

/* Divides the rows of a batch into `ranks` shards, which get nearly the same number of grains. A
 * grain is a group of `grain` consecutive rows that stay together; only the last may be smaller.
 * rank gets rows [*first, *first + *count). *count may be 0, but not for rank 0 of a non-empty
 * batch. */
LT_API void lt_shard(int64_t rows, int64_t grain, int rank, int ranks, int64_t *first,
                     int64_t *count);
/* The same for unequal shards: divides the rows into n nearly equal parts, and the shard is parts
 * [part, part + parts). *count may be 0, but not for the shard with part 0 of a non-empty batch. */
LT_API void lt_shard_parts(int64_t rows, int64_t grain, int part, int parts, int n, int64_t *first,
                           int64_t *count);

/* The number of micro-batches of each shard of a batch with `rows` rows: `max`, or fewer so that
 * no micro-batch is empty, but at least 1. Grains stay together. */
LT_API int lt_micro_batches(int64_t rows, int64_t grain, int ranks, int max);

#define LT_MAX_CHANNELS 4  /* channels that have a mean and std; others are not normalised */
#define LT_MAX_REQUESTS 16 /* requests outstanding at a time, see lt_batches_request() */

typedef struct lt_batch_options { /* zero selects the default, if there is one */
    int64_t batch;                /* images per batch (the last may have fewer); required */
    bool shuffle;                 /* shuffle the images; default: source order */
    /* number of the epoch. With the context's seed, it determines the order and the random
     * augmentation */
    uint64_t epoch;
    int64_t first; /* number of images of the epoch to skip, to resume a pass */
    /* the pass returns only batches requested with lt_batches_request(). Requires first = 0 and at
     * most one rank */
    bool on_request;
    /* the pass returns only this rank's shard of each batch. An empty shard is replaced by the
     * first row of the batch. ranks = 0: whole batches */
    int rank, ranks;
    /* for unequal shards: `ranks` is the number of parts of a batch, and each shard has `parts` of
     * them. The first shard begins with part `rank`. See lt_shard_parts(). 0 means 1 */
    int parts;
    /* number of shards of each batch to return, starting with shard `rank`. Each is returned as a
     * separate batch. 0 means 1 */
    int shards;
    int64_t grain; /* rows that stay together in a shard; 0 means 1 */
    /* maximum number of micro-batches of a shard. Each is returned as a separate batch.
     * lt_micro_batches() computes their number and lt_shard() their rows. 0 means 1 */
    int micro;
    bool labels_only; /* no image is read: the images of a batch have dims, but no memory */
    /* dtype of the returned images: a float dtype; or u8, the raw bytes of a u8 source, without
     * mean and std */
    lt_dtype dtype;
    double mean[LT_MAX_CHANNELS]; /* per channel */
    double std[LT_MAX_CHANNELS];  /* per channel; 0 means 1 */
    /* if above 0 and at most 1: each image is cropped to its centre before it is resized. The crop
     * is the largest region with the aspect ratio of the result, scaled by this factor. ImageNet
     * results usually use 0.875: the central 224 pixels of an image whose short side is 256. If 0:
     * the whole image is resized, and its aspect ratio may change. Does not apply to random crops
     * (area) */
    double center_crop;

    /* Augmentation of sample i; its random choices are a function of (seed, epoch, i). */
    int64_t crop; /* shift by up to this many pixels per axis; black fills the uncovered part */
    bool flip;    /* mirror left to right, with probability 1/2 */
    /* random crop with at least this fraction of the image's area and an aspect ratio from 3/4 to
     * 4/3, resized to the full size (Szegedy et al., Going Deeper with Convolutions, 2014, use
     * 0.08). 0 means 1: no random crop. Requires u8 images; excludes crop */
    double area;

    /* worker threads that prepare batches ahead. Default: 1 for images in memory, the number of
     * CPUs for other sources. If negative, or with labels_only, there are no workers, and
     * lt_batches_next() does the work. If not all threads can be started, a warning is logged and
     * the pass continues with the others */
    int workers;
} lt_batch_options;

/* One pass over a source. */
typedef struct lt_batches lt_batches;

/* Starts a pass; the seed and the order are fixed here. source is kept; options is copied. Threads
 * start with the first batch. New. NULL with LT_EINVAL or LT_ENOMEM. */
LT_API lt_batches *lt_batches_new(lt_ctx *ctx, lt_source *source, const lt_batch_options *options);
/* Stops the worker threads and waits for them. NULL is allowed. */
LT_API void lt_batches_free(lt_batches *batches);
/* The number of batches that the pass returns, at most INT64_MAX. With on_request, the number for
 * the same pass without on_request. */
LT_API int64_t lt_batches_count(const lt_batches *batches);
/* Returns the next batch on the context's device: images *x (b, h, w, c) and labels *y (b) i64. The
 * elements of x are (value - mean) / std, where the value of a u8 element is byte / 255; or, if
 * options.dtype is u8, the bytes themselves. Both are new. After the last batch, both are NULL,
 * with LT_OK. Over the shards of all ranks, each image of the pass occurs once, except that an
 * empty shard returns a copy of the first row of its batch. The result does not depend on the
 * number of workers. If an image cannot be read, this and every later call fail with LT_EDATA and
 * the name of the file, so an incomplete pass never ends like a complete one. Also LT_ENOMEM, or
 * the device's error. */
LT_MUST lt_status lt_batches_next(lt_batches *batches, lt_tensor **x, lt_tensor **y);
/* Requests a batch from a pass with on_request: the min(batch, n - first) images from position
 * `first` of the epoch's order, where n is the number of images in the source. first counts from 0,
 * need not be a multiple of batch, and may repeat an earlier request. lt_batches_next() returns the
 * batches in the order of the requests; if no request is outstanding, it returns NULL for both
 * tensors. Worker threads prepare the next 4 outstanding batches ahead. Call it from the thread
 * that calls lt_batches_next(). To drop outstanding requests, free the pass. A request that fails
 * is not outstanding. LT_EINVAL without on_request, if first is not from 0 to n - 1, or if
 * LT_MAX_REQUESTS requests are outstanding already. Also LT_ENOMEM, or the device's error. */
LT_MUST lt_status lt_batches_request(lt_batches *batches, int64_t first);

typedef struct lt_batch_stats {
    double wait_s;  /* seconds lt_batches_next() waited for images */
    double work_s;  /* seconds of work, summed over the workers */
    int64_t images; /* images prepared */
    int workers;
} lt_batch_stats;
/* Statistics of the pass so far. Call it from the thread that calls lt_batches_next(). */
LT_API lt_batch_stats lt_batches_stats(const lt_batches *batches);

#ifdef __cplusplus
}
#endif
#endif
