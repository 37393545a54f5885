/* properties.c - properties [INDEX]: prints what cuDNN says of a device that is here, from 0, as
 * JSON in one line. That is what *.json beside this file are, for which test_plans.c makes plans.
 * Without a device, or without cuDNN, it says why and ends with 3. tools/gpu_check runs it. */
#include <stdio.h>
#include <stdlib.h>

#ifdef LT_WITH_CUDNN
#include "ops/cuda/cudnn.h"

/* lt__cudnn_properties() on the device, on the stream that is there without being made. */
static char *properties(int index, char *why, size_t bytes)
{
    lt_cudnn_table table;
    lt_cublaslt_table blas;
    const lt_host host = {lt_fail, lt_log};
    const lt_cuda_env env = {.host = &host, .index = index, .model = "one to be known"};
    const lt_cudnn_config config = {.deterministic = false};
    if (lt__cublaslt_open(&blas, why, bytes) != 0 ||
        lt__cudnn_open_library(&table, why, bytes) != 0)
        return NULL;
    lt_cudnn *d = lt__cudnn_new(&table, &env, &config, why, bytes);
    if (!d)
        return NULL;
    char *json = lt__cudnn_properties(d);
    if (!json)
        snprintf(why, bytes, "cuDNN does not say what device %d is", index);
    lt__cudnn_free(d);
    return json;
}
#else
static char *properties(int index, char *why, size_t bytes)
{
    (void)index;
    snprintf(why, bytes, "cuDNN's headers were not there when this was built");
    return NULL;
}
#endif

int main(int argc, char **argv)
{
    char why[512] = "";
    char *json = properties(argc > 1 ? atoi(argv[1]) : 0, why, sizeof why);
    if (!json) {
        fprintf(stderr, "properties: %s\n", why);
        return 3;
    }
    printf("%s\n", json);
    free(json);
    return 0;
}
