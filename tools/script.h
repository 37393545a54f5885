/* script.h - finds and runs the script named on the command line. */
#ifndef LT_TOOLS_SCRIPT_H
#define LT_TOOLS_SCRIPT_H

#include <limits.h>
#include <stdbool.h>

#include "tools/options.h"

/* Sets path to the path of this program. Returns false and sets it to "" if that is unknown. */
bool find_program(char path[PATH_MAX]);
/* Runs the script argv[0] with the arguments that follow. argv[0] is the path of a file, the name
 * of one of luatrain's models, or "-" for stdin. A pipe that the shell opened, as in `luatrain
 * <(command)`, is first read to its end. FIFOs, devices and sockets are LT_EUSAGE, because opening
 * one may block forever. Also fails as lt_lua_dofile() does. */
LT_MUST lt_status run_script(lua_State *L, int argc, char **argv);
/* Passes the options and this process's command line to luatrain/command_line.lua. */
LT_MUST lt_status pass_command_line(lua_State *L, const settings *s);
/* Runs a subcommand that observes how a script trains. attach() in luatrain/commands/NAME.lua gets
 * argv (argc), the arguments after the name. It returns the position of the script among them, or
 * nil for no script, and a function. The script runs until it ends or the observer ends it with
 * LT_EDONE; then the function is called, and its result is left on the stack. */
LT_MUST lt_status run_attached(lua_State *L, const char *name, int argc, char **argv);

#endif
