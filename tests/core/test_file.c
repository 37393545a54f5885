/* test_file.c - safetensors files: tensors round-trip, and damaged files are refused. */
#include "tests/core/files.h"

/* ==== Round trips ============================================================================= */

TEST_FILES(all_dtypes_and_shapes_round_trip)
{
    static const struct {
        int ndim;
        int64_t dims[8];
    } shapes[] = {
        {0, {0}},       {1, {1}},          {1, {0}},
        {2, {3, 5}},    {4, {2, 0, 3, 4}}, {8, {1, 2, 1, 2, 1, 2, 1, 3}},
        {2, {123, 77}},
    };
    enum { SHAPES = sizeof shapes / sizeof *shapes, N = SHAPES * LT_DTYPE_COUNT };
    static const char *const meta[] = {
        "step", "17", "", "", "text", "line\none\t\"two\" \\ \x01 \x7f é€𝄞", "é", "x"};
    lt_tensor *x[N];
    char name[N][64];
    const char *names[N];
    for (int i = 0; i < N; i++) {
        int shape = i % SHAPES;
        x[i] = counting(ctx, (lt_dtype)(i / SHAPES), shapes[shape].ndim, shapes[shape].dims);
        snprintf(name[i], sizeof *name, i % 2 ? "layer.%d.w" : "odd \"%d\" \n/\\ é€𝄞", i);
        if (i == 3)
            name[i][0] = 0;
        names[i] = name[i];
    }
    const char *path = in_folder("all.safetensors");
    CHECK_OK(lt_file_save(path, N, names, x, 4, meta));
    lt_file *f = lt_file_open(ctx, path);
    if (!f)
        FAIL("%s", lt_errmsg());
    CHECK_EQ(lt_file_count(f), N);
    for (int i = 0; i < N; i++) {
        lt_dtype dtype;
        int ndim;
        int64_t dims[LT_MAX_DIMS];
        CHECK_STR(lt_file_name(f, i), names[i]);
        CHECK_EQ(lt_file_find(f, names[i]), i);
        lt_file_shape(f, i, &dtype, &ndim, dims);
        CHECK_EQ(dtype, lt_tensor_dtype(x[i]));
        CHECK_EQ(ndim, lt_ndim(x[i]));
        CHECK_EQ(memcmp(dims, lt_dims(x[i]), (size_t)ndim * sizeof *dims), 0);
        lt_tensor *y = lt_file_read(f, i);
        CHECK(y != NULL);
        CHECK_EQ(memcmp(lt_data(y), lt_data(x[i]), (size_t)lt_count(x[i]) * lt_dtype_bytes(dtype)),
                 0);
        lt_release(y);
    }
    CHECK_EQ(lt_file_find(f, "layer.2.w"), -1);
    const char *key, *value;
    for (int i = 0; i < 4; i++) {
        CHECK(lt_file_meta_at(f, i, &key, &value));
        CHECK_STR(key, meta[2 * i]);
        CHECK_STR(value, meta[2 * i + 1]);
        CHECK_STR(lt_file_meta(f, meta[2 * i]), meta[2 * i + 1]);
    }
    CHECK(!lt_file_meta_at(f, 4, &key, &value) && !lt_file_meta_at(f, -1, &key, &value));
    CHECK(lt_file_meta(f, "none") == NULL && lt_file_meta(f, "sha256") == NULL);
    CHECK_OK(lt_file_verify(f));
    lt_file_close(f);
    for (int i = 0; i < N; i++)
        lt_release(x[i]);
}

/* The digests are from Python's hashlib, of the bytes with zeros in place of the digest. */
TEST_FILES(the_bytes_follow_the_format)
{
    static const char header[] =
        "{\"__metadata__\":{\"sha256\":"
        "\"fd4a469a1a2b3372bd390aa085330f62a3d3be747aea1aee9b3fb4215aad8704\",\"k\":\"v\"},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[3,7]}}  ";
    const char *names[] = {"b", "a"}, *meta[] = {"k", "v"};
    char bytes[256];
    uint64_t length;
    float one = 1;
    lt_tensor *x[] = {lt_tensor_from(ctx, LT_U8, 1, (int64_t[]){3}, "xyz"),
                      lt_tensor_from(ctx, LT_F32, 0, NULL, &one)};
    const char *path = in_folder("bytes.safetensors");
    CHECK_OK(lt_file_save(path, 2, names, x, 1, meta));
    size_t n = slurp(path, bytes, sizeof bytes);
    memcpy(&length, bytes, 8);
    CHECK_EQ(length, sizeof header - 1);
    CHECK_EQ(length % 8, 0);
    CHECK_EQ(n, 8 + length + 7);
    CHECK_EQ(memcmp(bytes + 8, header, length), 0);
    CHECK_EQ(memcmp(bytes + 8 + length, "xyz\0\0\x80\x3f", 7), 0);
    RELEASE(x[0], x[1]);
}

TEST_FILES(a_file_without_tensors)
{
    static const char empty[] =
        "\x60\0\0\0\0\0\0\0{\"__metadata__\":{\"sha256\":"
        "\"70fadacb59bbbd5e62633739746a0dd25065a28698bb54244013fa7f68b98937\"}}  ";
    const char *meta[] = {"a", "1", "b", "2"}, *key, *value;
    char bytes[256];
    const char *path = in_folder("none.safetensors");
    CHECK_OK(lt_file_save(path, 0, NULL, NULL, 0, NULL));
    CHECK_EQ(slurp(path, bytes, sizeof bytes), sizeof empty - 1);
    CHECK_EQ(memcmp(bytes, empty, sizeof empty - 1), 0);
    lt_file *f = lt_file_open(ctx, path);
    CHECK(f && lt_file_count(f) == 0 && lt_file_find(f, "") == -1 && !lt_file_meta(f, "a"));
    CHECK(!lt_file_meta_at(f, 0, &key, &value));
    CHECK_OK(lt_file_verify(f));
    lt_file_close(f);
    CHECK_OK(lt_file_save(path, 0, NULL, NULL, 2, meta));
    f = lt_file_open(ctx, path);
    CHECK(f && lt_file_count(f) == 0);
    CHECK_STR(lt_file_meta(f, "b"), "2");
    lt_file_close(f);
    lt_file_close(NULL);
}

TEST_FILES(reading_into_converts)
{
    int64_t dims[] = {3, 3001}, flat[] = {9003};
    lt_tensor *i32 = lt_tensor_new(ctx, LT_I32, 2, dims),
              *f16 = lt_tensor_new(ctx, LT_F16, 2, dims);
    lt_tensor *f64 = lt_tensor_new(ctx, LT_F64, 2, dims),
              *other = lt_tensor_new(ctx, LT_F64, 1, flat);
    for (int i = 0; i < 9003; i++)
        ((int32_t *)lt_data(i32))[i] = i % 2049;
    const char *path = in_folder("convert.safetensors"), *name = "w";
    CHECK_OK(lt_file_save(path, 1, &name, &i32, 0, NULL));
    lt_file *f = lt_file_open(ctx, path);
    CHECK(f != NULL);
    unsigned version = f16->storage->version;
    CHECK_OK(lt_file_read_into(f, 0, f16));
    CHECK(f16->storage->version != version);
    CHECK_OK(lt_file_read_into(f, 0, f64));
    for (int i = 0; i < 9003; i++) {
        double value;
        CHECK_OK(lt_item(f16, i, &value));
        CHECK_NEAR(value, i % 2049, 0);
        CHECK_NEAR(((double *)lt_data(f64))[i], i % 2049, 0);
    }
    CHECK_FAILS(lt_file_read_into(f, 0, other), LT_EFILE,
                "tensor 'w' is 3x3001 i32 and cannot be read into 9003 f64");
    CHECK_MSG(path);
    CHECK_NULL(lt_file_read(f, lt_file_find(f, "v")), LT_EINVAL,
               "has 1 tensors; index -1 is out of range");
    CHECK_FAILS(lt_file_read_into(f, 1, f64), LT_EINVAL, "index 1 is out of range");
    lt_file_close(f);
    RELEASE(i32, f16, f64, other);
}

/* Other programs may write the header in any order; lt_file uses the order of the data. */
TEST_FILES(the_header_may_be_in_any_order)
{
    const char *path = file_of(
        "{ \"z\" : {\"shape\":[2], \"data_offsets\":[4,12],\t\"dtype\":\"F32\"},\n"
        "\"e\":{\"dtype\":\"F64\",\"shape\":[0,9],\"data_offsets\":[4,4]},"
        "\"a\\u00e9\\ud834\\udd1e\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}  ",
        12);
    lt_file *f = lt_file_open(ctx, path);
    if (!f)
        FAIL("%s", lt_errmsg());
    CHECK_STR(lt_file_name(f, 0), "aé𝄞");
    CHECK_STR(lt_file_name(f, 1), "e");
    CHECK_STR(lt_file_name(f, 2), "z");
    lt_file_close(f);
}

/* ==== Damage ================================================================================== */

TEST_FILES(every_truncation_is_refused)
{
    char bytes[512];
    size_t n = small_file(ctx, bytes, sizeof bytes);
    const char *path = in_folder("cut.safetensors");
    CHECK(n > 200 && n < sizeof bytes);
    for (size_t cut = 0; cut < n; cut++) {
        spit(path, bytes, cut);
        refuse(ctx, path, LT_EFILE, path);
    }
    bytes[n] = 0;
    spit(path, bytes, n + 1);
    refuse(ctx, path, LT_EFILE, "the data continue after the last tensor");
}

/* Opening detects the flip, or the digest does where the format cannot (a name, a dtype of the same
 * size, a value). If the file opens, all its tensors can be read. */
TEST_FILES(every_flipped_bit_is_detected)
{
    char bytes[512];
    size_t n = small_file(ctx, bytes, sizeof bytes);
    const char *path = in_folder("flipped.safetensors");
    size_t refused = 0;
    for (size_t bit = 0; bit < 8 * n; bit++) {
        bytes[bit / 8] ^= (char)(1 << bit % 8);
        spit(path, bytes, n);
        bytes[bit / 8] ^= (char)(1 << bit % 8);
        lt_file *f = lt_file_open(ctx, path);
        if (!f) {
            CHECK_EQ(lt_errcode(), LT_EFILE);
            CHECK_MSG(path);
            refused++;
            continue;
        }
        if (lt_file_verify(f) == LT_OK)
            FAIL("flipped bit %zu of byte %zu is not detected", bit % 8, bit / 8);
        CHECK_EQ(lt_errcode(), LT_EFILE);
        CHECK_MSG("flipped.safetensors: it is damaged: it has digest ");
        CHECK_EQ(lt_file_count(f), 3);
        for (int i = 0; i < 3; i++) {
            lt_tensor *x = lt_file_read(f, i);
            CHECK(x && lt_count(x) < 32);
            lt_release(x);
        }
        lt_file_close(f);
    }
    CHECK(refused > 2 * n && refused < 8 * n);
    CHECK(lt_memory_stats(ctx).peak < 65536);
}

TEST_FILES(the_message_about_damage_has_both_digests)
{
    char bytes[512], text[128];
    size_t n = small_file(ctx, bytes, sizeof bytes);
    const char *path = in_folder("damaged.safetensors");
    memset(bytes + 35, '0', 64);
    spit(path, bytes, n);
    lt_file *f = lt_file_open(ctx, path);
    CHECK(f != NULL);
    char hex[65];
    lt_sha256 s;
    lt_sha256_begin(&s);
    lt_sha256_add(&s, bytes, n);
    lt_sha256_end(&s, hex);
    snprintf(text, sizeof text,
             "it is damaged: it has digest 00000000..., but its content has %.8s...", hex);
    CHECK_FAILS(lt_file_verify(f), LT_EFILE, text);
    lt_file_close(f);
}

TEST_FILES(a_flipped_bit_in_a_large_file_is_detected)
{
    enum { N = 100003 };
    static const char flips[] = {0, 0x10, 0x01}; /* 0: unchanged */
    static char bytes[N + 512];
    lt_tensor *x = counting(ctx, LT_U8, 1, (int64_t[]){N});
    const char *path = in_folder("large.safetensors");
    CHECK_OK(save_small(path, x));
    size_t n = slurp(path, bytes, sizeof bytes);
    for (size_t at = 32768; at < n; at += (n - 1 - 32768) / 3)
        for (int i = 0; i < 3; i++) {
            bytes[at] ^= flips[i];
            spit(path, bytes, n);
            bytes[at] ^= flips[i];
            lt_file *f = lt_file_open(ctx, path);
            CHECK(f != NULL);
            CHECK_EQ(lt_file_verify(f), flips[i] ? LT_EFILE : LT_OK);
            lt_file_close(f);
        }
    lt_release(x);
}

/* A "sha256" that another program wrote is ordinary metadata. */
TEST_FILES(files_of_other_programs_are_not_verified)
{
    static const struct {
        const char *header, *sha256;
    } known[] = {
        {"{}", NULL},
        {"{\"__metadata__\":{\"format\":\"pt\"}}", NULL},
        {"{\"__metadata__\":{\"format\":\"pt\",\"sha256\":\"x\"}}", "x"},
        {"{\"__metadata__\":{\"sha256\":\"x\"}}", "x"},
        {"{\"__metadata__\":{\"sha512\":\"fd4a469a1a2b3372bd390aa085330f62a3d3be747aea1aee9b3fb42"
         "15aad8704\"}}",
         NULL},
        {"{ \"__metadata__\":{\"sha256\":\"0000000000000000000000000000000000000000000000000000000"
         "000000000\"}}",
         "0000000000000000000000000000000000000000000000000000000000000000"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *key, *value;
        lt_file *f = lt_file_open(ctx, file_of(known[i].header, 0));
        CHECK(f != NULL);
        CHECK_OK(lt_file_verify(f));
        if (known[i].sha256)
            CHECK_STR(lt_file_meta(f, "sha256"), known[i].sha256);
        CHECK_EQ(lt_file_meta_at(f, 0, &key, &value), i > 0);
        lt_file_close(f);
    }
}

#define TENSOR(dtype, shape, offsets)                                                              \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{\"a\":" TENSOR(dtype, shape, offsets) "}"

TEST_FILES(hostile_headers_are_refused)
{
    static const struct {
        const char *header;
        size_t data;
        const char *text;
    } known[] = {
        {"", 0, "byte 0 of the header does not begin an object"},
        {" {}", 0, "byte 0 of the header does not begin an object"},
        {"[]", 0, "byte 0 of the header does not begin an object"},
        {"\xef\xbb\xbf{}", 0, "byte 0 of the header does not begin an object"},
        {"{", 0, "is not JSON"},
        {"{}}", 0, "is not JSON"},
        {"{}{}", 0, "is not JSON"},
        {"{},", 0, "is not JSON"},
        {"{\"a\"}", 0, "is not JSON"},
        {"{\"a\":}", 0, "is not JSON"},
        {"{\"1\":1,", 0, "is not JSON"},
        {"{\"a", 0, "is not JSON"},
        {"{\"a\\", 0, "is not JSON"},
        {"{\"a\\u12", 0, "is not JSON"},
        {"{\"\\ud800\":1}", 0, "is not JSON"},
        {"{}", 1, "the data continue after the last tensor"},
        {"{\"a\":1}", 0, "tensor 'a' must have a dtype, a shape, data_offsets and nothing else"},
        {"{\"a\":\"b\"}", 0, "tensor 'a' must have a dtype"},
        {"{\"a\":[]}", 0, "tensor 'a' must have a dtype"},
        {"{\"a\":{}}", 0, "tensor 'a' must have a dtype"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor 'a' must have a dtype"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1]}}", 1,
         "tensor 'a' must have a dtype"},
        {"{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "tensor 'a' must have a dtype"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1,
         "tensor 'a' must have a dtype"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1,
         "and nothing else"},
        {ONE("BOOL", "[1]", "[0,1]"), 1,
         "tensor 'a' has dtype BOOL, which luatrain does not support"},
        {ONE("I8", "[1]", "[0,1]"), 1, "tensor 'a' has dtype I8"},
        {ONE("F8_E4M3", "[1]", "[0,1]"), 1, "convert it to F32, F64, F16, BF16, I64, I32 or U8"},
        {ONE("u8", "[1]", "[0,1]"), 1, "tensor 'a' has dtype u8"},
        {ONE("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "not a list of at most 8 counts"},
        {ONE("U8", "[\"1\"]", "[0,1]"), 1, "not a list of at most 8 counts"},
        {ONE("U8", "[[1]]", "[0,1]"), 1, "begins a fourth level"},
        {ONE("U8", "[-1]", "[0,1]"), 1, "does not begin an object, list, string or count"},
        {ONE("U8", "[1.0]", "[0,1]"), 1, "does not begin an object, list, string or count"},
        {ONE("U8", "[1e0]", "[0,1]"), 1, "does not begin an object, list, string or count"},
        {ONE("U8", "[null]", "[0,1]"), 1, "does not begin an object, list, string or count"},
        {ONE("U8", "[01]", "[0,1]"), 1, "is not a count below 10^15"},
        {ONE("U8", "[1000000000000000]", "[0,1]"), 1, "is not a count below 10^15"},
        {ONE("U8", "[18446744073709551617]", "[0,1]"), 1, "is not a count below 10^15"},
        {ONE("F32", "[100000000000000,100000000000000]", "[0,1]"), 1, "dims is too large"},
        {ONE("F32", "[0,100000000000000,100000000000000]", "[0,0]"), 0, "dims is too large"},
        {ONE("F32", "[100000000000]", "[0,400000000000]"), 4,
         "ends at byte 400000000000 of the data"},
        {ONE("F32", "[2]", "[0,4]"), 4, "has 2 elements of F32, but 4 bytes"},
        {ONE("F32", "[]", "[0,0]"), 0, "has 1 elements of F32, but 0 bytes"},
        {ONE("U8", "[1]", "[1,0]"), 1, "are not two counts in order"},
        {ONE("U8", "[1]", "[0]"), 1, "are not two counts in order"},
        {ONE("U8", "[1]", "[0,1,2]"), 1, "are not two counts in order"},
        {ONE("U8", "[1]", "[1,2]"), 2,
         "begins at byte 1 of the data, but the one before ends at byte 0"},
        {"{\"a\":" TENSOR("U8", "[1]", "[0,1]") ",\"b\":" TENSOR("U8", "[1]", "[2,3]") "}", 3,
         "holes and overlaps are not allowed"},
        {"{\"a\":" TENSOR("U8", "[2]", "[0,2]") ",\"b\":" TENSOR("U8", "[2]", "[1,3]") "}", 3,
         "holes and overlaps are not allowed"},
        {"{\"a\":" TENSOR("U8", "[2]", "[0,2]") ",\"b\":" TENSOR("U8", "[2]", "[0,2]") "}", 2,
         "holes and overlaps are not allowed"},
        {"{\"a\":" TENSOR("U8", "[2]", "[0,2]") ",\"b\":" TENSOR("U8", "[0]", "[1,1]") "}", 2,
         "holes and overlaps are not allowed"},
        {"{\"a\":" TENSOR("U8", "[1]", "[0,1]") ",\"a\":" TENSOR("U8", "[1]", "[1,2]") "}", 2,
         "'a' occurs twice"},
        {"{\"a\":" TENSOR("U8", "[1]", "[0,1]") ",\"\\u0061\":" TENSOR("U8", "[1]", "[1,2]") "}", 2,
         "'a' occurs twice"},
        {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "the name 'k' occurs twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0,
         "__metadata__ must occur once and be an object"},
        {"{\"__metadata__\":\"x\"}", 0, "__metadata__ must occur once and be an object"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "metadata 'k' is not a string"},
        {"{\"__metadata__\":{\"k\":{}}}", 0, "metadata 'k' is not a string"},
        {"{\"a\\u0000b\":" TENSOR("U8", "[1]", "[0,1]") "}", 1,
         "is a control character in a string"},
        {"{\"a\nb\":" TENSOR("U8", "[1]", "[0,1]") "}", 1, "is a control character in a string"},
        {"{\"a\xff\":" TENSOR("U8", "[1]", "[0,1]") "}", 1, "is not UTF-8"},
        {"{\"a\xc0\x80\":" TENSOR("U8", "[1]", "[0,1]") "}", 1, "is not UTF-8"},
        {"{\"a\xed\xa0\x80\":" TENSOR("U8", "[1]", "[0,1]") "}", 1, "is not UTF-8"},
        {"{\"a\xf4\x90\x80\x80\":" TENSOR("U8", "[1]", "[0,1]") "}", 1, "is not UTF-8"},
        {"{\"a\xfc\x80\x80\x80\":1}", 0, "is not UTF-8"},
        {"{\"a\xe2\x82\"}", 0, "is not UTF-8"},
        {"{}\xe2\x82", 0, "is not UTF-8"},
        {"{\"\\u001b[2Jx\":1}", 0, "tensor '?[2Jx' must have"},
        {"{[[[", 0, "begins a fourth level"},
        {"{\"a\":true}", 0, "does not begin an object, list, string or count"},
        {"{} //", 0, "does not begin an object, list, string or count"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        refuse(ctx, file_of(known[i].header, known[i].data), LT_EFILE, known[i].text);
    CHECK(lt_memory_stats(ctx).peak < 65536);
}

TEST_FILES(a_header_with_nul_bytes_is_refused)
{
    static const char outside[] = "\x04\0\0\0\0\0\0\0{}\0\0",
                      inside[] = "\x07\0\0\0\0\0\0\0{\"a\0\":1}";
    const char *path = in_folder("nul.safetensors");
    spit(path, outside, 12);
    refuse(ctx, path, LT_EFILE, "byte 2 of the header does not begin an object");
    spit(path, inside, 15);
    refuse(ctx, path, LT_EFILE, "byte 3 of the header is a control character in a string");
}

TEST_FILES(declared_lengths_are_not_trusted)
{
    static const uint64_t lengths[] = {
        3, 100000000, 100000001, (uint64_t)1 << 31, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    const char *path = in_folder("length.safetensors");
    for (int i = 0; i < 7; i++) {
        char bytes[10] = "........{}";
        memcpy(bytes, &lengths[i], 8);
        spit(path, bytes, sizeof bytes);
        refuse(ctx, path, LT_EFILE,
               lengths[i] > 100000000 ? "longer than the 100000000 bytes" : "the file only 10");
    }
    CHECK(lt_memory_stats(ctx).peak < 65536);
}

/* Exceeds the limit in as few bytes as possible. It is refused before a JSON tree is built. */
TEST_FILES(too_many_values_are_refused)
{
    enum { N = 600000 };
    static char bytes[8 + 2 * N + 8];
    uint64_t length = 2 * N + 2;
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, "{\"", 2);
    memset(bytes + 10, ',', 2 * N);
    bytes[9] = '[';
    spit(in_folder("many.safetensors"), bytes, 8 + length);
    refuse(ctx, in_folder("many.safetensors"), LT_EFILE, "one value too many; split the file");
}

TEST_FILES(too_many_tensors_are_refused)
{
    enum { N = 16385 };
    static char bytes[N * 64];
    size_t used = 8;
    for (int i = 0; i < N; i++)
        used += (size_t)sprintf(bytes + used, "%c\"%d\":" TENSOR("U8", "[0]", "[0,0]"),
                                i ? ',' : '{', i);
    bytes[used++] = '}';
    uint64_t length = used - 8;
    memcpy(bytes, &length, 8);
    spit(in_folder("tensors.safetensors"), bytes, used);
    refuse(ctx, in_folder("tensors.safetensors"), LT_EFILE,
           "16385 tensors and 0 metadata entries are too many; the limit is 16384 of each");
}

/* Comparing every pair of names would take minutes. */
TEST_FILES(long_and_similar_names_are_compared_fast)
{
    enum { N = 3000, LENGTH = 8000 };
    size_t capacity = (size_t)N * (LENGTH + 80), used = 8;
    char *bytes = malloc(capacity);
    for (int i = 0; i < N; i++) {
        used += (size_t)sprintf(bytes + used, i ? ",\"" : "{\"");
        memset(bytes + used, 'x', LENGTH);
        used += LENGTH;
        used += (size_t)sprintf(bytes + used, "%d\":" TENSOR("F32", "[0]", "[0,0]"), i);
    }
    bytes[used++] = '}';
    uint64_t length = used - 8;
    memcpy(bytes, &length, 8);
    spit(in_folder("long.safetensors"), bytes, used);
    free(bytes);
    lt_file *f = lt_file_open(ctx, in_folder("long.safetensors"));
    CHECK(f != NULL);
    CHECK_EQ(lt_file_count(f), N);
    CHECK_EQ(strlen(lt_file_name(f, 17)), LENGTH + 2);
    lt_file_close(f);
}

TEST_FILES(a_long_name_is_truncated_in_messages)
{
    char header[400] = "{\"";
    for (int i = 0; i < 100; i++)
        strcat(header, "é");
    strcat(header, "\":1}");
    refuse(ctx, file_of(header, 0), LT_EFILE, "éé...' must have");
    CHECK(strlen(lt_errmsg()) < 200);
}

/* ==== The caller's mistakes =================================================================== */

TEST_FILES(bad_names_are_refused)
{
    lt_tensor *x = counting(ctx, LT_F32, 1, (int64_t[]){7}), *both[] = {x, x};
    const char *path = in_folder("names.safetensors");
    const char *twice[] = {"a", "a"}, *reserved[] = {"a", "__metadata__"},
               *latin[] = {"a", "caf\xe9"};
    const char *keys[] = {"k", "1", "k", "2"}, *text[] = {"k", "\xff"}, *taken[] = {"sha256", ""};
    CHECK_FAILS(lt_file_save(path, 2, twice, both, 0, NULL), LT_EINVAL,
                "the name 'a' is given twice");
    CHECK_FAILS(lt_file_save(path, 2, reserved, both, 0, NULL), LT_EINVAL,
                "a tensor cannot be named __metadata__");
    CHECK_FAILS(lt_file_save(path, 2, latin, both, 0, NULL), LT_EINVAL, "is not UTF-8");
    CHECK_FAILS(lt_file_save(path, 1, twice, both, 2, keys), LT_EINVAL,
                "the name 'k' is given twice");
    CHECK_FAILS(lt_file_save(path, 1, twice, both, 1, text), LT_EINVAL, "is not UTF-8");
    CHECK_FAILS(lt_file_save(path, 1, twice, both, 1, taken), LT_EINVAL,
                "names.safetensors: metadata cannot be named sha256");
    CHECK_FAILS(lt_file_save(path, 16385, NULL, NULL, 0, NULL), LT_EINVAL, "too many");
    CHECK_EQ(access(path, F_OK), -1);
    lt_release(x);
}

TEST_FILES(a_tensor_of_an_ended_scope_is_refused)
{
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *x = counting(ctx, LT_F32, 1, (int64_t[]){7});
    lt_scope_pop(ctx);
    CHECK_FAILS(save_small(in_folder("dead.safetensors"), x), LT_EINVAL,
                "dead.safetensors: tensor 'x': this tensor belongs to a step that is over");
    lt_release(x);
}
