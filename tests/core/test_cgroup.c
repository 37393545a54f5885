/* test_cgroup.c - the CPUs of a container's quota, in the files of cgroup v1 and v2, and the number
 * of threads in OMP_NUM_THREADS. */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/device.h"
#include "tests/lt_test.h"

static char root[64];

/* Writes a file below the root, and its folders. */
static void write_file(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')); *at++ = '/') {
        *at = 0;
        mkdir(path, 0777);
    }
    FILE *f = fopen(path, "w");
    CHECK(f && fputs(text, f) >= 0);
    fclose(f);
}

static int cpus(const char *self)
{
    char path[96];
    write_file("self", self);
    snprintf(path, sizeof path, "%s/self", root);
    return lt__cgroup_cpus(root, path);
}

static void begin(void)
{
    strcpy(root, "/tmp/lt_cgroup_XXXXXX");
    CHECK(mkdtemp(root) != NULL);
}

static void end(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK_EQ(system(command), 0);
}

TEST(quotas_of_cgroup_v2)
{
    begin();
    CHECK_EQ(lt__cgroup_cpus(root, "/nowhere"), 0);
    CHECK_EQ(cpus("0::/\n"), 0);
    write_file("cpu.max", "max 100000\n");
    write_file("job/cpu.max", "250000 100000\n");
    write_file("job/step/cpu.max", "max 100000\n");
    write_file("job/small/cpu.max", "50000 100000\n");
    CHECK_EQ(cpus("0::/\n"), 0);
    CHECK_EQ(cpus("0::/job\n"), 3); /* 2.5 */
    CHECK_EQ(cpus("0::/job/step\n"), 3);
    CHECK_EQ(cpus("0::/job/small\n"), 1);
    CHECK_EQ(cpus("0::/of/the/host\n"), 0);
    write_file("cpu.max", "200000 100000\n"); /* that of a container is its root */
    CHECK_EQ(cpus("0::/of/the/host\n"), 2);
    write_file("cpu.max", "nonsense\n");
    CHECK_EQ(cpus("0::/\n"), 0);
    end();
}

TEST(quotas_of_cgroup_v1)
{
    begin();
    write_file("cpu/cpu.cfs_quota_us", "-1\n");
    write_file("cpu/cpu.cfs_period_us", "100000\n");
    write_file("cpu/job/cpu.cfs_quota_us", "400000\n");
    write_file("cpu/job/cpu.cfs_period_us", "100000\n");
    write_file("cpuset/job/cpu.cfs_quota_us", "100000\n");
    write_file("cpuset/job/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(cpus("3:cpuset:/job\n4:cpu,cpuacct:/job/step\n1:name=systemd:/\n"), 4);
    CHECK_EQ(cpus("4:cpuacct,cpu:/job\n"), 4);
    CHECK_EQ(cpus("3:cpuset:/job\n"), 0);
    CHECK_EQ(cpus("4:cpu:/\n0::/\n"), 0);
    end();
}

static void check_threads(const char *text, int want)
{
    setenv("OMP_NUM_THREADS", text, 1);
    CHECK_EQ(lt_omp_threads(), want);
}

TEST(threads_of_openmp)
{
    unsetenv("OMP_NUM_THREADS");
    CHECK_EQ(lt_omp_threads(), 0);
    check_threads("3", 3);
    check_threads("3,2", 3);
    check_threads("99999", 1024);
    static const char *const bad[] = {"", "0", "-2", "x", "3x"};
    for (int i = 0; i < 5; i++)
        check_threads(bad[i], 0);
    check_threads("1", 1);
    lt_ctx *ctx = lt_ctx_new(NULL), *two = lt_ctx_new(&(lt_config){.threads = 2});
    CHECK_EQ(lt_threads(ctx), 1);
    CHECK_EQ(lt_threads(two), lt_thread_limit() < 2 ? lt_thread_limit() : 2);
    lt_ctx_free(ctx);
    lt_ctx_free(two);
}
