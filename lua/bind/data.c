/* data.c - data sources and batches in Lua. The only caller is the embedded data.lua, which checks
 * the arguments of scripts.
 *
 * Creating a userdata may run the collector, and a finalizer may close any object. So each function
 * first creates the userdata that will own its result, then fetches the pointers of its arguments.
 */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

static const char source_class[] = "luatrain.Source", batches_class[] = "luatrain.Batches";

/* ==== Files =================================================================================== */

/* exists(path): whether path exists, readable or not; nil and a reason if that cannot be
 * determined. */
static int exists(lua_State *L)
{
    struct stat now;
    int error = stat(lt__check_path(L, lt__lua(L), 1, "data"), &now) == 0 ? 0 : errno;
    if (error == 0 || error == ENOENT || error == ENOTDIR) {
        return lt__return_boolean(L, error == 0);
    }
    lua_pushnil(L);
    lua_pushstring(L, strerror(error));
    return 2;
}

/* read_idx(path): returns the tensor in an IDX file. */
static int read_idx(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor **box = lt__push_box(L, s);
    lt__fill_box(L, s, box, lt_idx_read(s->ctx, lt__check_path(L, s, 1, "data")));
    return 1;
}

/* read_image(path, channels): decodes an image file to a tensor. */
static int read_image(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int channels = (int)luaL_checkinteger(L, 2);
    lt_tensor **box = lt__push_box(L, s);
    const char *path = lt__check_path(L, s, 1, "data.image");
    lt__fill_box(L, s, box, lt_image_read(s->ctx, path, channels));
    return 1;
}

/* read_cifar10(paths): returns the images and labels of all files. */
static int read_cifar10(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int n;
    const char **paths = lt__check_strings(L, 1, &n);
    lt_tensor **x = lt__push_box(L, s), **y = lt__push_box(L, s);
    lt__check(L, s, lt_cifar10_read(s->ctx, n, paths, x, y));
    lt__fill_box(L, s, x, *x);
    lt__fill_box(L, s, y, *y);
    return 2;
}

/* ==== Sources ================================================================================= */

LT_FINALIZER(source_gc, lt_source_release)

/* source_tensors(images, labels): returns a source of images in memory. */
static int source_tensors(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    void **h = lt__push_handle(L, source_class);
    lt_tensor *images = lt__check_tensor(L, s, 1, "data", "images");
    lt_tensor *labels = lt__check_tensor(L, s, 2, "data", "labels");
    lt__fill_handle(L, h, lt_source_tensors(s->ctx, images, labels));
    return 1;
}

/* source_folder(path, height, width, channels): returns a source of image files, resized to height
 * x width. With 0 x 0, all files must have the size of the first. */
static int source_folder(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int64_t height = luaL_checkinteger(L, 2), width = luaL_checkinteger(L, 3);
    int channels = (int)luaL_checkinteger(L, 4);
    void **h = lt__push_handle(L, source_class);
    const char *path = lt__check_path(L, s, 1, "data");
    lt__fill_handle(L, h, lt_source_folder(s->ctx, path, height, width, channels));
    return 1;
}

/* source_synthetic(part, count, height, width, channels, classes): returns a source of generated
 * images. */
static int source_synthetic(lua_State *L)
{
    int64_t v[6];
    for (int i = 0; i < 6; i++)
        v[i] = luaL_checkinteger(L, i + 1);
    void **h = lt__push_handle(L, source_class);
    lt__fill_handle(
        L, h, lt_source_synthetic(lt__lua(L)->ctx, (uint64_t)v[0], v[1], v[2], v[3], v[4], v[5]));
    return 1;
}

/* source_sized(source, size): returns a source of the same images, resized to size x size. */
static int source_sized(lua_State *L)
{
    int64_t size = luaL_checkinteger(L, 2);
    void **h = lt__push_handle(L, source_class);
    lt_source *source = lt__check_handle(L, source_class);
    lt__fill_handle(L, h, lt_source_resized(source, size, size));
    return 1;
}

static int source_count(lua_State *L)
{
    return lt__return_integer(L, lt_source_count(lt__check_handle(L, source_class)));
}

/* source:shape(): returns height, width and channels. */
static int source_shape(lua_State *L)
{
    int64_t shape[3];
    lt_source_shape(lt__check_handle(L, source_class), shape);
    return lt__return_integers(L, shape[0], shape[1], shape[2]);
}

/* source:digest(): returns two digests: of the labels, and of a sample of the images. */
static int source_digest(lua_State *L)
{
    uint32_t labels, images;
    lt_source_digest(lt__check_handle(L, source_class), &labels, &images);
    return lt__return_integers(L, labels, images);
}

/* source:names(): returns the names of its classes. Raises if a finalizer closes the source in the
 * meantime. */
static int source_names(lua_State *L)
{
    const char *name;
    lua_newtable(L);
    for (int64_t i = 0; (name = lt_source_class_name(lt__check_handle(L, source_class), i)); i++) {
        lua_pushstring(L, name);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static const luaL_Reg source_methods[] = {LT_METHOD(source, count),
                                          LT_METHOD(source, shape),
                                          LT_METHOD(source, digest),
                                          LT_METHOD(source, names),
                                          {NULL, NULL}};

/* scan_labels(labels, classes): returns the highest label, or -1 if there are none. Stops at the
 * first label that is not from 0 to classes - 1; then returns the highest label before it, its
 * position (from 1) and its value. */
static int scan_labels(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor **box = lt__push_box(L, s);
    lt__box_retain_on_host(L, s, box, lt__check_tensor(L, s, 1, "data", "labels"));
    lt_tensor *labels = *box;
    int64_t classes = luaL_checkinteger(L, 2), highest = -1, label;
    for (int64_t i = 0; i < lt_count(labels); i++) {
        lt__check(L, s, lt_item_integer(labels, i, &label));
        if (label < 0 || label >= classes)
            return lt__return_integers(L, highest, i + 1, label);
        highest = label > highest ? label : highest;
    }
    return lt__return_integer(L, highest);
}

/* mixup_draws(): returns two random numbers in (0, 1) that depend only on the seed and the number
 * of steps since it was set. */
static int mixup_draws(lua_State *L)
{
    uint32_t word[4];
    const lt_ctx *ctx = lt__lua(L)->ctx;
    lt_random(lt_seed(ctx), LT_RNG_MIXUP, (uint64_t)lt_random_step(ctx), 0, word);
    lua_pushnumber(L, ((double)word[0] + 0.5) * 0x1p-32);
    lua_pushnumber(L, ((double)word[1] + 0.5) * 0x1p-32);
    return 2;
}

/* ==== Batches ================================================================================= */

LT_FINALIZER(batches_gc, lt_batches_free)

/* Returns the pass over the data in argument 1 of a method; NULL if it was closed. Raises if the
 * argument is anything else. */
static lt_batches *check_pass(lua_State *L, const char *method)
{
    lt_batches **h = luaL_testudata(L, 1, batches_class);
    if (!h)
        lt__refuse(L, lt__lua(L),
                   "batches: call this as pass:%s(), on the result of set:open_batches, not on %s",
                   method, lt__text(L, 1));
    return *h;
}

static lt_batches *check_open(lua_State *L, const char *method)
{
    lt_batches *b = check_pass(L, method);
    if (!b)
        lt__refuse(L, lt__lua(L),
                   "batches: this pass over the data was closed; open another with "
                   "set:batches");
    return b;
}

static int batches_close(lua_State *L)
{
    check_pass(L, "close");
    return batches_gc(L);
}

/* Reads one number per channel from the list at index; 0 for channels that it does not have. */
static void get_channels(lua_State *L, int index, double values[LT_MAX_CHANNELS])
{
    for (int i = 0; i < LT_MAX_CHANNELS; i++) {
        lua_rawgeti(L, index, i + 1);
        values[i] = lua_tonumber(L, -1);
        lua_pop(L, 1);
    }
}

/* Divides the batches of a pass among the ranks. In a pipeline, only stage 0 reads images. */
static void set_shards(const lt_lua *s, lt_batch_options *o)
{
    if (s->pipeline) {
        o->rank = lt_pipeline_replica(s->pipeline);
        o->ranks = lt_pipeline_replicas(s->pipeline);
        o->micro = s->micro;
        o->labels_only = lt_pipeline_stage(s->pipeline) > 0;
    } else if (s->share) {
        const int *before = s->share + lt_group_rank(s->group);
        o->rank = before[0];
        o->parts = before[1] - before[0];
        o->ranks = s->share[lt_group_size(s->group)];
    } else if (s->group && !s->is_async) {
        o->shards = lt__shards(s);
        o->rank = lt_group_rank(s->group) * o->shards;
        o->ranks = lt_group_size(s->group) * o->shards;
    }
}

/* new_batches(source, options, mean, std): returns a pass over the data; mean and std are lists
 * with one number per channel. The user value of the pass is whether only stage 0 of a pipeline has
 * its images. */
static int new_batches(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    void **h = lt__push_handle(L, batches_class);
    int64_t workers = lt__integer_field(L, 2, "workers", 0);
    lt_batch_options options = {.batch = lt__integer_field(L, 2, "batch", 0),
                                .shuffle = lt__boolean_field(L, 2, "shuffle"),
                                .epoch = (uint64_t)lt__integer_field(L, 2, "epoch", 0),
                                .first = lt__integer_field(L, 2, "first", 0),
                                .on_request = lt__boolean_field(L, 2, "on_request"),
                                .grain = lt__integer_field(L, 2, "grain", 0),
                                .crop = lt__integer_field(L, 2, "crop", 0),
                                .flip = lt__boolean_field(L, 2, "flip"),
                                .area = lt__number_field(L, 2, "area", 0),
                                .center_crop = lt__number_field(L, 2, "center_crop", 0),
                                .workers = workers < INT_MAX ? (int)workers : INT_MAX};
    bool is_sharded = lt__boolean_field(L, 2, "shard");
    if (is_sharded)
        set_shards(s, &options);
    lua_getfield(L, 2, "dtype");
    options.dtype = lt__check_dtype(L, s, lua_gettop(L), "batches");
    get_channels(L, 3, options.mean);
    get_channels(L, 4, options.std);
    lua_settop(L, 5); /* the handle is on top */
    lt_source *source = lt__check_handle(L, source_class);
    lt__fill_handle(L, h, lt_batches_new(s->ctx, source, &options));
    lua_pushboolean(L, is_sharded && s->pipeline);
    lua_setiuservalue(L, 5, 1);
    return 1;
}

/* batches:next(): returns images and labels, or nil if no batch is left. */
static int batches_next(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_settop(L, 1);
    lt_tensor **x = lt__push_box(L, s), **y = lt__push_box(L, s);
    lt_batches *b = check_open(L, "next");
    lt__check(L, s, lt_batches_next(b, x, y));
    if (!*x)
        return 0;
    lua_getiuservalue(L, 1, 1);
    if (lua_toboolean(L, -1))
        lt__check(L, s, lt_set_stage(*x, 0));
    lua_settop(L, 3);
    lt__fill_box(L, s, x, *x);
    lt__fill_box(L, s, y, *y);
    return 2;
}

/* batches:request(first): requests the batch that starts at this position of the epoch's order,
 * counted from 0. */
static int batches_request(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_settop(L, 2);
    lt_batches *b = check_open(L, "request");
    int is_whole;
    int64_t first = lua_tointegerx(L, 2, &is_whole);
    if (!is_whole || lua_type(L, 2) != LUA_TNUMBER)
        lt__refuse(L, s, "batches: pass:request requires a whole number, a position, but got %s",
                   lt__text(L, 2));
    return lt__done(L, lt_batches_request(b, first));
}

static int batches_stats(lua_State *L)
{
    lt_batch_stats stats = lt_batches_stats(check_open(L, "stats"));
    lua_createtable(L, 0, 4);
    lt__set_number(L, "wait_s", stats.wait_s);
    lt__set_number(L, "work_s", stats.work_s);
    lt__set_integer(L, "images", stats.images);
    lt__set_integer(L, "workers", stats.workers);
    return 1;
}

static const luaL_Reg batches_methods[] = {LT_METHOD(batches, next),
                                           LT_METHOD(batches, request),
                                           LT_METHOD(batches, stats),
                                           LT_METHOD(batches, close),
                                           {NULL, NULL}};

static const luaL_Reg functions[] = {
    LT_FN(exists),         LT_FN(read_idx),      LT_FN(read_image),       LT_FN(read_cifar10),
    LT_FN(source_tensors), LT_FN(source_folder), LT_FN(source_synthetic), LT_FN(source_sized),
    LT_FN(scan_labels),    LT_FN(mixup_draws),   LT_FN(new_batches),      {NULL, NULL}};

void lt__open_data(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, source_class, source_methods, source_gc);
    lt__new_class(L, batches_class, batches_methods, batches_gc);
}
