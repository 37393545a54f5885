/* file_kind.c - recognizes other files of tensors by their first bytes, for the error message. */
#include <string.h>

#include "core/file.h"

#define TORCH                                                                                      \
    "in Python, safetensors.torch.save_file(torch.load(FILE), 'new.safetensors') converts a "      \
    "table of tensors"

static const struct {
    int n; /* bytes of begin; at most 8 */
    const char *begin, *what, *hint;
} kinds[] = {
    {4, "PK\3\4", "a zip archive, such as a .pth file of PyTorch", TORCH},
    {2, "\x80\2", "a pickle, such as an old .pth file of PyTorch", TORCH},
    {2, "\x80\4", "a pickle of Python", TORCH},
    {6, "\x93NUMPY", "an array of NumPy",
     "in Python, safetensors.numpy.save_file({'x': numpy.load(FILE)}, 'new.safetensors') converts "
     "it"},
    {4, "\x89HDF", "an HDF5 file, such as one of Keras",
     "convert it in Python with safetensors.numpy.save_file()"},
    {4, "GGUF", "a GGUF file", "convert it in Python with safetensors.numpy.save_file()"},
};

lt_status lt__check_kind(const char *path, const uint64_t *length)
{
    if (*length <= LT_MAX_HEADER)
        return LT_OK;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (memcmp(length, kinds[i].begin, (size_t)kinds[i].n) == 0)
            return lt__bad(path, "this is %s, not a safetensors file; %s", kinds[i].what,
                           kinds[i].hint);
    return lt__bad(path,
                   "this is not a safetensors file: its header would have %llu bytes, but the "
                   "format allows at most %d",
                   (lt_ull)*length, LT_MAX_HEADER);
}
