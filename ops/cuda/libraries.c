/* libraries.c - fills the tables of functions of cuDNN and cuBLASLt.
 *
 * cuDNN consists of several files. libcudnn.so.9 loads the others by their sonames when they are
 * needed. The loader looks for them in the folders of LD_LIBRARY_PATH before their own, and they
 * cannot be unloaded. So files of two versions in one process get mixed, and fail. To avoid that,
 * the version of a cuDNN is read from its files before any of its functions is called, and its
 * files are loaded by their paths.
 */
#define _GNU_SOURCE
#include "ops/cuda/libraries.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CUDNN_SONAME "libcudnn.so.9"
#define GRAPH "libcudnn_graph.so.9"
#define ENGINES "libcudnn_engines_precompiled.so.9"
enum { OUR_CUDA = CUBLAS_VER_MAJOR };

#define X(name) #name,
static const char *const cudnn_names[] = {LT_CUDNN_LIST(X)};
static const char *const cublaslt_names[] = {LT_CUBLASLT_LIST(X)};
#undef X

/* A table consists only of function pointers, in the order of its names. */
enum {
    CUDNN_NAMES = sizeof cudnn_names / sizeof *cudnn_names,
    CUBLASLT_NAMES = sizeof cublaslt_names / sizeof *cublaslt_names
};
_Static_assert(sizeof(lt_cudnn_table) == CUDNN_NAMES * sizeof(void (*)(void)), "a table");
_Static_assert(sizeof(lt_cublaslt_table) == CUBLASLT_NAMES * sizeof(void (*)(void)), "a table");

/* ==== What will do ============================================================================ */

static bool is_new_enough(size_t version, size_t oldest, char *why, size_t bytes)
{
    char text[24];
    if (version < oldest)
        snprintf(why, bytes, "is version %s", lt__version_text(version, text));
    return version >= oldest;
}

static bool is_for_our_cuda(int major, char *why, size_t bytes)
{
    if (major != OUR_CUDA)
        snprintf(why, bytes, "is for CUDA %d", major);
    return major == OUR_CUDA;
}

static bool cublaslt_will_do(const char *file, const void *table, char *why, size_t bytes)
{
    (void)file;
    return is_new_enough(((const lt_cublaslt_table *)table)->cublasLtGetVersion(),
                         LT_CUBLASLT_OLDEST, why, bytes);
}

/* Writes the folder of the file, with links resolved if real. Returns false if that is unknown. */
static bool folder_of(const char *file, bool real, char folder[PATH_MAX])
{
    if (real ? !realpath(file, folder) : snprintf(folder, PATH_MAX, "%s", file) >= PATH_MAX)
        return false;
    char *end = strrchr(folder, '/');
    if (end)
        *end = 0;
    return end != NULL;
}

static bool join(const char *folder, const char *name, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX;
}

/* Writes the folder with the other files of a cuDNN: the folder of libcudnn.so.9, or of the file to
 * which it is a link. Returns false if they are in neither. */
static bool find_parts(const char *file, char folder[PATH_MAX])
{
    char path[PATH_MAX];
    for (int real = 0; real < 2; real++)
        if (folder_of(file, real, folder) && join(folder, GRAPH, path) && access(path, F_OK) == 0)
            return true;
    return false;
}

/* Copies what follows `before` in a file. Returns false if there is no such text. */
static bool read_file(const char *path, const char *before, char after[16])
{
    struct stat about;
    int opened = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = opened >= 0 && fstat(opened, &about) == 0 ? (size_t)about.st_size : 0;
    const char *all = n > 0 ? mmap(NULL, n, PROT_READ, MAP_PRIVATE, opened, 0) : MAP_FAILED;
    if (opened >= 0)
        close(opened);
    if (all == MAP_FAILED)
        return false;
    const char *at = memmem(all, n, before, strlen(before));
    if (at) {
        at += strlen(before);
        snprintf(after, 16, "%.*s", (int)(all + n - at), at);
    }
    munmap((void *)all, n);
    return at != NULL;
}

static bool read_part(const char *folder, const char *name, const char *before, char after[16])
{
    char path[PATH_MAX];
    return join(folder, name, path) && read_file(path, before, after);
}

/* What the files say, if anything: "cudnn_version_9_19_0_56" is in one of them, and the soname of
 * cuBLASLt in another. */
static bool parts_will_do(const char *folder, char *why, size_t bytes)
{
    char text[16];
    unsigned major, minor, patch;
    if (read_part(folder, GRAPH, "cudnn_version_", text) &&
        sscanf(text, "%u_%u_%u", &major, &minor, &patch) == 3 &&
        !is_new_enough(major * 10000 + minor * 100 + patch, LT_CUDNN_OLDEST, why, bytes))
        return false;
    int cuda = read_part(folder, ENGINES, "libcublasLt.so.", text) ? atoi(text) : 0;
    return cuda == 0 || is_for_our_cuda(cuda, why, bytes);
}

/* Loads a file of a cuDNN. NULL if the program has loaded this file of another cuDNN, because cuDNN
 * uses the first file with this soname. */
static void *load_part(const char *path, const char *soname, char *why, size_t bytes)
{
    void *own = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    const char *error = own ? NULL : dlerror();
    void *first = own ? dlopen(soname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (first)
        dlclose(first);
    if (own && own == first)
        return own;
    if (error)
        snprintf(why, bytes, "cannot be used: %s", error);
    else
        snprintf(why, bytes, "cannot be used beside another cuDNN, which is loaded already");
    if (own)
        dlclose(own);
    return NULL;
}

/* Loads the file that has most functions of this cuDNN. */
static bool load_graph(const char *file, const char *folder, char *why, size_t bytes)
{
    char path[PATH_MAX];
    void *own = load_part(file, CUDNN_SONAME, why, bytes);
    if (own)
        dlclose(own); /* the search has opened it, too */
    return own && join(folder, GRAPH, path) && load_part(path, GRAPH, why, bytes);
}

/* Whether a cuDNN without other files will do. A function that is in one of them would end the
 * process. */
static bool is_complete(const char *file, char *why, size_t bytes)
{
    char text[16];
    bool lacks = read_file(file, "libcudnn_graph.so", text);
    if (lacks)
        snprintf(why, bytes, "lacks " GRAPH);
    return !lacks;
}

static bool cudnn_will_do(const char *file, const void *table, char *why, size_t bytes)
{
    const lt_cudnn_table *t = table;
    char folder[PATH_MAX];
    return (find_parts(file, folder)
                ? parts_will_do(folder, why, bytes) && load_graph(file, folder, why, bytes)
                : is_complete(file, why, bytes)) &&
           is_new_enough(t->cudnnGetVersion(), LT_CUDNN_OLDEST, why, bytes) &&
           is_for_our_cuda((int)(t->cudnnGetCudartVersion() / 1000), why, bytes);
}

/* ==== Opening ================================================================================= */

int lt__cublaslt_open(lt_cublaslt_table *table, char *text, size_t bytes)
{
    static const lt_library library = {.soname = LT_CUBLASLT_SONAME,
                                       .packages = "cu" LT_CUDA_MAJOR ":cublas",
                                       .what = "cuBLAS " LT_CUDA_MAJOR ".0 or later",
                                       .names = cublaslt_names,
                                       .n = CUBLASLT_NAMES,
                                       .will_do = cublaslt_will_do};
    return lt__cuda_open(&library, table, text, bytes);
}

int lt__cudnn_open_library(lt_cudnn_table *table, char *text, size_t bytes)
{
    static const lt_library library = {.soname = CUDNN_SONAME,
                                       .packages = "cudnn",
                                       .what = "cuDNN 9.8 or later for CUDA " LT_CUDA_MAJOR,
                                       .names = cudnn_names,
                                       .n = CUDNN_NAMES,
                                       .will_do = cudnn_will_do};
    return lt__cuda_open(&library, table, text, bytes);
}

/* The files that the graph API needs, in an order in which each is loaded after those that it is
 * linked with. */
void lt__cudnn_load_parts(const lt_cudnn_table *table)
{
    static const char *const names[] = {GRAPH, "libcudnn_ops.so.9", "libcudnn_heuristic.so.9",
                                        "libcudnn_engines_*.so.9"};
    char folder[PATH_MAX];
    Dl_info about;
    void *function;
    memcpy(&function, &table->cudnnGetVersion, sizeof function);
    if (dladdr(function, &about) == 0 || !find_parts(about.dli_fname, folder))
        return;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char pattern[PATH_MAX];
        glob_t list;
        if (!join(folder, names[i], pattern) || glob(pattern, 0, NULL, &list) != 0)
            continue;
        for (size_t k = 0; k < list.gl_pathc; k++)
            (void)dlopen(list.gl_pathv[k], RTLD_LAZY | RTLD_LOCAL);
        globfree(&list);
    }
}
