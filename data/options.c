/* options.c - checks the options of a pass and fills in their defaults. */
#include <math.h>

#include "data/sample.h"

enum { MAX_WORKERS = 1024 };

static lt_status check(const lt_source *source, const lt_batch_options *o)
{
    int64_t side = source->h < source->w ? source->h : source->w;
    bool part = o->area > 0 && o->area < 1;
    if (o->batch < 1)
        return lt_fail(LT_EINVAL, "batches: batch must be at least 1, but is %lld",
                       (long long)o->batch);
    if (o->first < 0 || o->first > source->count)
        return lt_fail(LT_EINVAL,
                       "batches: first must be 0 to %lld, the number of images, but is %lld",
                       (long long)source->count, (long long)o->first);
    if (!lt__is_float(o->dtype) && (o->dtype != LT_U8 || source->dtype != LT_U8))
        return lt_fail(LT_EINVAL, "batches: dtype must be a float dtype%s, but is %s",
                       source->dtype == LT_U8 ? " or u8" : "", lt_dtype_name(o->dtype));
    for (int i = 0; i < LT_MAX_CHANNELS; i++)
        if (!isfinite(o->mean[i]))
            return lt_fail(LT_EINVAL, "batches: mean must be finite, but channel %d has %g", i + 1,
                           o->mean[i]);
        else if (!isfinite(o->std[i]) || o->std[i] < 0)
            return lt_fail(LT_EINVAL, "batches: std must be positive, but channel %d has %g", i + 1,
                           o->std[i]);
    if (o->crop < 0 || (o->crop > 0 && o->crop >= side))
        return lt_fail(LT_EINVAL,
                       "batches: crop must be 0 to %lld pixels, less than the size of the images "
                       "(%lldx%lld), but is %lld",
                       (long long)side - 1, (long long)source->h, (long long)source->w,
                       (long long)o->crop);
    if (!(o->center_crop >= 0 && o->center_crop <= 1))
        return lt_fail(LT_EINVAL,
                       "batches: center_crop must be a fraction above 0 and up to 1, but is %g",
                       o->center_crop);
    if (!(o->area >= 0 && o->area <= 1))
        return lt_fail(LT_EINVAL, "batches: area must be a fraction above 0 and up to 1, but is %g",
                       o->area);
    if (part && o->crop > 0)
        return lt_fail(LT_EINVAL, "batches: area and crop cannot be combined; choose one");
    if (part && source->dtype != LT_U8)
        return lt_fail(LT_EINVAL, "batches: area requires u8 images, but these are %s",
                       lt_dtype_name(source->dtype));
    if (o->on_request && (o->first != 0 || o->ranks > 1))
        return lt_fail(LT_EINVAL, "batches: on_request cannot be combined with %s",
                       o->first != 0 ? "first" : "ranks");
    int64_t parts = o->parts > 0 ? o->parts : 1;
    int64_t last = o->rank + (o->shards > 0 ? o->shards : 1) * parts - 1;
    if (o->ranks < 0 || o->rank < 0 || o->shards < 0 || (last > 0 && last >= o->ranks))
        return lt_fail(LT_EINVAL, "batches: rank %lld is out of range for %d ranks",
                       (long long)last, o->ranks);
    if (o->micro < 0 || (o->micro > 1 && o->on_request))
        return lt_fail(LT_EINVAL,
                       o->micro < 0 ? "batches: micro must be at least 1, but is %d"
                                    : "batches: on_request cannot be combined with micro = %d",
                       o->micro);
    if (o->parts < 0)
        return lt_fail(LT_EINVAL, "batches: parts must be at least 1, but is %d", o->parts);
    if (o->grain < 0)
        return lt_fail(LT_EINVAL, "batches: grain must be at least 1, but is %lld",
                       (long long)o->grain);
    if (o->workers > MAX_WORKERS)
        return lt_fail(LT_EINVAL, "batches: workers must be at most %d, but is %d", MAX_WORKERS,
                       o->workers);
    return LT_OK;
}

static int worker_count(int wanted, bool in_files)
{
    if (wanted != 0)
        return wanted > 0 ? wanted : 0;
    return in_files ? lt_cpu_count() : 1;
}

lt_status lt__batch_options_read(const lt_source *source, const lt_batch_options *given,
                                 lt_batch_options *o)
{
    LT_TRY(check(source, given));
    *o = *given;
    for (int i = 0; i < LT_MAX_CHANNELS; i++)
        o->std[i] = o->std[i] == 0 ? 1 : o->std[i];
    o->area = o->area == 0 ? 1 : o->area;
    o->ranks = o->ranks == 0 ? 1 : o->ranks;
    o->parts = o->parts == 0 ? 1 : o->parts;
    o->shards = o->shards == 0 ? 1 : o->shards;
    o->micro = o->micro == 0 ? 1 : o->micro;
    o->grain = o->grain == 0 ? 1 : o->grain;
    o->workers = o->labels_only ? 0 : worker_count(o->workers, source->in_files);
    return LT_OK;
}
