/* script.h - finds and runs the script that luatrain is called with. */
#ifndef LT_TOOLS_SCRIPT_H
#define LT_TOOLS_SCRIPT_H

#include <limits.h>
#include <stdbool.h>

#include "lua/luatrain.h"

/* The path of this program; false, and "", when the system does not tell. */
bool find_program(char path[PATH_MAX]);
/* Runs the script argv[0]: a file here or among the models of luatrain; "-" is stdin. A pipe that
 * the shell has opened, as in `luatrain <(command)`, is read to its end first. Everything else is
 * LT_EUSAGE: to open a FIFO or a device could wait without end. */
LT_MUST lt_status run_script(lua_State *L, int argc, char **argv);

#endif
