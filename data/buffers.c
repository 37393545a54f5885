/* buffers.c - the buffers that a worker reuses for all its samples; see source.h. */
#include <stdlib.h>

#include "data/source.h"

uint8_t *lt__bytes_reserve(lt_bytes *buffer, size_t bytes)
{
    if (bytes > buffer->capacity || !buffer->data) {
        free(buffer->data);
        buffer->capacity = bytes > 0 ? bytes : 1;
        buffer->data = malloc(buffer->capacity);
    }
    if (!buffer->data) {
        buffer->capacity = 0;
        lt_fail(LT_ENOMEM, "out of memory for an image of %zu bytes", bytes);
    }
    return buffer->data;
}

void lt__sample_buffers_free(lt_sample_buffers *buffers)
{
    free(buffers->file.data);
    free(buffers->decoded.data);
    free(buffers->resized.data);
    free(buffers->arranged.data);
}
