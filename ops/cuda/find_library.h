/* find_library.h - finds and opens NVIDIA's libraries.
 *
 * Search order: the folders of $LUATRAIN_CUDA_LIBS (separated by colons); the loader's own search
 * path; lib64 and lib of the toolkit ($CUDA_HOME, /usr/local/cuda); Python's nvidia packages in
 * $VIRTUAL_ENV, in the installation of the first python3 in $PATH, and in ~/.local, /usr/local and
 * /usr. The first library that opens is used, and stays loaded.
 */
#ifndef LT_OPS_CUDA_FIND_LIBRARY_H
#define LT_OPS_CUDA_FIND_LIBRARY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a library and resolves names[0..n) into functions[0..n). soname: "libnccl.so.2"; packages:
 * the folders below nvidia/ that may contain it, separated by colons; what: the oldest supported
 * version, "NCCL 2.18", for messages. Returns the handle from dlopen(), or NULL with a message in
 * text. */
void *lt__cuda_open(const char *soname, const char *packages, const char *what,
                    const char *const *names, void (**functions)(void), int n, char *text,
                    size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
