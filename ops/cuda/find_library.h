/* find_library.h - finds and opens NVIDIA's libraries.
 *
 * Search order: the folders of $LUATRAIN_CUDA_LIBS (separated by colons); the loader's own search
 * path; lib64 and lib of the toolkit ($CUDA_HOME, /usr/local/cuda); Python's nvidia packages in
 * $VIRTUAL_ENV, in the installation of the first python3 in $PATH, and in ~/.local, /usr/local and
 * /usr. A file that cannot be loaded, lacks a function or is too old is skipped. The first file
 * that will do is used, and stays loaded.
 */
#ifndef LT_OPS_CUDA_FIND_LIBRARY_H
#define LT_OPS_CUDA_FIND_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_library {   /* what to search for */
    const char *soname;       /* "libnccl.so.2" */
    const char *packages;     /* folders below nvidia/ that may contain it, separated by colons */
    const char *what;         /* what a user must install: "NCCL 2.18 or later" */
    const char *const *names; /* (n) the functions to resolve */
    int n;
    /* Whether a loaded file will do. table: its n functions. If not, writes what it is to why: "is
     * version 2.8.4". May be NULL. */
    bool (*will_do)(const char *file, const void *table, char *why, size_t bytes);
} lt_library;

/* Opens the library and fills a table, a struct of library->n function pointers. Writes to text
 * which file is used, and which files were skipped and why. Returns 0, or -1 if no file will do;
 * text then says what to do. */
int lt__cuda_open(const lt_library *library, void *table, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
