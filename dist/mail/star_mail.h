/* star_mail.h - mailboxes of a server, which is rank 0, and of the workers that join it. Private to
 * dist.
 *
 * A worker that has connected says so, and gets the lowest free rank. The server's mailbox then
 * reports LT_MAIL_JOINED, and later LT_MAIL_LOST. The rank is free again when that report is taken
 * by lt__mail_take(): until then, the server may still send answers that are meant for the lost
 * worker. Workers exchange messages with the server only.
 *
 * Workers join at any time, so they cannot take part in collectives. Instead, everything that rank
 * 0 broadcasts is kept, and each worker gets all of it in turn, from the beginning. A worker
 * compares its script and settings with these broadcasts, as ranks do with each other.
 */
#ifndef LT_DIST_MAIL_STAR_MAIL_H
#define LT_DIST_MAIL_STAR_MAIL_H

#include "dist/mail/mail.h"
#include "dist/star.h"

/* Opens the mailbox of a server with up to `size` ranks. star is taken. New. NULL with
 * LT_ENOMEM. */
lt_mail *lt__mail_serve(const lt_star *star, int size);
/* Joins the server, and opens the mailbox of this worker. Waits at most `seconds` for the server.
 * star is taken. Sets *rank, and *size, the number of ranks that the job may have. New. NULL with
 * LT_EENV if the server refuses the key, LT_EUSAGE if it refuses the worker, LT_EDONE if the job is
 * over, LT_EPEER if the server is lost or does not answer, or LT_ENOMEM. */
lt_mail *lt__mail_join(const lt_star *star, double seconds, int *rank, int *size);

/* On the server: sends bytes to all workers that have joined or will. LT_ENOMEM. */
LT_NODISCARD lt_status lt__mail_say(lt_mail *mail, const char *what, const void *data,
                                    size_t bytes);
/* On a worker: takes the next of these. Waits for it as long as the server lives. LT_EDESYNC if it
 * has another name or size; LT_EPEER if the server is lost. */
LT_NODISCARD lt_status lt__mail_hear(lt_mail *mail, const char *what, void *data, size_t bytes);
/* On the server: nobody can join anymore. The reports of those who have joined are in the mailbox
 * when it returns. */
void lt__mail_end(lt_mail *mail);
/* On the server: sends the reason to a worker, whose messages are then ignored. It is lost. */
void lt__mail_refuse(lt_mail *mail, int rank, const char *text);
/* Whether the server has refused this worker, and why. */
bool lt__mail_is_refused(lt_mail *mail, char *text, size_t bytes);

#endif
