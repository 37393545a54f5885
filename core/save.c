/* save.c - writes files of named tensors; see file.c for the format. */
