/* script.h - finds and runs the script named on the command line. */
#ifndef LT_TOOLS_SCRIPT_H
#define LT_TOOLS_SCRIPT_H

#include <limits.h>
#include <stdbool.h>

#include "lua/luatrain.h"

/* Sets path to the path of this program. Returns false and sets it to "" if that is unknown. */
bool find_program(char path[PATH_MAX]);
/* Runs the script argv[0] with the arguments that follow. argv[0] is the path of a file, the name
 * of one of luatrain's models, or "-" for stdin. A pipe that the shell opened, as in `luatrain
 * <(command)`, is first read to its end. FIFOs, devices and sockets are LT_EUSAGE, because opening
 * one may block forever. Also fails as lt_lua_dofile() does. */
LT_MUST lt_status run_script(lua_State *L, int argc, char **argv);

#endif
