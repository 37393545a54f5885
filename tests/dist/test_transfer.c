/* test_transfer.c - messages with tensors of an accelerator: a fake, whose copies run when the test
 * says so. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "dist/pipeline/transfer.h"
#include "tests/lt_test.h"

enum { COPIES = 64, VALUES = 5, BLOCKS = 16, BYTES = VALUES * sizeof(float) };

typedef struct copy {
    void *dst;
    char src[BYTES];  /* taken at once: later work in the stream may change it, */
    const void *from; /* or read when the copy runs, if it is pinned memory; else NULL */
    size_t bytes;
} copy;

typedef struct fake {
    lt_device base;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    copy copies[COPIES];
    int queued, done, allowed; /* numbers of copies. A wait blocks until its copies are allowed */
    void *blocks[BLOCKS];      /* pinned memory */
    bool fails;
} fake;

static int find_block(const fake *f, const void *p)
{
    int i = 0;
    while (i < BLOCKS && f->blocks[i] != p)
        i++;
    return i;
}

static lt_status fake_copy(lt_device *device, void *dst, const void *src, size_t bytes)
{
    fake *f = (fake *)device;
    pthread_mutex_lock(&f->lock);
    copy *c = &f->copies[f->queued++];
    *c = (copy){.dst = dst, .from = find_block(f, src) < BLOCKS ? src : NULL, .bytes = bytes};
    memcpy(c->src, src, bytes);
    pthread_mutex_unlock(&f->lock);
    return LT_OK;
}

static uint64_t fake_mark(lt_device *device) { return (uint64_t)((fake *)device)->queued; }

static lt_status fake_wait(lt_device *device, uint64_t mark)
{
    fake *f = (fake *)device;
    pthread_mutex_lock(&f->lock);
    while ((uint64_t)f->allowed < mark)
        pthread_cond_wait(&f->changed, &f->lock);
    for (; (uint64_t)f->done < mark; f->done++) {
        const copy *c = &f->copies[f->done];
        memcpy(c->dst, c->from ? c->from : c->src, c->bytes);
    }
    bool fails = f->fails;
    pthread_mutex_unlock(&f->lock);
    return fails ? lt_fail(LT_EENV, "the fake has failed") : LT_OK;
}

static void allow(fake *f, int copies)
{
    pthread_mutex_lock(&f->lock);
    f->allowed = copies;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static void *fake_alloc_host(lt_device *device, size_t bytes)
{
    fake *f = (fake *)device;
    return f->blocks[find_block(f, NULL)] = calloc(1, bytes);
}

static void fake_free_host(lt_device *device, void *p)
{
    fake *f = (fake *)device;
    f->blocks[find_block(f, p)] = NULL;
    free(p);
}

/* A fake, and a transfer from rank 0 to rank 1. */
static lt_transfer *open_fake(fake *f, lt_mail *mail[2])
{
    *f = (fake){.base = {.name = "fake:0",
                         .copy = fake_copy,
                         .mark = fake_mark,
                         .wait = fake_wait,
                         .alloc_host = fake_alloc_host,
                         .free_host = fake_free_host}};
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->changed, NULL);
    CHECK_OK(lt__mail_open_local(2, mail));
    lt_transfer *t = lt__transfer_open(&f->base, mail[0]);
    CHECK(t != NULL);
    return t;
}

static void close_fake(fake *f, lt_mail *mail[2])
{
    lt__mail_close(mail[0], 1);
    lt__mail_close(mail[1], 1);
    for (int i = 0; i < BLOCKS; i++)
        CHECK(f->blocks[i] == NULL);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->changed);
}

/* A tensor on a device, over values (n). */
static lt_tensor tensor_over(lt_storage *storage, lt_device *device, float *values, int n)
{
    *storage = (lt_storage){.device = device};
    return (lt_tensor){
        .dtype = LT_F32, .ndim = 1, .dims = {n}, .count = n, .data = values, .storage = storage};
}

/* Sends a message with the elements of x. kind: for the receiver to check. */
static void send(lt_transfer *t, int kind, lt_tensor *x)
{
    lt_message *m = lt__message_new(kind, x ? lt__tensor_bytes(x) : 0);
    CHECK_OK(lt__transfer_send(t, 1, m, x));
}

/* Takes the next message, which has this kind, and n values that count from `first`. */
static void expect(lt_mail *mail, int kind, float first, int n)
{
    lt_message *m = lt__mail_take(mail, 10);
    CHECK(m != NULL);
    CHECK_EQ(m->kind, kind);
    CHECK_EQ(m->from, 0);
    CHECK_EQ(m->bytes, (size_t)n * sizeof(float));
    for (int i = 0; i < n; i++)
        CHECK_NEAR(((float *)m->data)[i], first + (float)i, 0);
    lt__message_free(m);
}

static void expect_nothing(lt_mail *mail) { CHECK(lt__mail_take(mail, 0.05) == NULL); }

static void fill(float *values, float first)
{
    for (int i = 0; i < VALUES; i++)
        values[i] = first + (float)i;
}

TEST(messages_leave_in_order_when_their_copies_are_done)
{
    fake f;
    lt_mail *mail[2];
    lt_storage storage[2];
    float values[VALUES];
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_transfer *t = open_fake(&f, mail);
    lt_tensor x = tensor_over(&storage[0], &f.base, values, VALUES);
    lt_tensor y = tensor_over(&storage[1], &f.base, values, 0);
    send(t, 1, NULL);
    expect(mail[1], 1, 0, 0);
    fill(values, 100);
    send(t, 2, &x);
    fill(values, 200); /* after the copy, in the order of the stream */
    send(t, 3, NULL);
    send(t, 4, &y);
    send(t, 5, &x);
    lt_tensor *here = lt_tensor_from(ctx, LT_F32, 1, (int64_t[]){VALUES}, values);
    send(t, 6, here);
    lt_release(here);
    fill(values, 300);
    expect_nothing(mail[1]);
    allow(&f, 1);
    expect(mail[1], 2, 100, VALUES);
    expect(mail[1], 3, 0, 0);
    expect(mail[1], 4, 0, 0);
    expect_nothing(mail[1]);
    allow(&f, 2);
    expect(mail[1], 5, 200, VALUES);
    expect(mail[1], 6, 200, VALUES);
    CHECK_OK(lt__transfer_check(t));
    lt__transfer_close(t);
    close_fake(&f, mail);
    lt_ctx_free(ctx);
}

TEST(buffers_are_used_again_and_the_rest_is_sent_at_the_end)
{
    enum { MORE = 40 };
    fake f;
    lt_mail *mail[2];
    lt_storage storage;
    float values[VALUES];
    lt_transfer *t = open_fake(&f, mail);
    allow(&f, COPIES);
    for (int i = 0; i < MORE; i++) {
        int n = 1 + i % VALUES; /* buffers grow */
        lt_tensor x = tensor_over(&storage, &f.base, values, n);
        fill(values, (float)(100 * i));
        send(t, i, &x);
    }
    lt__transfer_close(t);
    for (int i = 0; i < MORE; i++)
        expect(mail[1], i, (float)(100 * i), 1 + i % VALUES);
    close_fake(&f, mail);
}

TEST(a_failed_copy_is_reported_and_its_message_not_sent)
{
    fake f;
    lt_mail *mail[2];
    lt_storage storage;
    float values[VALUES] = {0};
    lt_transfer *t = open_fake(&f, mail);
    lt_tensor x = tensor_over(&storage, &f.base, values, VALUES), dead = x;
    dead.dead = true;
    CHECK_FAILS(lt__transfer_send(t, 1, lt__message_new(0, BYTES), &dead), LT_EINVAL, "is over");
    f.fails = true;
    send(t, 7, &x);
    allow(&f, 1);
    expect_nothing(mail[1]);
    CHECK_FAILS(lt__transfer_check(t), LT_EENV, "the fake has failed");
    lt__transfer_close(t);
    close_fake(&f, mail);
}

TEST(received_values_do_not_wait_for_the_accelerator)
{
    enum { MORE = 9, BUFFERS = 4 };
    fake f;
    lt_mail *mail[2];
    lt_storage storage[MORE];
    float values[MORE][VALUES];
    lt_transfer *t = open_fake(&f, mail);
    for (int i = 0; i < MORE; i++) {
        lt_tensor x = tensor_over(&storage[i], &f.base, values[i], VALUES);
        lt_message *m = lt__message_new(0, BYTES);
        fill((float *)m->data, (float)(100 * i));
        allow(&f, i < BUFFERS ? 0 : i - BUFFERS + 1); /* the copy that used the same buffer */
        CHECK_OK(lt__transfer_receive(t, &x, m));
        lt__message_free(m);
    }
    allow(&f, MORE);
    CHECK_OK(fake_wait(&f.base, MORE));
    for (int i = 0; i < MORE; i++)
        for (int k = 0; k < VALUES; k++)
            CHECK_NEAR(values[i][k], (float)(100 * i + k), 0);
    lt__transfer_close(t);
    close_fake(&f, mail);
}
