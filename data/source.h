/* source.h - the inside of sources, and what reading an image needs. Private to this room.
 *
 * A worker owns one lt_sample_buffers and uses it for one sample after the other; nothing else is
 * written by more than one thread.
 */
#ifndef LT_DATA_SOURCE_H
#define LT_DATA_SOURCE_H

#include <stdatomic.h>

#include "core/tensor.h"
#include "data/data.h"

#define LT_MAX_SIDE (1 << 14) /* of images that a source makes, or brings to a size */

typedef struct lt_bytes { /* grows, and goes with its owner */
    uint8_t *data;
    size_t room;
} lt_bytes;

/* At least bytes of room, contents lost; NULL with LT_ENOMEM. free(buffer->data) in the end. */
uint8_t *lt__bytes_reserve(lt_bytes *buffer, size_t bytes);

typedef struct lt_image { /* (h, w, c), dense; the pixels belong to someone else */
    const void *pixels;
    lt_dtype dtype;
    int64_t h, w, c;
} lt_image;

typedef struct lt_sample_buffers {
    lt_bytes file;    /* the bytes of a file */
    lt_bytes decoded; /* its pixels */
    lt_bytes resized;
    lt_bytes arranged; /* moved, mirrored */
} lt_sample_buffers;

struct lt_source {
    atomic_int refs;
    lt_ctx *ctx;       /* kept */
    int64_t count, h, w, c, classes;
    lt_dtype dtype;    /* of the images */
    bool in_files;     /* reading takes long: more workers pay */
    /* Image i and its label. The pixels stay until the buffers' next sample. In any thread. */
    lt_status (*read)(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                      lt_image *image, int64_t *label);
    const char *(*class_name)(const lt_source *source, int64_t i); /* or NULL */
    /* Adds all labels to a digest, or what determines them. NULL where they are computed. */
    uint32_t (*digest_labels)(const lt_source *source, uint32_t digest);
    void (*free)(lt_source *source); /* all of it */
};

/* Decodes n bytes of JPEG or PNG into buffers->decoded. path is for messages. LT_EDATA, LT_ENOMEM.
 * */
lt_status lt__image_decode(const char *path, const uint8_t *bytes, size_t n, int channels,
                           lt_sample_buffers *buffers, lt_image *image);

/* A path as messages show it: without control codes for a terminal, and of a long one the end. */
#define LT_SHOWN_PATH 204 /* bytes: dots, 200 of the path, a zero */
const char *lt__show_path(const char *path, char room[LT_SHOWN_PATH]);
#define LT_SHOW(path) lt__show_path((path), (char[LT_SHOWN_PATH]){0})

/* A descriptor of a plain file, whose length goes to *bytes; -1 with LT_EDATA. */
int lt__open_plain(const char *path, int64_t *bytes);
/* The bytes of a plain file, at most `most` of them, in buffer. LT_EDATA, LT_ENOMEM. */
lt_status lt__read_whole(const char *path, size_t most, lt_bytes *buffer, size_t *n);

typedef struct lt_crop { /* a part of an image, in pixels; (0, 0) is its upper left corner */
    double y, x, h, w;
} lt_crop;

/* *result (h, w, c) = the window of a u8 image, which lies in the image, brought to h x w by a
 * triangle filter that widens when it shrinks, so that nothing is skipped: as Pillow's
 * resize(BILINEAR, box = window). At the image's edges the weights are brought to a sum of 1;
 * pixels around the window count as any others. Rounded to the nearest byte. *result is in
 * buffers->resized, where *image must not be. LT_ENOMEM. */
lt_status lt__resample(const lt_image *image, lt_crop crop, int64_t h, int64_t w,
                       lt_sample_buffers *buffers, lt_image *result);

#endif
