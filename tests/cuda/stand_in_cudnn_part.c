/* stand_in_cudnn_part.c - one of the files that cuDNN loads by their sonames. Like them, it tells
 * its version. */
#pragma GCC visibility push(default)

extern const char cudnn_part_version[];
const char cudnn_part_version[] = "cudnn_version_9_19_0_56";
