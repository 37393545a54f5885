/* foreign.c - names of PyTorch and NumPy, and what luatrain has for them. */
#include <strings.h>

#include "lua/bind/bind.h"

static const char *const names[][2] = {
    {"size", "x:dim(axis) or x.shape"},
    {"ndim", "#x.shape"},
    {"numel", "x:count()"},
    {"view", "x:reshape{...}"},
    {"squeeze", "x:reshape{...}"},
    {"unsqueeze", "x:reshape{...}"},
    {"tolist", "x:totable()"},
    {"numpy", "x:totable()"},
    {"float", "x:cast 'f32'; net:to 'f32'"},
    {"double", "x:cast 'f64'; net:to 'f64'"},
    {"half", "lt.run's amp = 'fp16', or x:cast 'f16'"},
    {"bfloat16", "lt.run's amp = 'bf16', or x:cast 'bf16'"},
    {"long", "x:cast 'i64'"},
    {"int", "x:cast 'i32'"},
    {"byte", "x:cast 'u8'"},
    {"type", "x:cast(dtype)"},
    {"astype", "x:cast(dtype)"},
    {"cuda", "luatrain --device cuda"},
    {"cpu", "luatrain --device cpu, or x:to 'cpu'"},
    {"device", "luatrain --device NAME"},
    {"requires_grad_", "x:requires_grad(), or net:freeze()"},
    {"unfreeze", "net:freeze(false)"},
    {"forward", "net(x)"},
    {"save", "lt.save(path, net)"},
    {"zero_", "x:fill(0)"},
    {"fill_", "x:fill(value)"},
    {"copy_", "x:copy(source)"},
    {"stack", "lt.cat"},
    {"concat", "lt.cat"},
    {"empty", "lt.zeros"},
    {"from_numpy", "lt.tensor"},
    {"manual_seed", "lt.seed"},
    {"DataLoader", "set:batches{...}"},
    {"BatchNorm1d", "nn.batch_norm"},
    {"BatchNorm2d", "nn.batch_norm"},
    {"CrossEntropyLoss", "lt.cross_entropy"},
    {"MSELoss", "lt.mse_loss"},
    {"AdaptiveAvgPool2d", "nn.global_avg_pool2d"},
    {"state_dict", "net:state(), or lt.save(path, net)"},
    {"load_state_dict", "net:load(path)"},
    {"param_groups", "optim.groups"},
};

const char *lt__foreign(const char *name)
{
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcasecmp(names[i][0], name) == 0)
            return names[i][1];
    return NULL;
}
