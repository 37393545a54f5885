/* find_library.c - see find_library.h.
 *
 * The library that is used is never closed: it has threads and handlers of its own, and is not
 * designed to be unloaded. A skipped one is closed, so that dlopen() with its soname finds another.
 */
#define _GNU_SOURCE
#include "ops/cuda/find_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TRIED = 32 };

typedef struct search {
    const lt_library *library;
    char *table;          /* the functions */
    char found[PATH_MAX]; /* the file that is used */
    char skipped[1024];   /* "FILE is version 9.1.0; FILE has no cudnnCreate" */
    struct {
        dev_t device;
        ino_t number;
    } tried[MAX_TRIED]; /* the first files that were tried; many folders are links to others */
    int n_tried;
} search;

/* Adds a file to the list of skipped ones. The arguments say why, as by printf. */
__attribute__((format(printf, 3, 4))) static bool skip(search *s, const char *file, const char *fmt,
                                                       ...)
{
    size_t at = strlen(s->skipped);
    va_list args;
    at += (size_t)snprintf(s->skipped + at, sizeof s->skipped - at, "%s%s ", at > 0 ? "; " : "",
                           file);
    va_start(args, fmt);
    if (at < sizeof s->skipped)
        vsnprintf(s->skipped + at, sizeof s->skipped - at, fmt, args);
    va_end(args);
    return false;
}

/* Whether the file is missing or was tried before, perhaps by another name. */
static bool is_tried(search *s, const char *file)
{
    struct stat about;
    if (stat(file, &about) != 0)
        return true;
    for (int i = 0; i < s->n_tried; i++)
        if (s->tried[i].device == about.st_dev && s->tried[i].number == about.st_ino)
            return true;
    if (s->n_tried < MAX_TRIED) {
        s->tried[s->n_tried].device = about.st_dev;
        s->tried[s->n_tried++].number = about.st_ino;
    }
    return false;
}

/* Resolves the functions, and asks whether the library will do. */
static bool check(search *s, void *opened, const char *file)
{
    const lt_library *library = s->library;
    char why[PATH_MAX] = "";
    for (int i = 0; i < library->n; i++) {
        void *symbol = dlsym(opened, library->names[i]);
        /* conversion from object to function pointer that ISO C allows */
        memcpy(s->table + (size_t)i * sizeof symbol, &symbol, sizeof symbol);
        if (!symbol)
            return skip(s, file, "has no %s", library->names[i]);
    }
    if (library->will_do && !library->will_do(file, s->table, why, sizeof why))
        return skip(s, file, "%s", why);
    snprintf(s->found, sizeof s->found, "%s", file);
    return true;
}

static bool use(search *s, void *opened, const char *file)
{
    bool will_do = check(s, opened, file);
    if (!will_do)
        dlclose(opened);
    return will_do;
}

/* Tries FOLDER/soname if that file exists. */
static bool try_folder(search *s, const char *folder, size_t length)
{
    char file[PATH_MAX];
    int n = snprintf(file, sizeof file, "%.*s/%s", (int)length, folder, s->library->soname);
    if (length == 0 || n >= (int)sizeof file || is_tried(s, file))
        return false;
    void *opened = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (opened)
        return use(s, opened, file);
    const char *why = dlerror();
    return skip(s, file, "cannot be loaded: %s", why ? why : "the loader gives no reason");
}

/* Tries the file that the loader finds, or has loaded already. */
static bool try_loader(search *s)
{
    struct link_map *map;
    void *opened = dlopen(s->library->soname, RTLD_NOW | RTLD_LOCAL);
    if (!opened)
        return false;
    if (dlinfo(opened, RTLD_DI_LINKMAP, &map) == 0 && !is_tried(s, map->l_name))
        return use(s, opened, map->l_name);
    dlclose(opened);
    return false;
}

/* Tries the folders in which the loader searches for this code. By the soname, it only finds the
 * first file. */
static bool try_folders_of_loader(search *s)
{
    static const char here[] = "";
    Dl_serinfo size, *path = NULL;
    Dl_info own;
    bool found = false;
    void *opened = dladdr(here, &own) ? dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!opened) /* this code is in the program itself */
        opened = dlopen(NULL, RTLD_LAZY);
    if (opened && dlinfo(opened, RTLD_DI_SERINFOSIZE, &size) == 0 && (path = malloc(size.dls_size)))
        *path = size;
    if (path && dlinfo(opened, RTLD_DI_SERINFO, path) == 0)
        for (unsigned i = 0; i < path->dls_cnt && !found; i++)
            found =
                try_folder(s, path->dls_serpath[i].dls_name, strlen(path->dls_serpath[i].dls_name));
    free(path);
    if (opened)
        dlclose(opened);
    return found;
}

/* Returns the next part of a list separated by colons, and advances *list. NULL at the end. */
static const char *next_part(const char **list, size_t *length)
{
    const char *part = *list;
    if (!part || !*part)
        return NULL;
    *length = strcspn(part, ":");
    *list = part + *length + (part[*length] == ':');
    return part;
}

static bool try_folders(search *s, const char *folders)
{
    size_t length;
    bool found = false;
    for (const char *folder; !found && (folder = next_part(&folders, &length));)
        found = try_folder(s, folder, length);
    return found;
}

static bool try_toolkit(search *s, const char *root)
{
    char folders[2 * PATH_MAX];
    if (!root || !*root || strlen(root) >= PATH_MAX - 8)
        return false;
    snprintf(folders, sizeof folders, "%s/lib64:%s/lib", root, root);
    return try_folders(s, folders);
}

/* Orders 3.10 before 3.9. */
static int newest_first(const void *a, const void *b)
{
    return strverscmp(*(char *const *)b, *(char *const *)a);
}

/* Tries the nvidia packages of a Python that is installed below root. */
static bool try_python(search *s, const char *root)
{
    static const char *const below[] = {"site-packages", "dist-packages"};
    bool found = false;
    for (size_t i = 0; root && *root && !found && i < sizeof below / sizeof *below; i++) {
        const char *packages = s->library->packages;
        size_t length;
        for (const char *package; !found && (package = next_part(&packages, &length));) {
            char pattern[PATH_MAX];
            glob_t list;
            int n = snprintf(pattern, sizeof pattern, "%s/lib/python3*/%s/nvidia/%.*s/lib", root,
                             below[i], (int)length, package);
            if (n >= (int)sizeof pattern || glob(pattern, 0, NULL, &list) != 0)
                continue;
            qsort(list.gl_pathv, list.gl_pathc, sizeof *list.gl_pathv, newest_first);
            for (size_t k = 0; !found && k < list.gl_pathc; k++)
                found = try_folder(s, list.gl_pathv[k], strlen(list.gl_pathv[k]));
            globfree(&list);
        }
    }
    return found;
}

/* Tries the Python installation of the first python3 in $PATH. follow: resolve symbolic links
 * first. */
static bool try_first_python(search *s, bool follow)
{
    const char *path = getenv("PATH");
    size_t length;
    for (const char *folder; (folder = next_part(&path, &length));) {
        char file[PATH_MAX], real[PATH_MAX];
        int n = snprintf(file, sizeof file, "%.*s/python3", (int)length, folder);
        if (length == 0 || n >= (int)sizeof file || access(file, X_OK) != 0)
            continue;
        if (follow && !realpath(file, real))
            return false;
        return try_python(s, dirname(dirname(follow ? real : file)));
    }
    return false;
}

static bool find_library(search *s)
{
    char local[PATH_MAX] = "";
    const char *home = getenv("HOME");
    if (home)
        snprintf(local, sizeof local, "%s/.local", home);
    return try_folders(s, getenv("LUATRAIN_CUDA_LIBS")) || try_loader(s) ||
           try_folders_of_loader(s) || try_toolkit(s, getenv("CUDA_HOME")) ||
           try_toolkit(s, "/usr/local/cuda") || try_python(s, getenv("VIRTUAL_ENV")) ||
           try_first_python(s, false) || try_first_python(s, true) || try_python(s, local) ||
           try_python(s, "/usr/local") || try_python(s, "/usr");
}

int lt__cuda_open(const lt_library *library, void *table, char *text, size_t bytes)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    search s = {.library = library, .table = table};
    pthread_mutex_lock(&lock); /* another thread must not find files that this one skips */
    bool found = find_library(&s);
    pthread_mutex_unlock(&lock);
    if (found && s.skipped[0])
        snprintf(text, bytes, "%s (skipped: %s)", s.found, s.skipped);
    else if (found)
        snprintf(text, bytes, "%s", s.found);
    else if (s.skipped[0])
        snprintf(text, bytes, "%s; install %s", s.skipped, library->what);
    else
        snprintf(text, bytes,
                 "%s was not found in the loader's path, $LUATRAIN_CUDA_LIBS, $CUDA_HOME, "
                 "/usr/local/cuda or Python's nvidia packages; install %s",
                 library->soname, library->what);
    return found ? 0 : -1;
}
