/* options.c - reads the command line; see options.h. */
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <lua.h>

#include "tools/options.h"

extern char **environ;

/* Parses and stores an option's value. who is its source, "--seed" or "LUATRAIN_SEED". */
typedef lt_status (*setter)(settings *s, const char *who, const char *value);

static lt_status set_device(settings *s, const char *who, const char *value)
{
    (void)who; /* lt_open() checks the value */
    s->config.device = value;
    return LT_OK;
}

static lt_status parse_number(const char *who, const char *value, uint64_t low, uint64_t high,
                              uint64_t *number)
{
    char *end;
    errno = 0;
    *number = strtoull(value, &end, 10);
    if (value[0] < '0' || value[0] > '9' || *end || errno || *number < low || *number > high)
        return lt_fail(LT_EUSAGE, "%s must be an integer from %llu to %llu, but is '%s'", who,
                       (unsigned long long)low, (unsigned long long)high, value);
    return LT_OK;
}

lt_status parse_int(const char *who, const char *value, int max, int *number)
{
    uint64_t n;
    LT_TRY(parse_number(who, value, 1, (uint64_t)max, &n));
    *number = (int)n;
    return LT_OK;
}

static lt_status set_threads(settings *s, const char *who, const char *value)
{
    return parse_int(who, value, 1024, &s->config.threads);
}

static lt_status set_ranks(settings *s, const char *who, const char *value)
{
    return parse_int(who, value, 256, &s->ranks);
}

static lt_status set_vranks(settings *s, const char *who, const char *value)
{
    return parse_int(who, value, 256, &s->reducer.vranks);
}

static lt_status set_timeout(settings *s, const char *who, const char *value)
{
    uint64_t seconds;
    LT_TRY(parse_number(who, value, 1, 1000000, &seconds));
    s->group.timeout = (double)seconds;
    return LT_OK;
}

static lt_status set_wire(settings *s, const char *who, const char *value)
{
    static const struct {
        const char *name;
        lt_dtype dtype;
    } wires[] = {{"fp32", LT_F32}, {"fp16", LT_F16}, {"bf16", LT_BF16}};
    for (size_t i = 0; i < sizeof wires / sizeof *wires; i++)
        if (strcmp(value, wires[i].name) == 0) {
            s->reducer.wire = wires[i].dtype;
            return LT_OK;
        }
    return lt_fail(LT_EUSAGE, "%s must be fp32, fp16 or bf16, but is '%s'", who, value);
}

static lt_status set_sums(settings *s, const char *who, const char *value)
{
    static const char *const names[] = {[LT_SUM_BACKEND_AUTO] = "auto",
                                        [LT_SUM_BACKEND_HOST] = "host",
                                        [LT_SUM_BACKEND_NCCL] = "nccl"};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(value, names[i]) == 0) {
            s->reducer.sum_backend = (lt_sum_backend)i;
            return LT_OK;
        }
    return lt_fail(LT_EUSAGE, "%s must be auto, host or nccl, but is '%s'", who, value);
}

static lt_status set_seed(settings *s, const char *who, const char *value)
{
    return parse_number(who, value, 0, INT64_MAX, &s->config.seed); /* Lua's integers are signed */
}

static lt_status set_path(settings *s, const char *who, const char *value)
{
    (void)s;
    return *value ? LT_OK : lt_fail(LT_EUSAGE, "%s must be a path, but is ''", who);
}

static lt_status set_trace(settings *s, const char *who, const char *value)
{
    s->trace = value;
    return set_path(s, who, value);
}

static lt_status set_parallel(settings *s, const char *who, const char *value)
{
    s->parallel = strncmp(value, "pipe=", 5) == 0     ? IN_PIPELINE
                  : strncmp(value, "async=", 6) == 0  ? ASYNCHRONOUS
                  : strcmp(value, "sync-server") == 0 ? SYNC_SERVER
                                                      : UNKNOWN_MODE;
    s->reducer.server = s->parallel == SYNC_SERVER;
    return *value ? LT_OK
                  : lt_fail(LT_EUSAGE,
                            "%s must begin with async=RULE or pipe=P, or be sync-server, but is ''",
                            who);
}

static lt_status check_address(const char *who, const char *value)
{
    return *value ? LT_OK : lt_fail(LT_EUSAGE, "%s must be HOST:PORT, but is ''", who);
}

static lt_status set_serve(settings *s, const char *who, const char *value)
{
    s->serve = value;
    return check_address(who, value);
}

static lt_status set_join(settings *s, const char *who, const char *value)
{
    s->join = value;
    return check_address(who, value);
}

static lt_status set_key(settings *s, const char *who, const char *value)
{
    s->key = value;
    return set_path(s, who, value);
}

static lt_status set_simulate(settings *s, const char *who, const char *value)
{
    s->simulates = true;
    return *value ? LT_OK
                  : lt_fail(LT_EUSAGE, "%s must be workers=N,... or trace:FILE, but is ''", who);
}

/* Checks the form. The number of ranks is not known yet. */
static lt_status set_share(settings *s, const char *who, const char *value)
{
    const char *at = value;
    int number;
    s->has_share = true;
    if (strcmp(value, "auto") == 0)
        return LT_OK;
    for (;; at++) {
        char digits[8] = "";
        size_t length = strcspn(at, ",");
        if (length < sizeof digits)
            memcpy(digits, at, length);
        if (parse_int(who, digits, 1000000, &number) != LT_OK)
            return lt_fail(LT_EUSAGE,
                           "%s must be auto or a list of integers from 1 to 1000000, one for each "
                           "rank, but is '%s'",
                           who, value);
        at += length;
        if (*at == '\0')
            return LT_OK;
    }
}

static lt_status set_count(settings *s, const char *who, const char *value)
{
    uint64_t n;
    (void)s;
    return parse_number(who, value, 1, INT64_MAX, &n);
}

static lt_status set_amp(settings *s, const char *who, const char *value)
{
    s->amp = strcmp(value, "bf16") == 0 ? LT_BF16 : strcmp(value, "fp16") == 0 ? LT_F16 : LT_F32;
    if (s->amp != LT_F32 || strcmp(value, "off") == 0 || strcmp(value, "auto") == 0)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "%s must be off, bf16, fp16 or auto, but is '%s'", who, value);
}

static lt_status set_log(settings *s, const char *who, const char *value)
{
    (void)s;
    if (strcmp(value, "text") == 0 || strcmp(value, "json") == 0)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "%s must be text or json, but is '%s'", who, value);
}

/* Parses a switch, which has no value on the command line and is 1 or 0 as a variable. */
static lt_status parse_switch(const char *who, const char *value, bool *on)
{
    *on = strcmp(value, "1") == 0;
    if (!*on && strcmp(value, "0") != 0)
        return lt_fail(LT_EUSAGE, "%s must be 1 or 0, but is '%s'", who, value);
    return LT_OK;
}

static lt_status set_deterministic(settings *s, const char *who, const char *value)
{
    return parse_switch(who, value, &s->config.deterministic);
}

static lt_status set_tf32(settings *s, const char *who, const char *value)
{
    return parse_switch(who, value, &s->config.tf32);
}

static lt_status set_level(settings *s, const char *who, const char *value, lt_log_level level)
{
    bool on;
    LT_TRY(parse_switch(who, value, &on));
    s->level = on ? level : s->level;
    return LT_OK;
}

static lt_status set_quiet(settings *s, const char *who, const char *value)
{
    return set_level(s, who, value, LT_LOG_WARN);
}

static lt_status set_verbose(settings *s, const char *who, const char *value)
{
    return set_level(s, who, value, LT_LOG_DEBUG);
}

/* Whether an option may differ between ranks. */
enum { ANY, SAME };

/* The only list of luatrain's options. */
static const struct option {
    const char *name, *value; /* value: its placeholder in the help; NULL for a switch */
    const char *help;
    setter set;   /* NULL for --help and --version */
    int on_ranks; /* ANY or SAME */
} options[] = {
    {"device", "auto|cpu|cuda[:I]", "device to compute on (auto: CUDA if available)", set_device,
     ANY},
    {"threads", "N",
     "CPU threads of each rank (OMP_NUM_THREADS, or the CPUs divided among the ranks)", set_threads,
     ANY},
    {"ranks", "N", "ranks in this process; each trains on its part of every batch (1)", set_ranks,
     ANY},
    {"seed", "S", "seed of all random numbers (0)", set_seed, SAME},
    {"amp", "off|bf16|fp16|auto",
     "mixed precision (the script's setting, or off); auto: bf16 if it is faster", set_amp, SAME},
    {"amp-check", "N", "every N steps, compare each layer in half precision with f32", set_count,
     SAME},
    {"out", "DIR", "folder of the run (a new one, runs/SCRIPT-N)", set_path, ANY},
    {"resume", "auto|PATH|never", "auto: resume the run in DIR (auto if --out is given)", set_path,
     ANY},
    {"save-every", "N",
     "save a checkpoint every N steps, in addition to each epoch and every 10 minutes", set_count,
     SAME},
    {"max-steps", "N", "stop after step N of the run and save", set_count, SAME},
    {"wire", "fp32|fp16|bf16", "dtype of gradients sent between ranks (fp32)", set_wire, SAME},
    {"sums", "auto|host|nccl",
     "where to sum gradients of GPUs: on the CPU or by NCCL (auto: NCCL between processes, if "
     "possible)",
     set_sums, SAME},
    {"tf32", NULL,
     "let a GPU round the inputs of f32 products to 10 mantissa bits, for its tensor cores",
     set_tf32, SAME},
    {"deterministic", NULL, "make results bit-identical for any --ranks; see --vranks",
     set_deterministic, SAME},
    {"vranks", "V",
     "shards of each batch in a deterministic run, divided among the ranks (--ranks)", set_vranks,
     SAME},
    {"share", "auto|N,N,...",
     "parts of each batch that the ranks get in turn (equal); auto: by their measured speed",
     set_share, SAME},
    {"parallel", "MODE",
     "async=RULE: train asynchronously, and apply gradients by this rule; pipe=P|auto: divide the "
     "net into pipeline stages; sync-server: let rank 0 sum all gradients",
     set_parallel, SAME},
    {"simulate", "workers=N,...",
     "compute for N workers of async=RULE or sync-server in one process", set_simulate, SAME},
    {"serve", "[HOST:]PORT", "let workers join this asynchronous job at this address", set_serve,
     ANY},
    {"join", "HOST:PORT", "join an asynchronous job as a worker, with the options of its server",
     set_join, ANY},
    {"key", "FILE", "the job's key, which workers need to join (join.key in the run's folder)",
     set_key, ANY},
    {"timeout", "S", "seconds to wait for a rank that does not respond (120)", set_timeout, ANY},
    {"check-sync", "N", "compare gradients and weights across ranks every N steps", set_count,
     SAME},
    {"trace", "FILE", "write a timeline of all ranks to FILE, for ui.perfetto.dev", set_trace, ANY},
    {"log", "text|json", "json: print the lines of metrics.jsonl instead of text", set_log, ANY},
    {"quiet", NULL, "show only warnings and errors", set_quiet, ANY},
    {"verbose", NULL, "show more messages, and tracebacks of script errors", set_verbose, ANY},
    {"help", NULL, "print this help; after a script: the script's own options", NULL, ANY},
    {"version", NULL, "print versions, the device and its libraries", NULL, ANY},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

void print_help(FILE *to)
{
    fprintf(to, "usage: luatrain [options] script.lua [script options]\n"
                "       luatrain [options] summary script.lua [script options]\n"
                "       luatrain [options] plan [plan options] script.lua [script options]\n"
                "       luatrain [options] bench [bench options] script.lua [script options]\n"
                "       luatrain bench dispatch\n"
                "       luatrain report [report options] FOLDER...\n"
                "       luatrain [options] launch -n N [-H HOST,HOST:SLOTS,...] "
                "[--hostfile FILE] [--restarts N]\n"
                "                [options] script.lua ...\n\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        int n = fprintf(to, "  --%s %s", o->name, o->value ? o->value : "");
        fprintf(to, "%*s%s\n", 30 - n, "", o->help);
    }
    fprintf(
        to,
        "\nEach option except help and version has an environment variable: LUATRAIN_SEED=7 is\n"
        "--seed 7. Defaults are in parentheses.\n"
        "LUATRAIN_PLUGINS=FOLDER: folder to search first for plugins (MPI, ZeroMQ, CUDA).\n"
        "A script that does not exist is searched for among the models of luatrain.\n"
        "A script named - is read from stdin.\n"
        "launch starts N processes with mpirun, each a rank, here or on other hosts. With\n"
        "--restarts N, it starts them again from the newest checkpoint, at most N times, if a\n"
        "rank is lost or hangs, or memory runs out. With --serve, it starts a server and N - 1\n"
        "workers here, without mpirun, and --restarts R starts lost workers again.\n");
}

lt_status print_version(const settings *s)
{
    char backend[96], libraries[4096];
    int threads = s->config.threads ? s->config.threads : lt_cpu_count();
    if (threads > lt_thread_limit())
        threads = lt_thread_limit();
    printf("luatrain %s\n%s\n%s\n%d thread%s\n", LT_VERSION,
           lt_backend(NULL, backend, sizeof backend), LUA_RELEASE, threads,
           threads == 1 ? "" : "s");
    if (strcmp(s->config.device, "cpu") != 0)
        fputs(lt_libraries(libraries, sizeof libraries), stdout);
    lt_ctx *ctx = lt_open(&s->config);
    if (!ctx)
        return lt_errcode();
    if (strcmp(lt_device_name(ctx), "cpu") != 0)
        printf("%s: %s\n", lt_device_name(ctx), lt_backend(ctx, backend, sizeof backend));
    lt_ctx_free(ctx);
    return LT_OK;
}

/* Returns the option whose name is most similar to word, or NULL if none is similar. */
static const struct option *nearest_option(const char *word)
{
    const char *names[N_OPTIONS];
    for (int i = 0; i < N_OPTIONS; i++)
        names[i] = options[i].name;
    int nearest = lt_nearest(word, names, N_OPTIONS);
    return nearest < 0 ? NULL : &options[nearest];
}

static const char *const launch_flags[][2] = {{"-n", "-n N"},
                                              {"-H", "-H a,b:2"},
                                              {"--hostfile", "--hostfile FILE"},
                                              {"--restarts", "--restarts N"}};
enum { N_LAUNCH_FLAGS = sizeof launch_flags / sizeof *launch_flags };

/* The index of a flag of launch, or -1. --hostfile=FILE is one too. */
static int find_launch_flag(const char *word)
{
    for (int i = 0; i < N_LAUNCH_FLAGS; i++) {
        size_t n = strlen(launch_flags[i][0]);
        if (strncmp(word, launch_flags[i][0], n) == 0 &&
            (word[n] == 0 || (word[n] == '=' && word[1] == '-')))
            return i;
    }
    return -1;
}

static lt_status unknown_option(const char *arg)
{
    int launch_flag = find_launch_flag(arg);
    if (launch_flag >= 0)
        return lt_fail(LT_EUSAGE,
                       "unknown option '%s'; it is one of launch: luatrain launch %s%s script.lua",
                       arg, launch_flag > 0 ? "-n 4 " : "", launch_flags[launch_flag][1]);
    char word[32];
    const char *start = arg + strspn(arg, "-");
    snprintf(word, sizeof word, "%.*s", (int)strcspn(start, "="), start);
    const struct option *near = nearest_option(word);
    static const char other[] = "; the script's own options go after it";
    if (!near)
        return lt_fail(LT_EUSAGE, "unknown option '%s' (luatrain --help lists them)%s", arg, other);
    return lt_fail(LT_EUSAGE, "unknown option '%s' (did you mean '--%s'?)%s", arg, near->name,
                   other);
}

/* Returns the option that arg names, as in "--seed" or "--seed=7"; NULL if there is none. */
static const struct option *find_option(const char *arg)
{
    if (strncmp(arg, "--", 2) != 0)
        return NULL;
    size_t length = strcspn(arg + 2, "=");
    for (int i = 0; i < N_OPTIONS; i++)
        if (strlen(options[i].name) == length && memcmp(options[i].name, arg + 2, length) == 0)
            return &options[i];
    return NULL;
}

/* Writes the variable's name, such as "LUATRAIN_SAVE_EVERY" for "save-every". */
static const char *variable_of(const struct option *o, char name[32])
{
    snprintf(name, 32, "LUATRAIN_%s", o->name);
    for (char *p = name; *p; p++)
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    return name;
}

const char *option_name(int i) { return i < N_OPTIONS ? options[i].name : NULL; }

/* Every value that was given is in the option's variable; see set_option(). */
lt_status compare_options(lt_group *group)
{
    char text[N_OPTIONS * 64] = "", *at = text;
    for (int i = 0; i < N_OPTIONS; i++) {
        char name[32];
        const char *value = options[i].on_ranks == SAME ? getenv(variable_of(&options[i], name))
                                                        : NULL;
        if (value && *value)
            at += snprintf(at, 64, "--%s %.32s\n", options[i].name, value);
    }
    return lt_group_compare(group, "the options of luatrain", text);
}

/* Takes over a line "NAME VALUE" of the server's options. */
static lt_status take_option(settings *s, const char *line)
{
    char name[32], own[32];
    size_t n = strcspn(line, " ");
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (o->on_ranks != SAME || strlen(o->name) != n || memcmp(o->name, line, n) != 0)
            continue;
        const char *value = getenv(variable_of(o, name)), *first = line[n] ? line + n + 1 : "";
        if (value && *value && strcmp(value, first) != 0)
            return lt_fail(LT_EUSAGE,
                           *first ? "--%s is %s, but on the server it is %s; leave it out to join"
                                  : "--%s is %s, but the server runs without it; leave it out to "
                                    "join",
                           o->name, value, first);
        snprintf(own, sizeof own, "--%s", o->name);
        if (*first && setenv(name, first, 1) != 0)
            return lt_fail(LT_ENOMEM, "out of memory for the environment");
        return *first ? o->set(s, own, getenv(name)) : LT_OK;
    }
    return lt_fail(LT_EUSAGE, "the server has the option --%.*s, which this luatrain lacks", (int)n,
                   line);
}

lt_status share_options(settings *s, lt_group *group)
{
    enum { LINE = 512 };
    static const char what[] = "the options of luatrain";
    char text[N_OPTIONS * LINE] = "", *at = text;
    for (int i = 0; i < N_OPTIONS; i++) {
        char name[32];
        const char *value = getenv(variable_of(&options[i], name));
        if (options[i].on_ranks != SAME)
            continue;
        snprintf(at, LINE, "%s %s\n", options[i].name, value ? value : "");
        at += strlen(at);
    }
    LT_TRY(lt_group_broadcast(group, what, text, sizeof text, 0));
    text[sizeof text - 1] = '\0';
    if (lt_group_rank(group) == 0)
        return LT_OK;
    for (char *line = strtok_r(text, "\n", &at); line; line = strtok_r(NULL, "\n", &at))
        LT_TRY(take_option(s, line));
    return LT_OK;
}

static lt_status read_variables(settings *s)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        char name[32];
        const char *value = getenv(variable_of(&options[i], name));
        if (options[i].set && value && *value)
            LT_TRY(options[i].set(s, name, value));
    }
    return LT_OK;
}

/* Warns about variables with names similar to luatrain's, which are probably misspelled. */
static void warn_of_variables(void)
{
    static const char prefix[] = "LUATRAIN_";
    for (char **entry = environ; *entry; entry++) {
        char word[32] = "", name[32];
        if (strncmp(*entry, prefix, sizeof prefix - 1) != 0)
            continue;
        const char *rest = *entry + sizeof prefix - 1;
        for (size_t i = 0; i < sizeof word - 1 && rest[i] && rest[i] != '='; i++)
            word[i] = rest[i] == '_' ? '-' : (char)tolower((unsigned char)rest[i]);
        const struct option *near = nearest_option(word);
        if (!near || !near->set || strcmp(near->name, word) == 0)
            continue;
        fprintf(stderr, "luatrain: warning: unknown environment variable %.*s (did you mean %s?)\n",
                (int)strcspn(*entry, "="), *entry, variable_of(near, name));
    }
}

static lt_status set_option(settings *s, const struct option *o, const char *value)
{
    char name[32];
    snprintf(name, sizeof name, "--%s", o->name);
    if (!value)
        return lt_fail(LT_EUSAGE, "%s requires a value: %s %s", name, name, o->value);
    LT_TRY(o->set(s, name, value));
    if (setenv(variable_of(o, name), value, 1) != 0)
        return lt_fail(LT_ENOMEM, "out of memory for the environment");
    return LT_OK;
}

/* Reads the option at *at and its value, and advances *at past them. */
static lt_status read_flag(settings *s, char ***at)
{
    const char *arg = *(*at)++, *equals = strchr(arg, '=');
    const struct option *o = find_option(arg);
    if (!o)
        return unknown_option(arg);
    if (!o->value && equals)
        return lt_fail(LT_EUSAGE, "--%s takes no value", o->name);
    if (o->set)
        return set_option(s, o, !o->value ? "1" : equals ? equals + 1 : *(*at)++);
    s->text = s->text ? s->text : o->name;
    return LT_OK;
}

/* Removes the first n words of a NULL-terminated list. */
static void take_out(char **words, int n)
{
    do
        words[0] = words[n];
    while (*words++);
}

/* Reads a flag of launch, and removes it and its value. */
static lt_status read_launch_flag(settings *s, int flag, char **words)
{
    const char *equals = strchr(words[0], '='), *value = equals ? equals + 1 : words[1];
    if (!value || !*value)
        return lt_fail(LT_EUSAGE, "%s requires a value: %s", launch_flags[flag][0],
                       launch_flags[flag][1]);
    switch (flag) {
    case 0: LT_TRY(parse_int("-n", value, 65536, &s->processes)); break;
    case 1: s->hosts = value; break;
    case 2: s->host_file = value; break;
    default: LT_TRY(parse_int("--restarts", value, 65536, &s->restarts));
    }
    take_out(words, equals ? 1 : 2);
    return LT_OK;
}

/* Reads options up to the first word that is not an option. */
static lt_status read_flags(settings *s, char ***at)
{
    while (**at && ***at == '-' && (**at)[1] != '\0') { /* "-" is a script: stdin */
        const char *arg = **at;
        int own = s->launches ? find_launch_flag(arg) : -1;
        if (s->launches && strcmp(arg, "--") == 0) {
            take_out(*at, 1);
            return LT_OK;
        }
        LT_TRY(own >= 0 ? read_launch_flag(s, own, *at) : read_flag(s, at));
    }
    return LT_OK;
}

lt_status read_options(settings *s, char **argv)
{
    char **at = argv + 1;
    LT_TRY(read_variables(s));
    warn_of_variables();
    LT_TRY(read_flags(s, &at));
    if (*at && strcmp(*at, "launch") == 0) {
        s->launches = true;
        take_out(at, 1);
        LT_TRY(read_flags(s, &at));
    }
    if (s->config.threads == 0 && !s->config.deterministic)
        s->config.threads = lt_omp_threads();
    s->n_options = (int)(at - argv);
    for (s->argv = at; *at; at++)
        s->argc++;
    return LT_OK;
}
