/* script.c - see script.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <lauxlib.h>

#include "tools/script.h"

/* Limits for a script read from a pipe: seconds without data, and total bytes. */
enum { PIPE_SECONDS = 10, PIPE_BYTES = 64 << 20 };

/* The folders of models, relative to this program: installed in share/, or in the repository if
 * this is its build folder. */
static const char *const models[] = {"../share/luatrain/models", "../models"};
enum { N_MODELS = sizeof models / sizeof *models };

bool find_program(char path[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = '\0';
    return n > 0;
}

/* ==== Pipes =================================================================================== */

/* Returns the descriptor that a path such as /dev/fd/63 names, or -1 for other paths. */
static int descriptor_of(const char *path)
{
    int fd, used = 0;
    if (strcmp(path, "/dev/stdin") == 0)
        return STDIN_FILENO;
    if (sscanf(path, "/dev/fd/%9d%n", &fd, &used) < 1 &&
        sscanf(path, "/proc/self/fd/%9d%n", &fd, &used) < 1)
        return -1;
    return path[used] == '\0' ? fd : -1;
}

/* Reads up to `bytes` bytes from a pipe. *n is the number read, 0 at the end. */
static lt_status read_some(const char *path, int pipe, char *data, size_t bytes, ssize_t *n)
{
    struct pollfd in = {.fd = pipe, .events = POLLIN};
    int ready;
    do {
        ready = poll(&in, 1, 1000 * PIPE_SECONDS);
        *n = ready > 0 ? read(pipe, data, bytes) : -1;
    } while (ready != 0 && *n < 0 && (errno == EINTR || errno == EAGAIN));
    if (ready == 0)
        return lt_fail(LT_EUSAGE, "the script '%s' is a pipe that sent nothing for %d s", path,
                       PIPE_SECONDS);
    return *n >= 0 ? LT_OK : lt_fail(LT_EENV, "the script '%s': %s", path, strerror(errno));
}

static lt_status copy(const char *path, int pipe, int file)
{
    char data[1 << 14];
    ssize_t n;
    for (ssize_t all = 0;; all += n) {
        LT_TRY(read_some(path, pipe, data, sizeof data, &n));
        if (n == 0)
            return LT_OK;
        if (all + n > PIPE_BYTES)
            return lt_fail(LT_EUSAGE, "the script '%s' is longer than %d MiB", path,
                           PIPE_BYTES >> 20);
        if (write(file, data, (size_t)n) != n)
            return lt_fail(LT_ENOMEM, "out of memory for the script '%s'", path);
    }
}

/* Copies a pipe to a file in memory and replaces the pipe's descriptor with it, so that each rank
 * can read the script at the same path. */
static lt_status keep(const char *path, int pipe)
{
    int file = memfd_create("script", 0);
    if (file < 0)
        return lt_fail(LT_ENOMEM, "out of memory for the script '%s'", path);
    lt_status status = copy(path, pipe, file);
    if (status == LT_OK && dup2(file, pipe) < 0)
        status = lt_fail(LT_EENV, "cannot read the script '%s': %s", path, strerror(errno));
    close(file);
    return status;
}

/* If path names a pipe, replaces the pipe with a file of the same content. */
static lt_status keep_pipe(const char *path)
{
    static pthread_mutex_t one_rank_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    struct stat now;
    int fd = descriptor_of(path);
    lt_status status = LT_OK;
    pthread_mutex_lock(&one_rank_at_a_time);
    if (fd >= 0 && fstat(fd, &now) == 0 && S_ISFIFO(now.st_mode))
        status = keep(path, fd);
    pthread_mutex_unlock(&one_rank_at_a_time);
    return status;
}

/* ==== The script ============================================================================== */

/* Sets *is_there to whether the script exists. LT_EUSAGE if path is a FIFO, a socket or a
 * device. */
static lt_status look(const char *path, bool *is_there)
{
    struct stat now;
    *is_there = stat(path, &now) == 0 && !S_ISDIR(now.st_mode);
    if (!*is_there || S_ISREG(now.st_mode))
        return LT_OK;
    return lt_fail(LT_EUSAGE,
                   "the script '%s' is a %s, but luatrain runs files; `luatrain -` "
                   "reads the script from stdin",
                   path,
                   S_ISFIFO(now.st_mode)   ? "FIFO"
                   : S_ISSOCK(now.st_mode) ? "socket"
                                           : "device");
}

static lt_status find_script(const char *name, char path[PATH_MAX])
{
    char program[PATH_MAX], found[PATH_MAX];
    bool is_there = false;
    if (strcmp(name, "-") == 0)
        name = "/dev/stdin";
    LT_TRY(keep_pipe(name));
    if (strlen(name) < PATH_MAX)
        LT_TRY(look(name, &is_there));
    if (is_there) {
        strcpy(path, name);
        return LT_OK;
    }
    const char *folder = find_program(program) ? dirname(program) : NULL;
    for (int i = 0; folder && i < N_MODELS && name[0] != '/'; i++) {
        int n = snprintf(found, PATH_MAX, "%s/%s/%s", folder, models[i], name);
        if (n < PATH_MAX && look(found, &is_there) == LT_OK && is_there && realpath(found, path))
            return LT_OK;
    }
    return lt_fail(LT_EUSAGE, "script '%s' was found neither here nor among the models of luatrain",
                   name);
}

/* Makes require() search the script's folder first, and the folders of models last. */
static void add_to_package_path(lua_State *L, const char *script)
{
    char folder[PATH_MAX], program[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", script);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    const char *path = lua_tostring(L, -1);
    lua_pushfstring(L, "%s/?.lua;%s", dirname(folder), path ? path : "");
    const char *beside = find_program(program) ? dirname(program) : NULL;
    for (int i = 0; beside && i < N_MODELS; i++) {
        lua_pushfstring(L, ";%s/%s/?.lua", beside, models[i]);
        lua_concat(L, 2);
    }
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
}

lt_status run_script(lua_State *L, int argc, char **argv)
{
    char path[PATH_MAX];
    LT_TRY(find_script(argv[0], path));
    add_to_package_path(L, path);
    return lt_lua_dofile(L, path, argc - 1, argv + 1);
}

/* ==== Commands ================================================================================ */

static int push_command_line(lua_State *L)
{
    const settings *s = lua_touserdata(L, 1);
    char **words = s->argv - s->n_options;
    lua_getglobal(L, "require");
    lua_pushstring(L, "luatrain.command_line");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "set");
    lua_newtable(L);
    for (int i = 0; words[i]; i++) {
        lua_pushstring(L, words[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushinteger(L, s->n_options);
    lua_newtable(L);
    for (int i = 0; option_name(i); i++) {
        lua_pushfstring(L, "--%s", option_name(i));
        lua_pushboolean(L, true);
        lua_rawset(L, -3);
    }
    lua_call(L, 3, 0);
    return 0;
}

lt_status pass_command_line(lua_State *L, const settings *s)
{
    lua_pushcfunction(L, push_command_line);
    lua_pushlightuserdata(L, (void *)s);
    return lt_lua_call(L, 1, 0);
}

static const char attach_script[] =
    "return require('luatrain.commands.' .. ...).attach(select(2, ...))";

lt_status run_attached(lua_State *L, const char *name, int argc, char **argv)
{
    if (!lua_checkstack(L, argc + 3) ||
        luaL_loadbuffer(L, attach_script, sizeof attach_script - 1, "=luatrain/attach") != LUA_OK)
        return lt_fail(LT_ENOMEM, "out of memory for a Lua state"); /* not a syntax error */
    lua_pushstring(L, name);
    for (int i = 0; i < argc; i++)
        lua_pushstring(L, argv[i]);
    lt_status status = lt_lua_call(L, 1 + argc, 2);
    if (status != LT_OK)
        return status == LT_EDONE ? LT_OK : status;
    int script = (int)lua_tointeger(L, 1) - 1;
    if (script >= 0)
        status = run_script(L, argc - script, argv + script);
    if (status != LT_OK && status != LT_EDONE)
        return status;
    lua_settop(L, 2);
    return lt_lua_call(L, 0, 1);
}
