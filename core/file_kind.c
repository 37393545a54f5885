/* file_kind.c - recognizes files of other programs by their first bytes, for an error message. */
#include <string.h>

#include "core/file.h"

#define TORCH                                                                                      \
    " of PyTorch, not a safetensors file; in Python, "                                             \
    "safetensors.torch.save_file(torch.load(FILE), 'new.safetensors') converts a dict of tensors"
#define NUMPY                                                                                      \
    ", not a safetensors file; convert it in Python with "                                         \
    "safetensors.numpy.save_file({name: array}, 'new.safetensors')"

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)
#define LIMIT TEXT(LT_MAX_HEADER)

static const struct {
    size_t n; /* bytes of begin; at most 8 */
    const char *begin, *text;
} kinds[] = {
    {4, "PK\3\4", "a zip archive, such as a .pth file" TORCH},
    {2, "\x80\2", "a pickle, such as an old .pth file" TORCH},
    {2, "\x80\4", "a pickle, such as an old .pth file" TORCH},
    {6, "\x93NUMPY", "an array of NumPy" NUMPY},
    {4, "\x89HDF", "an HDF5 file, such as one of Keras" NUMPY},
    {4, "GGUF", "a GGUF file" NUMPY},
};

const char *lt__kind_of(const char begin[8])
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (memcmp(begin, kinds[i].begin, kinds[i].n) == 0)
            return kinds[i].text;
    return "not a safetensors file: its header would be longer than the " LIMIT
           " bytes that the format allows";
}
