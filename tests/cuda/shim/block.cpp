/* block.cpp - runs the threads of blocks on the CPU, as fibers.
 *
 * A fiber runs one thread after the other as long as they run to completion. A thread that must
 * wait keeps its fiber, and the next thread runs in another one. So a kernel without barriers needs
 * no context switches.
 */
#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <numeric>
#include <utility>

#include "shim.h"
#include "tests/cuda/shim.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

enum { STACK = 64 << 10, MAX_THREADS = 1024, WARP = 32 };
enum state { NEW, READY, AT_BARRIER, AT_EXCHANGE, DONE };

struct position {       /* where a fiber resumes */
    ucontext_t context; /* the first time */
    jmp_buf jump;       /* after that */
    bool has_run;
};

struct fiber {
    position here;
    bool idle;
};

struct thread {
    state is;
    fiber *in;
    const char *file; /* position of the barrier or exchange that it waits at */
    int line;
    unsigned mask; /* participants of its exchange */
    uint64_t value, all[WARP];
};

int order;
fiber fibers[MAX_THREADS];
int n_fibers;
position scheduler;
thread threads[MAX_THREADS];
int sequence[MAX_THREADS]; /* the order in which threads run */
int n_threads, started, current;
bool poisoned; /* shared memory is poisoned, and no thread of the grid has waited since */
const std::function<void()> *body;
thread_local char some_shared[8] = {0}; /* so that this module has a thread-local segment */

/* ==== Shared memory =========================================================================== */

struct range {
    char *start;
    size_t bytes;
};

int find_range(dl_phdr_info *info, size_t, void *to)
{
    range *r = (range *)to;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        char *start = (char *)info->dlpi_tls_data;
        size_t bytes = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_TLS && start && some_shared >= start &&
            some_shared < start + bytes)
            *r = range{start, bytes};
    }
    return r->start != NULL;
}

/* Fills all __shared__ variables with NaNs. They must be the only thread-local variables of this
 * module, because it overwrites all of them. */
void poison_shared()
{
    static thread_local int unused; /* keeps the segment from being optimized away */
    range r = {NULL, 0};
    some_shared[0] = (char)unused;
    dl_iterate_phdr(find_range, &r);
    memset(r.start, 0xff, r.bytes);
}

/* ==== Fibers ================================================================================== */

/* swapcontext() makes a system call for the signal mask each time, so we use it only for
 * sanitizers, which do not support switches by _longjmp(). */
__attribute__((noinline)) void switch_to(position *from, position *to)
{
#if defined __SANITIZE_ADDRESS__ || defined SHIM_SWAPS_CONTEXTS
    swapcontext(&from->context, &to->context);
#else
    from->has_run = true;
    if (_setjmp(from->jump) != 0)
        return;
    if (to->has_run)
        _longjmp(to->jump, 1);
    setcontext(&to->context);
#endif
}

void run_threads()
{
    for (;;) {
        fiber *self = threads[current].in;
        (*body)();
        threads[current].is = DONE;
        if (started < n_threads) {
            current = sequence[started++];
            threads[current].in = self;
            threadIdx.x = (unsigned)current;
        } else {
            self->idle = true;
            switch_to(&self->here, &scheduler);
        }
    }
}

void make_fiber(fiber *f)
{
    ucontext_t *c = &f->here.context;
    void *stack = c->uc_stack.ss_sp;
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = STACK;
    c->uc_link = NULL;
    makecontext(c, run_threads, 0);
    f->here.has_run = false;
    f->idle = true;
}

fiber *idle_fiber()
{
    for (int i = 0; i < n_fibers; i++)
        if (fibers[i].idle)
            return &fibers[i];
    fiber *f = &fibers[n_fibers++];
    f->here.context.uc_stack.ss_sp = mmap(NULL, STACK, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    make_fiber(f);
    return f;
}

void resume(int t, fiber *f)
{
    current = t;
    threadIdx.x = (unsigned)t;
    threads[t].in = f;
    f->idle = false;
    switch_to(&scheduler, &f->here);
}

/* Suspends the current thread until the scheduler finds it ready. */
void wait(state is, const char *file, int line)
{
    thread *t = &threads[current];
    poisoned = false;
    t->is = is;
    t->file = file;
    t->line = line;
    switch_to(&t->in->here, &scheduler);
}

/* ==== Barriers and exchanges ================================================================== */

bool release_barrier()
{
    const thread *first = &threads[0];
    for (int t = 0; t < n_threads; t++) {
        if (threads[t].is != AT_BARRIER)
            return false;
        if (threads[t].line != first->line || strcmp(threads[t].file, first->file) != 0)
            shim_fault("thread 0 waits at the barrier of %s:%d, thread %d at the one of %s:%d",
                       first->file, first->line, t, threads[t].file, threads[t].line);
    }
    for (int t = 0; t < n_threads; t++)
        threads[t].is = READY;
    return true;
}

/* Whether all lanes that thread t waits for have arrived at the same exchange. */
bool is_complete(int t)
{
    int warp = t / WARP * WARP;
    for (int k = 0; k < WARP; k++) {
        if (!(threads[t].mask >> k & 1))
            continue;
        const thread *other = &threads[warp + k];
        if (warp + k >= n_threads || other->is != AT_EXCHANGE || other->mask != threads[t].mask ||
            other->line != threads[t].line || strcmp(other->file, threads[t].file) != 0)
            return false;
    }
    return true;
}

void exchange(int t)
{
    int warp = t / WARP * WARP;
    unsigned mask = threads[t].mask;
    for (int k = 0; k < WARP; k++) {
        if (!(mask >> k & 1))
            continue;
        threads[warp + k].is = READY;
        for (int j = 0; j < WARP; j++)
            threads[warp + k].all[j] = mask >> j & 1 ? threads[warp + j].value : ~0ull;
    }
}

/* Makes those threads ready whose exchange or barrier is complete. False if there are none. */
bool release()
{
    bool any = false;
    for (int t = 0; t < n_threads; t++)
        if (threads[t].is == AT_EXCHANGE && is_complete(t)) {
            exchange(t);
            any = true;
        }
    return any || release_barrier();
}

void report_stuck()
{
    int stuck = 0, done = 0;
    for (int t = 0; t < n_threads; t++) {
        done += threads[t].is == DONE;
        if (threads[t].is != DONE)
            stuck = t;
    }
    shim_fault("block %u: thread %d waits forever at %s:%d; %d of %d threads have exited",
               blockIdx.x, stuck, threads[stuck].file, threads[stuck].line, done, n_threads);
}

/* ==== Blocks ================================================================================== */

uint32_t mixed(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352d;
    return (x ^ x >> 15) * 0x846ca68b >> 1;
}

void make_sequence()
{
    for (int i = 0; i < n_threads; i++)
        sequence[i] = order == 1 ? n_threads - 1 - i : i;
    for (int i = n_threads - 1; i > 0 && order > 1; i--)
        std::swap(sequence[i], sequence[mixed((uint32_t)(order * 4096 + i)) % (i + 1)]);
}

bool run_ready()
{
    bool any = false;
    for (int i = 0; i < n_threads; i++)
        if (threads[sequence[i]].is == READY) {
            resume(sequence[i], threads[sequence[i]].in);
            any = true;
        }
    return any;
}

void run_block()
{
    if (!poisoned)
        poison_shared();
    poisoned = true;
    for (int t = 0; t < n_threads; t++)
        threads[t].is = NEW;
    for (started = 0;;) {
        if (started < n_threads) {
            int t = sequence[started++];
            resume(t, idle_fiber());
        } else if (!run_ready() && !release()) {
            break;
        }
    }
    for (int t = 0; t < n_threads; t++)
        if (threads[t].is != DONE) {
            report_stuck();
            break;
        }
    for (int t = 0; t < n_threads; t++)
        if (threads[t].is != DONE)
            make_fiber(threads[t].in); /* abandons its thread */
}

} // namespace

void shim_barrier(const char *file, int line) { wait(AT_BARRIER, file, line); }

const uint64_t *shim_exchange(unsigned mask, uint64_t value, const char *file, int line)
{
    thread *t = &threads[current];
    if (!(mask >> current % WARP & 1))
        shim_fault("%s:%d: the mask %#x of thread %d does not include its own lane", file, line,
                   mask, current);
    t->mask = mask;
    t->value = value;
    wait(AT_EXCHANGE, file, line);
    return t->all;
}

extern "C" void shim_set_order(int to) { order = to; }

/* The i-th of n blocks to run. */
static unsigned block_at(unsigned i, unsigned n)
{
    unsigned stride = mixed((uint32_t)order) % n + 1;
    while (std::gcd(stride, n) > 1)
        stride++;
    return order == 0   ? i
           : order == 1 ? n - 1 - i
                        : (unsigned)(((uint64_t)i * stride + mixed((uint32_t)order)) % n);
}

void shim_run_grid(dim3 grid, dim3 block, const std::function<void()> &thread_body)
{
    body = &thread_body;
    n_threads = (int)block.x;
    gridDim = grid;
    blockDim = block;
    threadIdx = blockIdx = uint3{0, 0, 0};
    make_sequence();
    poisoned = false;
    for (unsigned i = 0; i < grid.x; i++) {
        blockIdx.x = block_at(i, grid.x);
        run_block();
    }
}
