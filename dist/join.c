/* join.c - the transport of a job whose workers join and leave, and its key; see lt_serve_open().
 *
 * Each process has a control block of its own, with one slot, because no other process waits for
 * it. A worker takes the broadcasts of rank 0 from its mailbox: see star_mail.h.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/plugin.h"
#include "core/tensor.h"
#include "dist/group.h"
#include "dist/mail/star_mail.h"

typedef struct joined { /* the state of this process */
    lt_endpoint at;
    lt_shm_control *control;
    int rank;
    bool has_file;         /* the key is in a file */
    char key[LT_STAR_KEY]; /* of the server */
    char address[300];     /* "HOST:PORT" of the server */
} joined;

/* ==== Collectives ============================================================================= */

static joined *job_of_channel(lt_shm *shm) { return shm->ud; }

static lt_status refuse(const char *what)
{
    return lt_fail(LT_EUSAGE,
                   "%s requires all ranks at the same time, but workers join and leave this job at "
                   "any time (--serve)",
                   what);
}

static lt_status allreduce(lt_shm *shm, const lt_sum *sum)
{
    (void)shm;
    return refuse(sum->what);
}

static lt_status broadcast(lt_shm *shm, const char *what, void *data, size_t bytes, int root)
{
    joined *j = job_of_channel(shm);
    if (root != 0)
        return refuse(what);
    return j->rank == 0 ? lt__mail_say(j->at.mail, what, data, bytes)
                        : lt__mail_hear(j->at.mail, what, data, bytes);
}

/* Nobody waits for workers. The broadcasts before a barrier have compared what matters. */
static lt_status barrier(lt_shm *shm, const char *what)
{
    (void)shm, (void)what;
    return LT_OK;
}

static lt_status send(lt_shm *shm, int to, const void *data, size_t bytes)
{
    (void)shm, (void)to, (void)data, (void)bytes;
    return refuse("lt_group_send");
}

static lt_status receive(lt_shm *shm, int from, void *data, size_t bytes)
{
    (void)shm, (void)from, (void)data, (void)bytes;
    return refuse("lt_group_receive");
}

/* The server's refusal of this worker is a failure of rank 0. */
static void poll(void *ud)
{
    joined *j = ud;
    char text[256];
    if (j->rank > 0 && lt__mail_is_refused(j->at.mail, text, sizeof text))
        lt__shm_fail(&j->at.shm[0], 0, LT_EPEER, text);
}

/* Waits for messages that have not left. At the end of training, the server's are the final weights
 * of a net, which may take long on a slow link. */
static void leave(void *self)
{
    static const double SECONDS = 5;
    joined *j = self;
    bool is_over = j->rank == 0 && !lt__shm_has_failed(&j->at.shm[0]);
    lt__mail_close(j->at.mail, is_over ? fmax(j->at.shm[0].timeout, SECONDS) : SECONDS);
    free(j->control);
    free(j);
}

static const lt_transport transport = {
    .is_elastic = true,
    .allreduce = allreduce,
    .broadcast = broadcast,
    .barrier = barrier,
    .send = send,
    .receive = receive,
    .close = leave,
};

/* ==== The key ================================================================================= */

static lt_status fail_file(const char *path)
{
    return lt_fail(LT_EENV, "the key %s: %s", path, strerror(errno));
}

static lt_status read_key(const char *path, char key[LT_STAR_KEY])
{
    char text[LT_STAR_KEY + 2];
    struct stat now;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &now) != 0) {
        fail_file(path);
        if (file >= 0)
            close(file);
        return LT_EENV;
    }
    ssize_t n = read(file, text, sizeof text);
    close(file);
    if (now.st_mode & (S_IRWXG | S_IRWXO))
        return lt_fail(LT_EENV,
                       "the key %s can be read by other users, who could then join the job; run "
                       "chmod 600 %s",
                       path, path);
    if (n < LT_STAR_KEY || (n > LT_STAR_KEY && text[LT_STAR_KEY] != '\n') || n > LT_STAR_KEY + 1 ||
        memchr(text, '\0', (size_t)n))
        return lt_fail(LT_EENV, "%s is not a key; luatrain --serve writes one", path);
    memcpy(key, text, LT_STAR_KEY);
    return LT_OK;
}

/* Writes a file that only its owner can read. Another process sees all of it or nothing. */
static lt_status write_key(const char *path, const char key[LT_STAR_KEY])
{
    char text[LT_STAR_KEY + 1], draft[PATH_MAX];
    memcpy(text, key, LT_STAR_KEY);
    text[LT_STAR_KEY] = '\n';
    if (snprintf(draft, sizeof draft, "%s.XXXXXX", path) >= (int)sizeof draft) {
        errno = ENAMETOOLONG;
        return fail_file(path);
    }
    int file = mkostemp(draft, O_CLOEXEC); /* mode 0600 */
    if (file < 0)
        return fail_file(path);
    bool ok = write(file, text, sizeof text) == (ssize_t)sizeof text;
    if (close(file) == 0 && ok && rename(draft, path) == 0)
        return LT_OK;
    fail_file(path);
    unlink(draft);
    return LT_EENV;
}

lt_status lt_serve_write_key(lt_group *group, const char *path)
{
    const joined *j = (const joined *)lt__group_endpoint(group);
    if (!lt_group_is_elastic(group) || j->rank > 0)
        return lt_fail(LT_EINVAL, "lt_serve_write_key: this is not the server of an elastic job");
    if (j->has_file)
        return LT_OK;
    return write_key(path, j->key);
}

const char *lt_serve_address(const lt_group *group)
{
    return lt_group_is_elastic(group) ? ((const joined *)lt__group_endpoint(group))->address : NULL;
}

/* ==== Opening ================================================================================= */

static lt_status find_plugin(char file[LT_PLUGIN_PATH])
{
    if (lt__plugin_find("zmq", file))
        return LT_OK;
    return lt_fail(
        LT_EENV, "libluatrain-zmq.so is missing, but workers that join require it; build luatrain "
                 "where ZeroMQ is installed (Debian: libzmq3-dev)");
}

/* The key of the server. Makes the file if it does not exist. Without a path, the key is new and in
 * no file. */
static lt_status find_key(const char *file, const char *path, char key[LT_STAR_KEY])
{
    char text[256];
    lt_star_new_key_fn new_key;
    if (path && access(path, F_OK) == 0)
        return read_key(path, key);
    LT_TRY(lt__plugin_open(file, "lt_star_new_key", &new_key));
    if (new_key(key, text, sizeof text) != 0)
        return lt_fail(LT_EENV, "%s", text);
    return path ? write_key(path, key) : LT_OK;
}

/* "HOST:PORT" from "PORT" or "HOST:PORT". serves: HOST may be missing, and PORT may be 0. */
static lt_status read_address(const char *given, bool serves, char *address, size_t bytes)
{
    const char *colon = strrchr(given, ':');
    const char *port = colon ? colon + 1 : given;
    char *end;
    long number = strtol(port, &end, 10);
    bool has_host = colon && colon > given;
    if (*port < '0' || *port > '9' || *end || number < !serves || number > 65535 ||
        (!serves && !has_host) || (colon && !has_host) || strlen(given) + 3 > bytes)
        return lt_fail(LT_EUSAGE, "%s must be %s, but is '%s'", serves ? "--serve" : "--join",
                       serves ? "[HOST:]PORT" : "HOST:PORT", given);
    snprintf(address, bytes, "%s%s", colon ? "" : "*:", given);
    return LT_OK;
}

static lt_status open_star(const char *file, const lt_star_config *config, lt_star *star)
{
    char text[300];
    lt_star_open_fn open;
    LT_TRY(lt__plugin_open(file, "lt_star_open", &open));
    int why = open(LT_VERSION, config, star, text, sizeof text);
    if (why == 0)
        return LT_OK;
    if (why == 1)
        return lt_fail(LT_EENV, "cannot %s %s", config->serves ? "serve at" : "join", text);
    return lt_fail(LT_EENV, "%s", text);
}

/* Stores the address that workers can use: the given host, or this machine if the server listens on
 * all interfaces, and the port in use. */
static void show_address(joined *j, const lt_star *star, const char *given)
{
    char host[256] = "";
    const char *port = strrchr(star->address, ':');
    bool is_any = given[0] == '*' && gethostname(host, sizeof host - 1) == 0;
    if (!is_any)
        snprintf(host, sizeof host, "%.*s", (int)(strrchr(given, ':') - given), given);
    snprintf(j->address, sizeof j->address, "%s%s", host, port ? port : "");
}

static lt_status open_control(joined *j)
{
    size_t bytes = (lt__shm_control_bytes(1) + 127) & ~(size_t)127;
    j->control = aligned_alloc(128, bytes);
    if (!j->control)
        return lt_fail(LT_ENOMEM, "out of memory for a worker");
    memset(j->control, 0, bytes);
    lt__shm_control_init(j->control, 1);
    return LT_OK;
}

static void set_channels(joined *j, double timeout)
{
    j->at.cpus = lt_cpu_count();
    for (int i = 0; i < LT_SHM_CHANNELS; i++)
        j->at.shm[i] = (lt_shm){.control = j->control,
                                .size = 1,
                                .channel = i,
                                .rank_of = &j->rank,
                                .timeout = timeout,
                                .poll = poll,
                                .ud = j};
}

/* Opens the network and the mailbox. *size is the number of ranks. */
static lt_status connect(joined *j, const lt_join_config *c, bool serves, int *size)
{
    char file[LT_PLUGIN_PATH], address[256];
    lt_star star;
    double timeout = c->timeout > 0 ? c->timeout : LT_DEFAULT_TIMEOUT;
    /* Asynchronous training looks for silent processes, too; it comes first, and says so. */
    lt_star_config of_star = {.serves = serves, .address = address, .timeout = 2 * timeout};
    LT_TRY(find_plugin(file));
    LT_TRY(read_address(c->address, serves, address, sizeof address));
    LT_TRY(serves ? find_key(file, c->key, j->key) : read_key(c->key, j->key));
    memcpy(of_star.key, j->key, sizeof j->key);
    LT_TRY(open_star(file, &of_star, &star));
    show_address(j, &star, address);
    *size = LT_MAX_JOINED;
    j->has_file = c->key != NULL;
    j->at.mail = serves ? lt__mail_serve(&star, *size)
                        : lt__mail_join(&star, timeout, &j->rank, size);
    if (!j->at.mail)
        return lt_errcode();
    set_channels(j, timeout);
    return LT_OK;
}

static lt_status open_job(const lt_join_config *c, bool serves, lt_group **group)
{
    joined *j;
    int size = 0;
    LT_TRY(LT_CALLOC(j, 1, "for a worker"));
    lt_status status = open_control(j);
    if (status == LT_OK)
        status = connect(j, c, serves, &size);
    if (status != LT_OK) {
        free(j->control);
        free(j);
        return status;
    }
    *group = lt__group_new(&transport, &j->at, j->rank, size);
    return *group ? LT_OK : LT_ENOMEM;
}

lt_status lt_serve_open(const lt_join_config *config, lt_group **group)
{
    return open_job(config, true, group);
}

lt_status lt_join_open(const lt_join_config *config, lt_group **group)
{
    if (!config->key)
        return lt_fail(
            LT_EUSAGE,
            "--join requires --key FILE with the key of the job; the server writes it to "
            "join.key in the folder of the run");
    return open_job(config, false, group);
}
