/* test_parse.c - the bytes of messages from other processes are checked before use. */
#include <string.h>

#include "dist/mail/parse.h"
#include "tests/lt_test.h"

static lt_message_head head_of(lt_message_kind kind, size_t bytes)
{
    return (lt_message_head){.kind = kind, .bytes = (int64_t)bytes};
}

/* Parses a message whose data are `bytes` bytes 'x'. */
static lt_message *parse(bool from_server, const lt_message_head *h, size_t bytes)
{
    char data[2048];
    memset(data, 'x', sizeof data);
    return lt__message_parse(from_server, h, sizeof *h, data, bytes);
}

static void refuse(bool from_server, const lt_message_head *h, size_t bytes)
{
    CHECK_NULL(parse(from_server, h, bytes), LT_EDESYNC, "is invalid; the server and all workers");
}

TEST(a_valid_message_is_copied)
{
    lt_message_head h = head_of(LT_MSG_GRANT, 9);
    h.run = 3;
    h.body.grant.pull = 2;
    h.body.grant.n = 1;
    h.body.grant.ticket[0] = 77;
    lt_message *m = parse(true, &h, 9);
    CHECK(m != NULL);
    CHECK(m->kind == LT_MSG_GRANT && m->run == 3 && m->bytes == 9 && m->data[8] == 'x');
    CHECK_EQ(m->as.grant.ticket[0], 77);
    lt__message_free(m);
}

TEST(sizes_must_agree)
{
    lt_message_head h = head_of(LT_MSG_FINISH, 8);
    char data[8] = {0};
    CHECK_NULL(lt__message_parse(true, &h, sizeof h - 1, data, 8), LT_EDESYNC, "is invalid");
    refuse(true, &h, 7);
    h.bytes = -1;
    refuse(true, &h, 8);
    h = head_of(LT_MSG_RELEASE, 0);
    h.run = -1;
    refuse(false, &h, 0);
}

TEST(each_side_sends_its_own_kinds)
{
    lt_message_head h = head_of(LT_MSG_FENCED, 0);
    refuse(false, &h, 0);
    h.kind = LT_MSG_RELEASE;
    refuse(true, &h, 0);
    static const int64_t others[] = {LT_MAIL_LOST,  LT_MAIL_JOINED, LT_MSG_CHECK, LT_MSG_EVENT,
                                     LT_MSG_VALUES, 1000,           INT64_MIN};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        h.kind = others[i];
        refuse(true, &h, 0);
        refuse(false, &h, 0);
    }
}

TEST(numbers_must_be_possible)
{
    lt_message_head h = head_of(LT_MSG_PUSH, 8);
    unsigned char two = 2;
    memcpy(&h.body.push.skip, &two, 1);
    refuse(false, &h, 8);
    h = head_of(LT_MSG_PUSH, 8);
    h.body.push.n_bn = -1;
    refuse(false, &h, 8);
    h = head_of(LT_MSG_PUSH, 0); /* a gradient without data */
    refuse(false, &h, 0);
    h = head_of(LT_MSG_GRANT, 8);
    h.body.grant.pull = 1;
    h.body.grant.n = LT_MSG_TICKETS + 1;
    refuse(true, &h, 8);
    h.body.grant.n = 1;
    h.body.grant.ticket[0] = -1;
    refuse(true, &h, 8);
    h = head_of(LT_MSG_WELCOME, 0);
    h.body.welcome.rank = h.body.welcome.size = 4;
    refuse(true, &h, 0);
    h = head_of(LT_MSG_SAID, 8); /* no NUL ends the name */
    h.body.said.name_bytes = 4;
    refuse(true, &h, 8);
    h.body.said.name_bytes = 9;
    refuse(true, &h, 8);
    h = head_of(LT_MSG_JOIN, 2000); /* longer than any text */
    refuse(false, &h, 2000);
}

TEST(a_message_arrives_in_parts)
{
    lt_message_head h = head_of(LT_MSG_FINISH, 8);
    lt_parts p = {0};
    lt_message *m;
    CHECK_OK(lt__message_add(&p, true, &h, sizeof h, "abc", 3, &m));
    CHECK(m == NULL);
    CHECK_OK(lt__message_add(&p, true, &h, sizeof h, "defgh", 5, &m));
    CHECK(m && !p.message && m->bytes == 8 && memcmp(m->data, "abcdefgh", 8) == 0);
    lt__message_free(m);
}

/* Parts of `bytes` bytes and then of `more` bytes with the head *then: the last one is invalid. */
static void refuse_part(size_t bytes, const lt_message_head *then, size_t more)
{
    static const char data[64];
    lt_message_head h = head_of(LT_MSG_FINISH, 8);
    lt_parts p = {0};
    lt_message *m;
    CHECK_OK(lt__message_add(&p, true, &h, sizeof h, data, bytes, &m));
    CHECK_FAILS(lt__message_add(&p, true, then, sizeof *then, data, more, &m), LT_EDESYNC,
                "is invalid; the server and all workers");
    CHECK(m == NULL);
    lt__message_free(p.message);
}

TEST(parts_belong_to_one_message)
{
    lt_message_head same = head_of(LT_MSG_FINISH, 8), other = head_of(LT_MSG_GRANT, 8);
    lt_message_head longer = head_of(LT_MSG_FINISH, 9);
    refuse_part(3, &same, 6);
    refuse_part(3, &same, 0);
    refuse_part(3, &other, 5);
    refuse_part(3, &longer, 5);
    lt_message *m;
    lt_parts p = {0};
    same.bytes = INT64_MAX; /* there is no such memory */
    CHECK_FAILS(lt__message_add(&p, true, &same, sizeof same, "x", 1, &m), LT_EDESYNC,
                "is invalid");
}
