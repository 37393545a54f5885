/* plugin.c - finds and loads plugins. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/plugin.h"

/* The folder of the file that contains this code: the library, or a program linked with it. */
static const char *own_folder(char path[PATH_MAX])
{
    Dl_info info;
    if (!dladdr((const void *)(uintptr_t)&own_folder, &info) || !realpath(info.dli_fname, path))
        return NULL;
    return dirname(path);
}

static bool is_in(const char *folder, const char *below, const char *name,
                  char file[LT_PLUGIN_PATH])
{
    int n = snprintf(file, LT_PLUGIN_PATH, "%s/%slibluatrain-%s.so", folder, below, name);
    return n < LT_PLUGIN_PATH && access(file, F_OK) == 0;
}

bool lt__plugin_find(const char *name, char file[LT_PLUGIN_PATH])
{
    static const char *const places[] = {"", "luatrain/", "../lib/luatrain/"};
    char path[PATH_MAX];
    const char *given = getenv("LUATRAIN_PLUGINS"), *own = own_folder(path);
    if (given && *given && is_in(given, "", name, file))
        return true;
    for (size_t i = 0; own && i < sizeof places / sizeof *places; i++)
        if (is_in(own, places[i], name, file))
            return true;
    return false;
}

lt_status lt__plugin_open(const char *file, const char *symbol, void *function)
{
    void *plugin = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!plugin)
        return lt_fail(LT_EENV, "cannot load a plugin: %s", dlerror());
    void *found = dlsym(plugin, symbol);
    if (!found)
        return lt_fail(LT_EENV, "%s is not a luatrain plugin", file);
    memcpy(function, &found, sizeof found); /* C has no cast from void * to a function pointer */
    return LT_OK;
}
