/* error.c - turns library errors into Lua errors, and Lua errors into library errors.
 *
 * An error is a string: "train.lua:9: net.4 conv2d: w must ...". The line is from the innermost
 * stack frame of user code; frames of C and of the embedded luatrain/NAME.lua are skipped. The
 * module ("net.4") is the innermost one that is being called: the first local of its __call frame
 * is the module. Both are read from the Lua stack only when needed, so calling a module costs
 * nothing, and no state has to be reset after an error.
 *
 * The last LT_KEPT_ERRORS statuses raised here are kept with their messages. When an error reaches
 * lt_lua_call(), it gets the status of the kept message that its text contains. Several are kept
 * because other errors may be raised and caught while one propagates.
 */
#include <stdio.h>
#include <string.h>

#include "core/locale.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/embedded.h"

enum { DEEPEST = 100 }; /* stack levels that are searched */

/* Their addresses are keys: in the registry, and in each module's table. */
static const char key_messages, key_module, key_table_text;

/* ==== The place of an error =================================================================== */

/* If the Lua frame ar is the __call of a module, pushes the module and returns true. A module
 * stores its record {path, __call} under the key &key_module; see module.lua. Allocates nothing,
 * so it cannot raise. */
static bool push_module_of(lua_State *L, lua_Debug *ar)
{
    int top = lua_gettop(L);
    if (!lua_checkstack(L, 4) || !lua_getlocal(L, ar, 1))
        return false;
    bool found = false;
    if (lua_istable(L, -1) && lua_rawgetp(L, -1, &key_module) == LUA_TTABLE) {
        lua_rawgeti(L, -1, 2);
        lua_getinfo(L, "f", ar);
        found = lua_rawequal(L, -1, -2);
    }
    lua_settop(L, found ? top + 1 : top);
    return found;
}

typedef struct place {
    char line[LUA_IDSIZE + 16]; /* "train.lua:9: " */
    char module[120];           /* "net.4 " */
} place;

/* Truncates a long path at its start, because the paths of layers differ at the end. */
static void set_module(place *p, const char *path)
{
    size_t length = strlen(path), max = sizeof p->module - 2;
    if (length > max)
        snprintf(p->module, sizeof p->module, "...%s ", path + length - max + 3);
    else
        snprintf(p->module, sizeof p->module, "%s ", path);
}

/* Sets p->line. Avoids snprintf() because this runs for every op recorded on the tape. */
static void set_line(place *p, const char *source, int line)
{
    char digits[12], *first = digits + sizeof digits;
    size_t length = strlen(source);
    memcpy(p->line, source, length);
    do
        *--first = (char)('0' + line % 10);
    while (line /= 10);
    size_t n = (size_t)(digits + sizeof digits - first);
    p->line[length] = ':';
    memcpy(p->line + length + 1, first, n);
    memcpy(p->line + length + 1 + n, ": ", 3);
}

bool lt__is_embedded(const lua_Debug *ar)
{
    return strncmp(ar->source, LT_EMBEDDED, sizeof LT_EMBEDDED - 1) == 0;
}

/* Searches the stack outwards from level for a line of user code and for a module. The search for
 * the module ends at that line unless far is set. */
static void find_place(lua_State *L, int level, bool far, place *p)
{
    lua_Debug ar;
    p->line[0] = p->module[0] = '\0';
    for (; level < DEEPEST && lua_getstack(L, level, &ar); level++) {
        lua_getinfo(L, "Sl", &ar);
        if (ar.currentline < 0)
            continue;
        if (!p->module[0] && push_module_of(L, &ar)) {
            lua_rawgetp(L, -1, &key_module);
            lua_rawgeti(L, -1, 1);
            const char *path = lua_tostring(L, -1);
            if (path && *path) /* a module outside a net has no path; an outer one may have one */
                set_module(p, path);
            lua_pop(L, 3);
        }
        if (!p->line[0] && !lt__is_embedded(&ar))
            set_line(p, ar.short_src, ar.currentline);
        if (p->line[0] && (p->module[0] || !far))
            break;
    }
}

void lt__where(void *ud, char *where, size_t bytes)
{
    place p;
    find_place(((lt_lua *)ud)->running, 1, false, &p);
    const char *line = p.line;
    size_t length = strlen(line), rest = strlen(p.module) + 1;
    if (length + rest > bytes) { /* too long: drop the folder */
        const char *slash = strrchr(line, '/');
        line = slash ? slash + 1 : line;
        length = strlen(line);
    }
    if (length + rest > bytes)
        length = 0;
    if (rest <= bytes) {
        memcpy(where, line, length);
        memcpy(where + length, p.module, rest);
    }
}

/* active_module(self): returns the innermost module that is being called, other than self; or
 * nil. */
static int active_module(lua_State *L)
{
    lua_Debug ar;
    for (int level = 0; level < DEEPEST && lua_getstack(L, level, &ar); level++) {
        lua_getinfo(L, "l", &ar);
        if (ar.currentline >= 0 && push_module_of(L, &ar) && !lua_rawequal(L, 1, -1))
            return 1;
        lua_settop(L, 1);
    }
    return 0;
}

/* ==== Errors ================================================================================== */

/* Whether text starts with a place, as in "train.lua:9: ...". Errors of tape nodes and of hooks
 * already do. */
static bool has_line(const char *text)
{
    const char *colon = strchr(text, ':');
    if (!colon)
        return false;
    size_t digits = strspn(colon + 1, "0123456789");
    return digits > 0 && colon[1 + digits] == ':';
}

/* Whether an error gets the script's line. The script is not to blame for a wrong flag, or if the
 * run ended early on request. */
static bool is_scripts(lt_status status)
{
    return status != LT_EUSAGE && status != LT_EDONE && status != LT_ESTOPPED;
}

lt_status lt__name_line(lua_State *L, lt_status status)
{
    place p;
    if (status != LT_EUSAGE || has_line(lt_errmsg()))
        return status;
    find_place(L, 0, true, &p);
    return lt_fail(LT_EUSAGE, "%s%s%s", p.line, p.module, lt_errmsg());
}

noreturn void lt__raise(lua_State *L, lt_lua *s)
{
    const char *text = lt_errmsg();
    place p = {"", ""};
    lt_status status = lt_errcode();
    if (is_scripts(status) && !has_line(text))
        find_place(L, 0, true, &p);
    lua_pushfstring(L, "%s%s%s", p.line, p.module, text);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &key_messages) == LUA_TTABLE) {
        int i = s->n_raised++ % LT_KEPT_ERRORS;
        s->raised[i] = status;
        lua_pushvalue(L, -2);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pop(L, 1);
    lua_error(L);
    __builtin_unreachable();
}

/* Whether the text of an error contains one of the last messages raised here. *status is then the
 * status of the most recent such message; otherwise LT_ENOMEM if Lua ran out of memory, else
 * LT_ESCRIPT. */
static bool raised_here(lua_State *L, const char *text, lt_status *status)
{
    const lt_lua *s = lt__lua_of(L);
    int top = lua_gettop(L),
        kept = s && s->n_raised < LT_KEPT_ERRORS ? (int)s->n_raised : LT_KEPT_ERRORS;
    bool here = false;
    *status = text && strcmp(text, "not enough memory") == 0 ? LT_ENOMEM : LT_ESCRIPT;
    if (!s || !text || lua_rawgetp(L, LUA_REGISTRYINDEX, &key_messages) != LUA_TTABLE)
        kept = 0;
    for (int back = 1; back <= kept && !here; back++) {
        int i = (int)((s->n_raised - (unsigned)back) % LT_KEPT_ERRORS);
        lua_rawgeti(L, top + 1, i + 1);
        const char *message = lua_tostring(L, -1);
        here = *message && strstr(text, message);
        if (here)
            *status = s->raised[i];
        lua_pop(L, 1);
    }
    lua_settop(L, top);
    return here;
}

/* Whether the error at 1 was raised without a line by one of Lua's own C functions, as in
 * ipairs(nil) or assert(io.open(path)). error(text, 0) omits the line on purpose and does not
 * count. */
static bool wants_line(lua_State *L)
{
    lua_Debug ar;
    lt_status status;
    return lua_type(L, 1) == LUA_TSTRING && !has_line(lua_tostring(L, 1)) &&
           !raised_here(L, lua_tostring(L, 1), &status) && lua_getstack(L, 1, &ar) &&
           lua_getinfo(L, "Sn", &ar) && *ar.what == 'C' &&
           !(ar.name && strcmp(ar.name, "error") == 0);
}

static bool is_text(lua_State *L, int index)
{
    return lua_type(L, index) == LUA_TSTRING || lua_type(L, index) == LUA_TNUMBER;
}

/* Whether the error at 1 is text, or has a __tostring that converts it to text. */
static bool has_text(lua_State *L)
{
    if (!luaL_getmetafield(L, 1, "__tostring"))
        return is_text(L, 1);
    lua_pop(L, 1);
    return true;
}

/* Pushes a description of the error at 1, which is not text. */
static void push_odd(lua_State *L)
{
    int top = lua_gettop(L);
    if (lua_isnil(L, 1)) {
        lua_pushliteral(L, "an error without a message");
        return;
    }
    lua_rawgetp(L, LUA_REGISTRYINDEX, &key_table_text);
    if (lua_istable(L, 1) && lua_isfunction(L, -1)) {
        lua_pushvalue(L, 1);
        lua_call(L, 1, 1);
    } else {
        luaL_tolstring(L, 1, NULL);
    }
    lua_pushfstring(L, "an error of type %s: %s", luaL_typename(L, 1), lua_tostring(L, -1));
    lua_replace(L, top + 1);
    lua_settop(L, top + 1);
}

/* If the error is that Lua cannot call a method that has another name in luatrain, pushes a hint
 * with that name; else pushes "". */
static void push_hint(lua_State *L)
{
    static const char call[] = "attempt to call a nil value (method '";
    const char *text = lua_type(L, 1) == LUA_TSTRING ? strstr(lua_tostring(L, 1), call) : NULL;
    const char *name = text ? text + sizeof call - 1 : "", *end = strchr(name, '\'');
    const char *use = lt__foreign(lua_pushlstring(L, name, end ? (size_t)(end - name) : 0));
    lua_pop(L, 1);
    if (use)
        lua_pushfstring(L, "; use %s", use);
    else
        lua_pushliteral(L, "");
}

/* Whether the error at 1 was raised by Lua in an embedded file, as for a wrong argument that the
 * file does not check. Its text starts with a line of that file, which tells the user nothing. */
static bool is_internal(lua_State *L)
{
    static const char begin[] = LT_EMBEDDED;
    lt_status status;
    const char *text = lua_type(L, 1) == LUA_TSTRING ? lua_tostring(L, 1) : "";
    return strncmp(text, begin + 1, sizeof begin - 2) == 0 && has_line(text) &&
           !raised_here(L, text, &status);
}

/* The message handler of lt_lua_call(): converts the error to a string and logs its traceback. */
static int trace(lua_State *L)
{
    lt_lua *s = lt__lua_of(L);
    place p = {"", ""};
    bool is_odd = !has_text(L);
    if (is_odd || wants_line(L) || is_internal(L))
        find_place(L, 1, false, &p);
    const char *text = lua_tostring(L, 1); /* NULL for an object with __tostring */
    bool has_it = text && strncmp(text, p.line, strlen(p.line)) == 0;
    lua_pushstring(L, has_it ? "" : p.line);
    if (is_odd)
        push_odd(L);
    else
        luaL_tolstring(L, 1, NULL);
    push_hint(L);
    lua_concat(L, 3);
    if (!s || !s->ctx)
        return 1;
    luaL_traceback(L, L, NULL, 1);
    for (const char *line = lua_tostring(L, -1); *line;) {
        size_t length = strcspn(line, "\n");
        lt_log(s->ctx, LT_LOG_DEBUG, "%.*s", (int)length, line);
        line += length + (line[length] == '\n');
    }
    lua_pop(L, 1);
    return 1;
}

/* Pops the error of a protected call, stores it as this thread's message, and returns its
 * status. */
static lt_status caught(lua_State *L, int rc)
{
    const char *text = lua_tostring(L, -1);
    lt_status status;
    if (!raised_here(L, text, &status) && rc == LUA_ERRMEM)
        status = LT_ENOMEM;
    lt_fail(status, "%s", text ? text : "an error without a message");
    lua_pop(L, 1);
    return status;
}

lt_status lt_lua_call(lua_State *L, int n_args, int n_results)
{
    if (!lua_checkstack(L, 4))
        return lt_fail(LT_ENOMEM, "out of memory for the Lua stack");
    int function = lua_absindex(L, -n_args - 1);
    lua_pushcfunction(L, trace);
    lua_insert(L, function);
    lt_locale l = lt__enter_c_locale();
    int rc = lua_pcall(L, n_args, n_results, function);
    lt__leave_c_locale(l);
    lua_remove(L, function);
    return rc == LUA_OK ? LT_OK : caught(L, rc);
}

/* ==== For the embedded files ================================================================== */

/* fail(status, message): raises an error with the status "EINVAL", "EUSAGE", ... */
static int fail(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    int status = LT_EINVAL;
    for (int i = 0; i < LT_STATUS_COUNT; i++)
        if (strcmp(lt__status_name((lt_status)i), name) == 0)
            status = i;
    lt__error(L, lt__lua(L), (lt_status)status, "%s", luaL_checkstring(L, 2));
}

/* where(): returns the line of the script that is running, such as "train.lua:9: "; "" if there is
 * none. */
static int where(lua_State *L)
{
    place p;
    find_place(L, 0, false, &p);
    return lt__return_string(L, p.line);
}

/* exit(code, message): raises the error that makes the program exit with this code. */
static int exit_with(lua_State *L)
{
    lt_status status = (lt_status)(LT_EXIT + luaL_checkinteger(L, 1));
    lt__error(L, lt__lua(L), status, "%s", luaL_checkstring(L, 2));
}

/* set_table_text(f): f(error) returns the text of an error that is a table. */
static int set_table_text(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_table_text);
    return 0;
}

/* exit_code(error): returns the exit code of a program that ends with this error. With several
 * ranks it is the code of the first failure. */
static int exit_code(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lt_status status, first;
    char text[1];
    int rank;
    (void)raised_here(L, lua_tostring(L, 1), &status);
    if (s->group && lt_group_failure(s->group, &rank, &first, text, sizeof text))
        status = first;
    return lt__return_integer(L, lt_exit_code(status));
}

static const luaL_Reg functions[] = {LT_FN(active_module), LT_FN(fail),           LT_FN(where),
                                     {"exit", exit_with},  LT_FN(set_table_text), LT_FN(exit_code),
                                     {NULL, NULL}};

void lt__open_error(lua_State *L)
{
    lua_createtable(L, LT_KEPT_ERRORS, 0);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_messages);
    lt__register(L, functions);
    lua_pushlightuserdata(L, (void *)&key_module);
    lua_setfield(L, -2, "module_key");
}
