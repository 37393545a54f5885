/* plugin.h - loads plugins at run time: libluatrain-mpi.so, -zmq.so and -cuda.so, whose
 * dependencies are not on every machine. Used by other modules; not installed.
 *
 * Plugins are searched for in the folder $LUATRAIN_PLUGINS, then in the folder of the library or
 * program, in its subfolder luatrain, and in ../lib/luatrain.
 */
#ifndef LT_CORE_PLUGIN_H
#define LT_CORE_PLUGIN_H

#include <limits.h>

#include "core/core.h"

enum { LT_PLUGIN_PATH = PATH_MAX + 64 };

/* Writes the path of libluatrain-NAME.so to file. Returns false if it is not found. */
bool lt__plugin_find(const char *name, char file[LT_PLUGIN_PATH]);
/* Loads the plugin in file and never unloads it, since MPI and CUDA do not support unloading. Sets
 * *function, a function pointer, to the function that the plugin exports as symbol. LT_EENV. */
lt_status lt__plugin_open(const char *file, const char *symbol, void *function);

#endif
