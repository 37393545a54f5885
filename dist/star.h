/* star.h - the network between a server and workers that come and go. A plugin implements it. This
 * header is the whole interface of that plugin, so it includes no other header of luatrain.
 *
 * The server knows each worker by the number of its connection. A message has a head and maybe
 * data. It arrives in parts of at most LT_STAR_PART bytes of data, each with the head, so that a
 * large message on a slow link is not taken for silence. The parts of one connection arrive in the
 * order of sending, or the connection is lost; a lost connection never comes back. Only holders of
 * the key can connect. One thread at a time makes calls, except wake().
 */
#ifndef LT_DIST_STAR_H
#define LT_DIST_STAR_H

#include <stddef.h>
#include <stdint.h>

enum { LT_STAR_KEY = 40 }; /* characters of a key, without the NUL at its end */
enum { LT_STAR_PART = 1 << 18 };

typedef struct lt_star_config {
    int serves;            /* 1: the server listens; 0: a worker connects */
    const char *address;   /* "HOST:PORT". On the server, HOST is an address of this machine, or
                            * "*" for all. Borrowed for the call */
    char key[LT_STAR_KEY]; /* the secret that the server and all workers share */
    double timeout;        /* a connection that is silent for this many seconds is lost */
} lt_star_config;

typedef enum lt_star_kind {
    LT_STAR_NOTHING, /* the time is over, or wake() was called */
    LT_STAR_MESSAGE,
    LT_STAR_REFUSED, /* worker: the handshake has failed, because the server has another key or is
                      * not a server of luatrain */
    LT_STAR_LOST     /* worker: the server is lost */
} lt_star_kind;

typedef struct lt_star_event {
    lt_star_kind kind;
    /* LT_STAR_MESSAGE: a message, or a part of one */
    uint32_t from;           /* number of the connection; 0 on a worker */
    const void *head, *data; /* borrowed until the next wait(). data has no alignment */
    size_t head_bytes, bytes;
} lt_star_event;

typedef struct lt_star {
    char address[256]; /* "HOST:PORT" of the server; on the server, with the port in use */
    void *self;        /* the first argument of all calls */
    /* Sends a message without blocking, in parts. head is copied. data (bytes) may be NULL. Calls
     * done(owner) when data is no longer used, maybe later and in another thread. Returns 0, or -1
     * if the connection is lost. */
    int (*send)(void *self, uint32_t to, const void *head, size_t head_bytes, void *data,
                size_t bytes, void (*done)(void *owner), void *owner);
    /* Waits for an event for at most `seconds`. */
    void (*wait)(void *self, double seconds, lt_star_event *event);
    /* Ends the current wait(), or else the next one. Any thread may call it. */
    void (*wake)(void *self);
    /* Waits at most `seconds` until sent messages have left, closes the network and frees self. */
    void (*close)(void *self, double seconds);
} lt_star;

/* The types of the two functions that a plugin exports. version is the caller's version of
 * luatrain; the plugin must have the same version. */
/* lt_star_open(): fills *star, new, and returns 0. On failure returns non-zero and writes the
 * reason to text, which has text_bytes bytes: 1 if the address is wrong or in use, else 2. Does not
 * wait for a connection. */
typedef int (*lt_star_open_fn)(const char *version, const lt_star_config *config, lt_star *star,
                               char *text, size_t text_bytes);
/* lt_star_new_key(): writes a new random key. Returns 0; on failure, as above. */
typedef int (*lt_star_new_key_fn)(char key[LT_STAR_KEY], char *text, size_t text_bytes);

#endif
