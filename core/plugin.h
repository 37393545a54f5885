/* plugin.h - parts of luatrain that are opened at run time, since what they stand on is not on
 * every machine: libluatrain-mpi.so, libluatrain-cuda.so. A door for the rooms above core.
 *
 * A plugin lies in the folder that the variable LUATRAIN_PLUGINS names, else where it was built or
 * installed: beside the library or the program, or in lib/luatrain.
 */
#ifndef LT_CORE_PLUGIN_H
#define LT_CORE_PLUGIN_H

#include <limits.h>

#include "core/core.h"

enum { LT_PLUGIN_PATH = PATH_MAX + 64 };

/* The path of libluatrain-NAME.so into file; false when there is none. */
bool lt__plugin_find(const char *name, char file[LT_PLUGIN_PATH]);
/* Opens the plugin in file, and never closes it: MPI and CUDA are not made for that. *function, a
 * pointer to a function, is what it exports as symbol. LT_EENV. */
lt_status lt__plugin_open(const char *file, const char *symbol, void *function);

#endif
