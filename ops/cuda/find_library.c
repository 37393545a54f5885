/* find_library.c - see find_library.h.
 *
 * Libraries are never closed: they have threads and handlers of their own, and are not designed to
 * be unloaded.
 */
#define _GNU_SOURCE
#include "ops/cuda/find_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct search {
    const char *soname;
    const char *packages;
    char found[PATH_MAX]; /* the last file found */
    char why[512];        /* the loader's error for that file */
} search;

/* Opens FOLDER/soname if that file exists. */
static void *try_folder(search *s, const char *folder, size_t length)
{
    char file[PATH_MAX];
    int n = snprintf(file, sizeof file, "%.*s/%s", (int)length, folder, s->soname);
    if (length == 0 || n >= (int)sizeof file || access(file, F_OK) != 0)
        return NULL;
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    snprintf(s->found, sizeof s->found, "%s", file);
    if (!library) {
        const char *why = dlerror();
        snprintf(s->why, sizeof s->why, "%s", why ? why : "the loader gives no reason");
    }
    return library;
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

static void *try_folders(search *s, const char *folders)
{
    size_t length;
    void *library = NULL;
    for (const char *folder; !library && (folder = next_part(&folders, &length));)
        library = try_folder(s, folder, length);
    return library;
}

static void *try_toolkit(search *s, const char *root)
{
    char folders[2 * PATH_MAX];
    if (!root || !*root || strlen(root) >= PATH_MAX - 8)
        return NULL;
    snprintf(folders, sizeof folders, "%s/lib64:%s/lib", root, root);
    return try_folders(s, folders);
}

/* Orders 3.10 before 3.9. */
static int newest_first(const void *a, const void *b)
{
    return strverscmp(*(char *const *)b, *(char *const *)a);
}

/* Tries the nvidia packages of a Python that is installed below root. */
static void *try_python(search *s, const char *root)
{
    static const char *const below[] = {"site-packages", "dist-packages"};
    void *library = NULL;
    for (size_t i = 0; root && *root && !library && i < sizeof below / sizeof *below; i++) {
        const char *packages = s->packages;
        size_t length;
        for (const char *package; !library && (package = next_part(&packages, &length));) {
            char pattern[PATH_MAX];
            glob_t list;
            int n = snprintf(pattern, sizeof pattern, "%s/lib/python3*/%s/nvidia/%.*s/lib", root,
                             below[i], (int)length, package);
            if (n >= (int)sizeof pattern || glob(pattern, 0, NULL, &list) != 0)
                continue;
            qsort(list.gl_pathv, list.gl_pathc, sizeof *list.gl_pathv, newest_first);
            for (size_t k = 0; !library && k < list.gl_pathc; k++)
                library = try_folder(s, list.gl_pathv[k], strlen(list.gl_pathv[k]));
            globfree(&list);
        }
    }
    return library;
}

/* Tries the Python installation of the first python3 in $PATH. follow: resolve symbolic links
 * first. */
static void *try_first_python(search *s, bool follow)
{
    const char *path = getenv("PATH");
    size_t length;
    for (const char *folder; (folder = next_part(&path, &length));) {
        char file[PATH_MAX], real[PATH_MAX];
        int n = snprintf(file, sizeof file, "%.*s/python3", (int)length, folder);
        if (length == 0 || n >= (int)sizeof file || access(file, X_OK) != 0)
            continue;
        if (follow && !realpath(file, real))
            return NULL;
        return try_python(s, dirname(dirname(follow ? real : file)));
    }
    return NULL;
}

static void *find_library(search *s)
{
    char local[PATH_MAX] = "";
    const char *home = getenv("HOME");
    if (home)
        snprintf(local, sizeof local, "%s/.local", home);
    void *library = try_folders(s, getenv("LUATRAIN_CUDA_LIBS"));
    if (!library && (library = dlopen(s->soname, RTLD_NOW | RTLD_LOCAL)))
        snprintf(s->found, sizeof s->found, "%s", s->soname);
    if (!library)
        library = try_toolkit(s, getenv("CUDA_HOME"));
    if (!library)
        library = try_toolkit(s, "/usr/local/cuda");
    if (!library)
        library = try_python(s, getenv("VIRTUAL_ENV"));
    if (!library)
        library = try_first_python(s, false);
    if (!library)
        library = try_first_python(s, true);
    if (!library)
        library = try_python(s, local);
    if (!library)
        library = try_python(s, "/usr/local");
    return library ? library : try_python(s, "/usr");
}

void *lt__cuda_open(const char *soname, const char *packages, const char *what,
                    const char *const *names, void (**functions)(void), int n, char *text,
                    size_t bytes)
{
    search s = {.soname = soname, .packages = packages};
    void *library = find_library(&s);
    if (!library && s.found[0])
        snprintf(text, bytes, "%s cannot be loaded: %s", s.found, s.why);
    else if (!library)
        snprintf(text, bytes,
                 "%s was not found in the loader's path, $LUATRAIN_CUDA_LIBS, $CUDA_HOME, "
                 "/usr/local/cuda or Python's nvidia packages; install %s or later",
                 soname, what);
    for (int i = 0; library && i < n; i++) {
        void *symbol = dlsym(library, names[i]);
        /* conversion from object to function pointer that ISO C allows */
        memcpy(&functions[i], &symbol, sizeof symbol);
        if (!symbol) {
            snprintf(text, bytes, "%s has no %s; install %s or later", s.found, names[i], what);
            library = NULL;
        }
    }
    return library;
}
