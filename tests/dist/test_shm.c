/* test_shm.c - the control block of a communicator, where test_group.c and test_mpi_transport.c
 * cannot reach: a process that is killed while it writes to it. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dist/shm.h"
#include "tests/lt_test.h"

static void *shared_memory(size_t bytes, int protection)
{
    return mmap(NULL, bytes, protection, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static void die(int signal)
{
    (void)signal;
    kill(getpid(), SIGKILL);
}

static bool rank_1_is_dead;

static bool lives(void *ud, int slot)
{
    (void)ud;
    return slot != 1 || !rank_1_is_dead;
}

/* The rank is killed because the text cannot be read. */
TEST(a_rank_killed_while_it_writes_a_failure)
{
    enum { BYTES = 1 << 16 };
    lt_shm_control *control = shared_memory(BYTES, PROT_READ | PROT_WRITE);
    const char *unreadable = shared_memory(1, PROT_NONE);
    char text[64] = "";
    lt_status code = LT_OK;
    int rank = -1, status = 0;
    CHECK(lt__shm_control_bytes(2) <= BYTES);
    lt__shm_control_init(control, 2);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, die);
        lt__shm_fail(&(lt_shm){.control = control, .rank = 1, .size = 2}, 1, LT_ENUMERIC,
                     unreadable);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    rank_1_is_dead = true;
    lt_shm shm = {.control = control, .rank = 0, .size = 2, .is_alive = lives};
    CHECK(!lt__shm_failure(&shm, &rank, &code, text, sizeof text));
    lt__shm_fail(&shm, 1, LT_EPEER, "rank 1 was lost");
    CHECK(lt__shm_failure(&shm, &rank, &code, text, sizeof text));
    CHECK_EQ(rank, 1);
    CHECK_EQ(code, LT_EPEER);
    CHECK_STR(text, "rank 1 was lost");
}
