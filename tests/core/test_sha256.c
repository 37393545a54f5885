/* test_sha256.c - compares SHA-256, and its plain C version, with published digests; and digests of
 * data added in parts with those of the whole. */
#include "core/tensor.h"
#include "tests/lt_test.h"

static void hash(const void *data, size_t bytes, char hex[65])
{
    lt_sha256 s;
    lt_sha256_begin(&s);
    lt_sha256_add(&s, data, bytes);
    lt_sha256_end(&s, hex);
}

/* As hash(), in plain C, of a short message; padded as in section 5.1.1 of FIPS 180-4. */
static void hash_plain(const void *data, size_t bytes, char hex[65])
{
    uint8_t padded[256] = {0};
    lt_sha256 s;
    size_t blocks = (bytes + 9 + 63) / 64;
    CHECK(64 * blocks <= sizeof padded);
    memcpy(padded, data, bytes);
    padded[bytes] = 0x80;
    padded[64 * blocks - 2] = (uint8_t)(bytes * 8 >> 8);
    padded[64 * blocks - 1] = (uint8_t)(bytes * 8);
    lt_sha256_begin(&s);
    lt__sha256_plain(s.h, padded, blocks);
    for (int i = 0; i < 8; i++)
        snprintf(hex + 8 * i, 9, "%08x", s.h[i]);
}

/* From FIPS 180-2, appendix B, and the examples page of FIPS 180-4. */
TEST(published_digests)
{
    static const struct {
        const char *text, *digest;
    } known[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrl"
         "mnopqrsmnopqrstnopqrstu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
    };
    char hex[65];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        hash(known[i].text, strlen(known[i].text), hex);
        CHECK_STR(hex, known[i].digest);
        hash_plain(known[i].text, strlen(known[i].text), hex);
        CHECK_STR(hex, known[i].digest);
    }
}

TEST(a_million_letters_a)
{
    char letters[1000], hex[65];
    lt_sha256 s;
    memset(letters, 'a', sizeof letters);
    lt_sha256_begin(&s);
    for (int i = 0; i < 1000; i++)
        lt_sha256_add(&s, letters, sizeof letters);
    lt_sha256_end(&s, hex);
    CHECK_STR(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* Adding data of any length in two parts, split anywhere, gives the digest of the whole. */
TEST(data_added_in_parts_have_the_same_digest)
{
    uint8_t data[200];
    char whole[65], cut[65];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 37 + 11);
    for (size_t n = 0; n <= sizeof data; n++) {
        hash(data, n, whole);
        hash_plain(data, n, cut);
        CHECK_STR(cut, whole);
        for (size_t first = 0; first <= n; first++) {
            lt_sha256 s;
            lt_sha256_begin(&s);
            lt_sha256_add(&s, data, first);
            lt_sha256_add(&s, data + first, n - first);
            lt_sha256_end(&s, cut);
            CHECK_STR(cut, whole);
        }
    }
}
