/* find_library.h - where NVIDIA's libraries are.
 *
 * A library is looked for in the folders of $LUATRAIN_CUDA_LIBS (with colons between them), where
 * the loader looks, in the toolkit's lib64 and lib ($CUDA_HOME, /usr/local/cuda), and in the
 * nvidia packages of the Pythons that can be seen: $VIRTUAL_ENV, that of python3 in $PATH,
 * ~/.local, /usr/local and /usr. The first one that opens is taken, and stays.
 */
#ifndef LT_OPS_CUDA_FIND_LIBRARY_H
#define LT_OPS_CUDA_FIND_LIBRARY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* soname: "libnccl.so.2"; packages: the folders below nvidia/ that may have
 * it, with colons between them; what: "NCCL 2.18". functions[0..n) are set by names[0..n). The
 * handle, as of dlopen(), or NULL with a sentence. */
void *lt__cuda_open(const char *soname, const char *packages, const char *what,
                    const char *const *names, void (**functions)(void), int n, char *text,
                    size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
