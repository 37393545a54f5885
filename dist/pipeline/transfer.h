/* transfer.h - copies tensors of an accelerator to messages and back, while it computes. Private to
 * dist/pipeline.
 *
 * Copies go through pinned memory, in the accelerator's stream. A thread waits until a copy is done
 * and then sends its message. So the rank waits for the accelerator only if all buffers are in use.
 */
#ifndef LT_DIST_PIPELINE_TRANSFER_H
#define LT_DIST_PIPELINE_TRANSFER_H

#include "core/tensor.h"
#include "dist/mail/mail.h"

typedef struct lt_transfer lt_transfer;

/* device and mail are borrowed. New. NULL with LT_ENOMEM. */
lt_transfer *lt__transfer_open(lt_device *device, lt_mail *mail);
/* Sends the messages that are left. NULL is allowed. */
void lt__transfer_close(lt_transfer *t);

/* Sends a message to a rank, after the messages of earlier calls. If x is not NULL, its elements
 * become the data of the message; x may change or be freed afterwards. message is taken. LT_ENOMEM,
 * or an error of the accelerator. */
LT_NODISCARD lt_status lt__transfer_send(lt_transfer *t, int to, lt_message *message, lt_tensor *x);
/* Writes the data of a message to x, which has memory on the accelerator. message may be freed
 * afterwards. Returns the same errors. */
LT_NODISCARD lt_status lt__transfer_receive(lt_transfer *t, lt_tensor *x,
                                            const lt_message *message);
/* The error of a message that could not be sent. */
LT_NODISCARD lt_status lt__transfer_check(lt_transfer *t);

#endif
