/* properties.c - properties [INDEX]: prints cuDNN's properties of a device of this machine (0 if
 * omitted) as one line of JSON. The *.json files beside this file have this form; test_plans.c
 * builds plans for them. Without a device or without cuDNN, it prints the reason and exits with
 * status 3. tools/gpu_check runs it. */
#include <stdio.h>
#include <stdlib.h>

#ifdef LT_WITH_CUDNN
#include "ops/cuda/cudnn.h"

/* lt__cudnn_properties() of the device, on its default stream. */
static char *properties(int index, char *why, size_t bytes)
{
    lt_cudnn_table table;
    lt_cublaslt_table blas;
    const lt_host host = {lt_fail, lt_log};
    const lt_cuda_env env = {.host = &host, .index = index, .model = "unknown"};
    const lt_cudnn_config config = {.deterministic = false};
    if (lt__cublaslt_open(&blas, why, bytes) != 0 ||
        lt__cudnn_open_library(&table, why, bytes) != 0)
        return NULL;
    lt_cudnn *d = lt__cudnn_new(&table, &env, &config, why, bytes);
    if (!d)
        return NULL;
    char *json = lt__cudnn_properties(d);
    if (!json)
        snprintf(why, bytes, "cuDNN has no properties of device %d", index);
    lt__cudnn_free(d);
    return json;
}
#else
static char *properties(int index, char *why, size_t bytes)
{
    (void)index;
    snprintf(why, bytes, "this program was built without cuDNN's headers");
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
