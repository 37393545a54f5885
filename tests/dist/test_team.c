/* test_team.c - the board of a team, where test_group.c and test_cluster.c cannot reach: a process
 * that is killed while it writes to it. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dist/team.h"
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

static bool lives(void *ud, int seat)
{
    (void)ud;
    return seat != 1 || !rank_1_is_dead;
}

/* It comes to a text that cannot be read. */
TEST(one_that_is_killed_while_it_writes_a_failure)
{
    enum { BYTES = 1 << 16 };
    lt_board *board = shared_memory(BYTES, PROT_READ | PROT_WRITE);
    const char *unreadable = shared_memory(1, PROT_NONE);
    char text[64] = "";
    lt_status code = LT_OK;
    int rank = -1, status = 0;
    CHECK(lt__board_bytes(2) <= BYTES);
    lt__board_init(board, 2);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, die);
        lt__team_fail(&(lt_team){.board = board, .rank = 1, .size = 2}, 1, LT_ENUMERIC, unreadable);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    rank_1_is_dead = true;
    lt_team team = {.board = board, .rank = 0, .size = 2, .lives = lives};
    CHECK(!lt__team_failure(&team, &rank, &code, text, sizeof text));
    lt__team_fail(&team, 1, LT_EPEER, "rank 1 is gone");
    CHECK(lt__team_failure(&team, &rank, &code, text, sizeof text));
    CHECK_EQ(rank, 1);
    CHECK_EQ(code, LT_EPEER);
    CHECK_STR(text, "rank 1 is gone");
}
