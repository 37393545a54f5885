/* system.c - system services for a training run: clock, folders, files, a lock, the terminal, and
 * requests to stop. The callers are the embedded files of a run.
 *
 * Errors: LT_EENV if a folder or a lock file cannot be created, LT_EFILE if a file cannot be
 * written.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

/* ==== Folders ================================================================================= */

/* make_folder(path): creates the folder and its parents, if they do not exist. */
static int make_folder(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *given = lt__check_path(L, s, 1, "run");
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s", given) >= PATH_MAX)
        lt__error(L, s, LT_EENV, "%s: cannot create this folder: %s", given,
                  strerror(ENAMETOOLONG));
    for (char *end = path + 1; *path && *end; end++) {
        if (*end != '/')
            continue;
        *end = '\0';
        (void)mkdir(path, 0777); /* an error here makes the last mkdir() fail too */
        *end = '/';
    }
    struct stat now;
    if (mkdir(path, 0777) != 0) {
        int error = errno;
        if (error != EEXIST || stat(path, &now) != 0 || !S_ISDIR(now.st_mode))
            lt__error(L, s, LT_EENV, "%s: cannot create this folder: %s", given,
                      error == EEXIST ? "a file of this name exists" : strerror(error));
    }
    return 0;
}

/* new_folder(path): creates a folder. Returns false if the name already exists. */
static int new_folder(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *path = lt__check_path(L, s, 1, "run");
    bool made = mkdir(path, 0777) == 0;
    if (!made && errno != EEXIST)
        lt__error(L, s, LT_EENV, "%s: cannot create this folder: %s", path, strerror(errno));
    return lt__return_boolean(L, made);
}

static const char names_class[] = "luatrain.Names";

typedef struct names { /* the result of scandir() */
    struct dirent **list;
    int n;
} names;

static int names_gc(lua_State *L)
{
    names *found = lua_touserdata(L, 1);
    while (found->n > 0)
        free(found->list[--found->n]);
    free(found->list);
    found->list = NULL;
    return 0;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* list_folder(path): returns the names in a folder, sorted bytewise; nil if path is not a readable
 * folder. */
static int list_folder(lua_State *L)
{
    const char *path = lt__check_path(L, lt__lua(L), 1, "run");
    names *found = lua_newuserdatauv(L, sizeof *found, 0);
    *found = (names){NULL, 0};
    luaL_setmetatable(L, names_class);
    /* not left to the collector, which misses objects that a finalizer creates while the state
     * closes */
    lua_toclose(L, -1);
    int n = scandir(path, &found->list, NULL, by_name);
    if (n < 0)
        return 0;
    found->n = n;
    lua_createtable(L, n, 0);
    for (int i = 0, k = 0; i < n; i++) {
        const char *name = found->list[i]->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            continue;
        lua_pushstring(L, name);
        lua_rawseti(L, -2, ++k);
    }
    return 1;
}

/* ==== Files =================================================================================== */

/* write_file(path, text): replaces a file atomically, so it contains either the old or the new
 * text. */
static int write_file(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *path = lt__check_path(L, s, 1, "run");
    size_t bytes;
    const char *text = luaL_checklstring(L, 2, &bytes);
    return lt__done(L, lt_file_replace(path, text, bytes));
}

/* cut_file(path, bytes): truncates a file to this length. */
static int cut_file(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *path = lt__check_path(L, s, 1, "run");
    if (truncate(path, (off_t)luaL_checkinteger(L, 2)) != 0)
        lt__error(L, s, LT_EFILE, "%s: cannot truncate: %s", path, strerror(errno));
    return 0;
}

/* Opens a regular file. On failure returns -1 and sets errno: EISDIR for a folder, ENXIO for
 * anything else that is not a regular file. Never blocks, as open() does on a FIFO that no other
 * process has opened. */
static int open_descriptor(const char *path, int flags)
{
    struct stat now;
    int fd;
    while ((fd = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666)) < 0 && errno == EINTR)
        ;
    if (fd < 0)
        return -1;
    int error = fstat(fd, &now) != 0   ? errno
                : S_ISREG(now.st_mode) ? 0
                : S_ISDIR(now.st_mode) ? EISDIR
                                       : ENXIO;
    if (error)
        close(fd);
    errno = error;
    return error ? -1 : fd;
}

/* Returns why open_descriptor() failed. */
static const char *open_error(void)
{
    return errno == ENXIO ? "this is not a regular file" : strerror(errno);
}

static int close_stream(lua_State *L)
{
    luaL_Stream *stream = luaL_checkudata(L, 1, LUA_FILEHANDLE);
    return luaL_fileresult(L, fclose(stream->f) == 0, NULL);
}

/* open_plain(path, mode): like io.open() with mode "r" or "a", but opens only regular files and
 * never blocks. Returns nil if there is no file to read; nil and a reason if it cannot be
 * opened. */
static int open_plain(lua_State *L)
{
    const char *path = lt__check_path(L, lt__lua(L), 1, "run");
    const char *mode = luaL_checkstring(L, 2);
    bool appends = *mode == 'a';
    luaL_Stream *stream = lua_newuserdatauv(L, sizeof *stream, 0);
    *stream = (luaL_Stream){NULL, NULL}; /* closed */
    luaL_setmetatable(L, LUA_FILEHANDLE);
    int fd = open_descriptor(path, appends ? O_WRONLY | O_CREAT | O_APPEND : O_RDONLY);
    if (fd >= 0 && (stream->f = fdopen(fd, mode))) {
        stream->closef = close_stream;
        return 1;
    }
    lua_pushnil(L);
    if (fd < 0 && errno == ENOENT && !appends)
        return 1;
    lua_pushfstring(L, "%s: %s", path, open_error());
    if (fd >= 0)
        close(fd);
    return 2;
}

static const char lock_class[] = "luatrain.Lock";

typedef struct held_lock {
    int fd;
    char path[];
} held_lock;

static int lock_gc(lua_State *L)
{
    held_lock *held = lua_touserdata(L, 1);
    if (held->fd >= 0)
        close(held->fd);
    held->fd = -1;
    return 0;
}

/* Writes this process's id into the locked file. */
static void sign(int fd)
{
    char text[32];
    int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    if (ftruncate(fd, 0) != 0 || write(fd, text, (size_t)n) != n)
        return; /* for example a full disk: the lock is held anyway */
}

/* Pushes the id of the process that last locked the file, or nil if it is unknown. */
static void push_signer(lua_State *L, int fd)
{
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    if (n > 0 && text[0] >= '1' && text[0] <= '9')
        lua_pushinteger(L, strtol(text, NULL, 10));
    else
        lua_pushnil(L);
}

/* lock:look(): returns "held" if the path still leads to the locked file, or if stat() fails for a
 * reason other than ENOENT, ENOTDIR or ELOOP; "gone" if the path does not exist; "taken" if it is
 * another file now, followed by the id of the process that last locked that file, or nil. */
static int lock_look(lua_State *L)
{
    const held_lock *held = lua_touserdata(L, 1);
    struct stat own, now;
    bool is_there = stat(held->path, &now) == 0;
    bool is_gone = !is_there && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP);
    if (is_gone) {
        lua_pushliteral(L, "gone");
        return 1;
    }
    if (!is_there || fstat(held->fd, &own) != 0 ||
        (own.st_dev == now.st_dev && own.st_ino == now.st_ino)) {
        lua_pushliteral(L, "held");
        return 1;
    }
    lua_pushliteral(L, "taken");
    int fd = open_descriptor(held->path, O_RDONLY);
    push_signer(L, fd);
    if (fd >= 0)
        close(fd);
    return 2;
}

static const luaL_Reg lock_methods[] = {{"close", lock_gc}, LT_METHOD(lock, look), {NULL, NULL}};

/* lock(path): creates and locks a file, and returns a handle that holds the lock until it is
 * closed. If another handle in any process holds it, returns nil and the id of that process, if
 * known. Closing does not remove the file, because another process may have locked it already. */
static int lock(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *path = lt__check_path(L, s, 1, "run");
    held_lock *held = lua_newuserdatauv(L, sizeof *held + strlen(path) + 1, 0);
    held->fd = -1;
    strcpy(held->path, path);
    luaL_setmetatable(L, lock_class);
    held->fd = open_descriptor(path, O_RDWR | O_CREAT);
    if (held->fd < 0)
        lt__error(L, s, LT_EENV, "%s: cannot write to it: %s", path, open_error());
    if (flock(held->fd, LOCK_EX | LOCK_NB) == 0) {
        sign(held->fd);
        return 1;
    }
    if (errno != EWOULDBLOCK) /* a file system without locks, as on some clusters */
        return 1;
    lua_pushnil(L);
    push_signer(L, held->fd);
    return 2;
}

/* ==== The machine and the process ============================================================= */

/* clock(): returns monotonic seconds since an arbitrary start. */
static int read_clock(lua_State *L) { return lt__return_number(L, lt__seconds()); }

/* trace(name, start): adds a span from start until now to the trace, if one is recorded. */
static int trace(lua_State *L)
{
    double start = luaL_checknumber(L, 2);
    lt_trace(lt__lua(L)->ctx, LT_TRACK_STEP, luaL_checkstring(L, 1), start, lt__seconds() - start);
    return 0;
}

/* terminal(): returns the width of the terminal in columns; nothing if stdout is not a terminal,
 * and nothing under mpirun, which may write the output to a file. */
static int terminal(lua_State *L)
{
    struct winsize size;
    if (!isatty(STDOUT_FILENO) || lt_mpi_is_launched())
        return 0;
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return lt__return_integer(L, known ? size.ws_col : 80);
}

static void push_memory(lua_State *L, lt_memory m)
{
    lua_createtable(L, 0, 4);
    lt__set_integer(L, "live", (lua_Integer)m.live);
    lt__set_integer(L, "peak", (lua_Integer)m.peak);
    lt__set_integer(L, "cached", (lua_Integer)m.cached);
}

/* memory(): returns the bytes of tensors on all devices: {live = , peak = , cached = , device = }.
 * cached bytes are free for reuse. The field device has the same for the computing device only. */
static int memory(lua_State *L)
{
    const lt_ctx *ctx = lt__lua(L)->ctx;
    push_memory(L, lt_memory_stats(ctx));
    push_memory(L, lt_device_memory_stats(ctx));
    lua_setfield(L, -2, "device");
    return 1;
}

/* peak_rss(): returns the largest resident set of this process so far, in bytes. */
static int peak_rss(lua_State *L)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return lt__return_integer(L, (lua_Integer)used.ru_maxrss * 1024);
}

/* backend(): returns the name of the compute backend, see lt_backend(). */
static int backend(lua_State *L)
{
    char text[96];
    return lt__return_string(L, lt_backend(lt__lua(L)->ctx, text, sizeof text));
}

/* device(): returns the name of the computing device, such as "cpu" or "cuda:0". */
static int device(lua_State *L) { return lt__return_string(L, lt_device_name(lt__lua(L)->ctx)); }

/* threads(): returns the number of CPU threads of this rank. */
static int threads(lua_State *L) { return lt__return_integer(L, lt_threads(lt__lua(L)->ctx)); }

static const char listener_class[] = "luatrain.Listener";

static int listener_gc(lua_State *L)
{
    lt_ctx **listening = lua_touserdata(L, 1);
    if (*listening)
        lt_stop_listen(*listening, false);
    *listening = NULL;
    return 0;
}

/* listener:keep(): the context listens until it is freed; the handle is no longer needed. */
static int listener_keep(lua_State *L)
{
    *(lt_ctx **)lua_touserdata(L, 1) = NULL;
    return 0;
}

static const luaL_Reg listener_methods[] = {
    {"close", listener_gc}, LT_METHOD(listener, keep), {NULL, NULL}};

/* listen(): returns a handle. Until it is closed, a signal requests a stop. */
static int listen_to_signals(lua_State *L)
{
    lt_ctx *ctx = lt__lua(L)->ctx;
    void **listening = lt__push_handle(L, listener_class);
    lt_stop_listen(ctx, true);
    *listening = ctx;
    return 1;
}

/* clear_stop(): clears the request to stop. */
static int clear_stop(lua_State *L)
{
    lt_stop(lt__lua(L)->ctx, 0);
    return 0;
}

/* stop_reason(): returns the name and the number of the signal that requested a stop; nothing if
 * there is no request. The name is "SIGTERM", for example, or "signal 12" if the signal is not in
 * the list below. stop_reason(n): the same for signal n. */
static int stop_reason(lua_State *L)
{
    static const struct {
        int signal;
        const char *name;
    } known[] = {{SIGINT, "SIGINT"},
                 {SIGTERM, "SIGTERM"},
                 {SIGHUP, "SIGHUP"},
                 {SIGUSR1, "SIGUSR1"},
                 {SIGPIPE, "SIGPIPE"}};
    int signal = (int)luaL_optinteger(L, 1, lt_stop_reason(lt__lua(L)->ctx));
    if (signal == 0)
        return 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].signal == signal) {
            lua_pushstring(L, known[i].name);
            lua_pushinteger(L, signal);
            return 2;
        }
    lua_pushfstring(L, "signal %d", signal);
    lua_pushinteger(L, signal);
    return 2;
}

static const luaL_Reg functions[] = {
    {"lt.memory() -> table -- The bytes of tensors: {live, peak, cached, device = {...}}.", memory},
    LT_FN(make_folder),
    LT_FN(new_folder),
    LT_FN(list_folder),
    LT_FN(write_file),
    LT_FN(cut_file),
    LT_FN(open_plain),
    LT_FN(lock),
    {"clock", read_clock},
    LT_FN(trace),
    LT_FN(terminal),
    LT_FN(peak_rss),
    LT_FN(backend),
    LT_FN(device),
    LT_FN(threads),
    {"listen", listen_to_signals},
    LT_FN(stop_reason),
    LT_FN(clear_stop),
    {NULL, NULL}};

void lt__open_system(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, names_class, NULL, names_gc);
    lt__new_class(L, lock_class, lock_methods, lock_gc);
    lt__new_class(L, listener_class, listener_methods, listener_gc);
}
