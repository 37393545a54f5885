/* test_queue.c - the queue between threads: order, limit, closing; no item lost or duplicated. */
#include <pthread.h>
#include <unistd.h>

#include "core/queue.h"
#include "tests/lt_test.h"

TEST(items_are_taken_in_the_order_they_were_put)
{
    int items[5];
    lt_queue *q = lt__queue_new(3);
    for (int round = 0; round < 4; round++) { /* around the ring */
        CHECK(lt__queue_put(q, &items[round]));
        CHECK(lt__queue_put(q, &items[round + 1]));
        CHECK(lt__queue_take(q) == &items[round]);
        CHECK(lt__queue_take(q) == &items[round + 1]);
    }
    lt__queue_free(q);
    lt__queue_free(NULL);
}

TEST(a_closed_queue_can_be_drained)
{
    int item;
    lt_queue *q = lt__queue_new(2);
    CHECK(lt__queue_put(q, &item));
    lt__queue_close(q);
    CHECK(!lt__queue_put(q, &item));
    CHECK(lt__queue_take(q) == &item);
    CHECK(lt__queue_take(q) == NULL);
    CHECK(lt__queue_take(q) == NULL);
    lt__queue_free(q);
}

/* ==== Threads ================================================================================= */

typedef struct side {
    lt_queue *q;
    atomic_int *items; /* to put; each counts how often it was taken */
    int n;
    atomic_int done; /* number put or taken */
    atomic_bool over;
} side;

static void *put_all(void *ud)
{
    side *s = ud;
    for (int i = 0; i < s->n && lt__queue_put(s->q, &s->items[i]); i++)
        s->done++;
    s->over = true;
    return NULL;
}

static void *take_all(void *ud)
{
    side *s = ud;
    for (atomic_int *item; (item = lt__queue_take(s->q)); s->done++)
        ++*item;
    s->over = true;
    return NULL;
}

/* Waits for n items, and then a little for any that should not come. */
static void wait_for(const atomic_int *done, int n)
{
    for (int i = 0; i < 5000 && *done < n; i++)
        usleep(1000);
    usleep(20000);
}

TEST(putting_blocks_while_the_queue_is_full)
{
    atomic_int items[3];
    side s = {.q = lt__queue_new(2), .items = items, .n = 3};
    pthread_t thread;
    pthread_create(&thread, NULL, put_all, &s);
    wait_for(&s.done, 2);
    CHECK_EQ(s.done, 2);
    CHECK(lt__queue_take(s.q) == &items[0]);
    pthread_join(thread, NULL);
    CHECK_EQ(s.done, 3);
    CHECK(lt__queue_take(s.q) == &items[1]);
    CHECK(lt__queue_take(s.q) == &items[2]);
    lt__queue_free(s.q);
}

TEST(closing_wakes_both_sides)
{
    atomic_int items[3];
    pthread_t thread[4];
    side putter = {.q = lt__queue_new(1), .items = items, .n = 3}, taker = {.q = lt__queue_new(1)};
    pthread_create(&thread[0], NULL, put_all, &putter);
    for (int i = 1; i < 4; i++)
        pthread_create(&thread[i], NULL, take_all, &taker);
    wait_for(&putter.done, 1);
    CHECK(!putter.over && !taker.over);
    lt__queue_close(putter.q);
    lt__queue_close(taker.q);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    CHECK(putter.over && taker.over);
    CHECK_EQ(putter.done, 1);
    CHECK_EQ(taker.done, 0);
    lt__queue_free(putter.q);
    lt__queue_free(taker.q);
}

enum { PUTTERS = 3, TAKERS = 3, EACH = 2000 };

TEST(every_item_is_taken_once)
{
    static atomic_int seen[PUTTERS][EACH];
    lt_queue *q = lt__queue_new(4);
    pthread_t putters[PUTTERS], takers[TAKERS];
    side put[PUTTERS], take[TAKERS];
    int taken = 0;
    for (int i = 0; i < TAKERS; i++) {
        take[i] = (side){.q = q};
        pthread_create(&takers[i], NULL, take_all, &take[i]);
    }
    for (int i = 0; i < PUTTERS; i++) {
        put[i] = (side){.q = q, .items = seen[i], .n = EACH};
        pthread_create(&putters[i], NULL, put_all, &put[i]);
    }
    for (int i = 0; i < PUTTERS; i++) {
        pthread_join(putters[i], NULL);
        CHECK_EQ(put[i].done, EACH);
    }
    for (int i = 0; i < TAKERS; i++)
        CHECK(!take[i].over);
    lt__queue_close(q);
    for (int i = 0; i < TAKERS; i++) {
        pthread_join(takers[i], NULL);
        taken += take[i].done;
    }
    CHECK_EQ(taken, PUTTERS * EACH);
    for (int i = 0; i < PUTTERS * EACH; i++)
        CHECK_EQ(seen[i / EACH][i % EACH], 1);
    lt__queue_free(q);
}
