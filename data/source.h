/* source.h - internals of sources and helpers to read images. Private to data.
 *
 * Each worker has its own lt_sample_buffers and reuses it for all its samples. A source does not
 * change once it is made, except for its reference count, so all threads can read it.
 */
#ifndef LT_DATA_SOURCE_H
#define LT_DATA_SOURCE_H

#include <stdatomic.h>

#include "core/tensor.h"
#include "data/data.h"

#define LT_MAX_SIDE (1 << 14) /* limit for generated and resized images, in pixels per side */

typedef struct lt_bytes { /* a growing buffer; its owner frees it */
    uint8_t *data;
    size_t capacity;
} lt_bytes;

/* Returns a buffer of at least this many bytes; old contents are lost. NULL with LT_ENOMEM. The
 * owner must call free(buffer->data) at the end. */
uint8_t *lt__bytes_reserve(lt_bytes *buffer, size_t bytes);

typedef struct lt_image { /* (h, w, c), dense; does not own its pixels */
    const void *pixels;
    lt_dtype dtype;
    int64_t h, w, c;
} lt_image;

typedef struct lt_sample_buffers {
    lt_bytes file;    /* contents of an image file */
    lt_bytes decoded; /* decoded pixels */
    lt_bytes resized;
    lt_bytes arranged; /* shifted and mirrored pixels */
} lt_sample_buffers;
void lt__sample_buffers_free(lt_sample_buffers *buffers);

struct lt_source {
    atomic_int refs;
    lt_ctx *ctx; /* kept */
    int64_t count, h, w, c, classes;
    lt_dtype dtype; /* dtype of the images */
    bool in_files;  /* reading is slow, so use more workers by default */
    /* Reads image i and its label. The pixels are valid until the buffers are used for the next
     * sample. image = NULL: only the label, which cannot fail. Thread-safe. */
    lt_status (*read)(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                      lt_image *image, int64_t *label);
    const char *(*class_name)(const lt_source *source, int64_t i); /* or NULL */
    /* Adds all labels, or the data that determine them, to a digest. NULL if labels are
     * computed. */
    uint32_t (*digest_labels)(const lt_source *source, uint32_t digest);
    void (*free)(lt_source *source); /* frees the source */
};

/* Creates a source of `bytes` bytes, which begins with a copy of base, and is zero after it. Keeps
 * the context. New. NULL with LT_ENOMEM. */
void *lt__source_new(size_t bytes, const lt_source *base);
/* Frees it and releases the context. */
void lt__source_free(lt_source *source);

/* Decodes n bytes of a JPEG or PNG into buffers->decoded. path is for messages only. LT_EDATA,
 * LT_ENOMEM. */
lt_status lt__image_decode(const char *path, const uint8_t *bytes, size_t n, int channels,
                           lt_sample_buffers *buffers, lt_image *image);

/* Makes a path safe to show in messages: no terminal control codes, and only the end of a long
 * path. */
#define LT_SHORT_PATH_BYTES 204 /* bytes: "...", 200 of the path, NUL */
const char *lt__short_path(const char *path, char buffer[LT_SHORT_PATH_BYTES]);
#define LT_SHORT_PATH(path) lt__short_path((path), (char[LT_SHORT_PATH_BYTES]){0})

/* Opens a regular file and stores its length in *bytes. Returns the descriptor, or -1 with
 * LT_EDATA. */
int lt__open_regular(const char *path, int64_t *bytes);
/* Reads a regular file of at most `max` bytes into buffer, and stores its length in *n. LT_EDATA,
 * LT_ENOMEM. */
lt_status lt__read_file(const char *path, size_t max, lt_bytes *buffer, size_t *n);

typedef struct lt_crop { /* a region of an image, in pixels; (0, 0) is the upper left corner */
    double y, x, h, w;
} lt_crop;

/* Resizes the region crop of a u8 image to *result (h, w, c). The region must be inside the image.
 * Uses a triangle filter that widens when the image gets smaller, so that every pixel counts, like
 * Pillow's resize(BILINEAR, box = crop). At the edges of the image the weights are normalised to a
 * sum of 1. Pixels around the region contribute too. Results are rounded to the nearest byte.
 * *result uses buffers->resized, so *image must not. LT_ENOMEM. */
lt_status lt__resample(const lt_image *image, lt_crop crop, int64_t h, int64_t w,
                       lt_sample_buffers *buffers, lt_image *result);

#endif
