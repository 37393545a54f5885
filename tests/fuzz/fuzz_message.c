/* fuzz_message.c - parses messages of arbitrary bytes, as a server and as a worker, and uses pushes
 * as the gradient of a small net. Byte 0 selects the receiver, and whether the head gets the right
 * size of the data, so that the fuzzer gets past that check. Such a message may arrive in two
 * parts. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "dist/async/gradient.h"
#include "dist/mail/parse.h"
#include "ops/ops.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_optim *optim;
    lt_image image;
} net;

/* A net with two parameters and two buffers. It lives as long as the process. */
static const lt_image *image(void)
{
    static net n;
    static const int64_t four = 4;
    if (n.ctx)
        return &n.image;
    lt_tensor *x[4];
    lt_init init = {LT_INIT_CONSTANT, 1, 0};
    n.ctx = lt_open(&(lt_config){.device = "cpu", .threads = 1});
    n.params = lt_params_new(n.ctx);
    for (int i = 0; i < 4; i++) {
        char name[2] = {(char)('a' + i), 0};
        x[i] = i < 2 ? lt_param_new(n.ctx, LT_F32, 1, &four, init)
                     : lt_buffer_new(n.ctx, LT_F32, 1, &four, init);
        if (!x[i] || lt_params_add(n.params, name, x[i]) != LT_OK)
            abort();
    }
    if (lt_params_place(n.params) != LT_OK ||
        !(n.optim = lt_optim_new(n.ctx, "momentum_step", x, 2)) ||
        lt__image_open(&n.image, n.ctx, n.optim, x + 2, 2) != LT_OK)
        abort();
    return &n.image;
}

static void use(const lt_message *m)
{
    lt_gradient g;
    if (lt__gradient_open(&g, image(), true) != LT_OK)
        abort();
    if (lt__gradient_view(&g, m) != LT_OK) {
        if (lt_errcode() != LT_EDESYNC)
            abort();
    } else if (!g.skip) {
        for (int i = 0; i < g.net->n; i++)
            if (g.present[i] && g.at[i] + 4 * sizeof(float) > m->bytes)
                abort();
    }
    lt__gradient_close(&g);
}

/* The same as lt__message_parse(), in two parts. */
static lt_message *add_parts(bool from_server, const lt_message_head *head, size_t head_bytes,
                             const uint8_t *data, size_t size)
{
    lt_parts parts = {0};
    lt_message *m = NULL;
    size_t half = size / 2;
    if (lt__message_add(&parts, from_server, head, head_bytes, data, half, &m) != LT_OK || m ||
        lt__message_add(&parts, from_server, head, head_bytes, data + half, size - half, &m) !=
            LT_OK)
        lt__message_free(parts.message);
    return m;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lt_message_head head = {0};
    uint8_t mode = size > 0 ? *data++ : 0;
    size -= size > 0;
    size_t head_bytes = size < sizeof head ? size : sizeof head;
    memcpy(&head, data, head_bytes);
    data += head_bytes;
    size -= head_bytes;
    if (mode & 2)
        head.bytes = (int64_t)size;
    if (mode & 4) /* a push without data is only of use as a skipped step */
        head.kind = LT_MSG_PUSH;
    bool splits = mode & 8 && mode & 2 && size >= 2;
    lt_message *m = splits ? add_parts(mode & 1, &head, head_bytes, data, size)
                           : lt__message_parse(mode & 1, &head, head_bytes, data, size);
    if (!m && lt_errcode() != LT_EDESYNC)
        abort();
    if (m && m->kind == LT_MSG_PUSH)
        use(m);
    lt__message_free(m);
    return 0;
}
