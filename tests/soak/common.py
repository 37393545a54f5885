"""Shared by the programs of this folder: runs luatrain, reads what a run has written, and draws
numbered cases that can be repeated."""
import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE = 120             # seconds in which a run must end
MOST_FAILURES = 20         # after so many, no further case begins
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]

RULES = ["asgd", "sa", "dc-c", "dc-a", "dc-m", "ddc", "gap", "dana", "ormo"] # async=RULE

# Lines that no run may print: of a sanitizer, and of a fault in the Lua code of the library.
CRASHES = re.compile(r"AddressSanitizer|LeakSanitizer|runtime error:|attempt to |bad argument #"
                     r"|stack traceback|Segmentation fault|assertion", re.IGNORECASE)


def read(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def processes(folder):
    """(pid, words, rank) of all processes with the folder in their command. rank is a string."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        words = read(f"/proc/{entry}/cmdline").split(b"\0")
        if any(str(folder).encode() in word for word in words):
            found = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)",
                              read(f"/proc/{entry}/environ"))
            yield int(entry), words, found.group(1).decode() if found else None


def metrics(out):
    """The complete lines of metrics.jsonl. Skips those torn by a kill."""
    lines = []
    for line in read(out / "metrics.jsonl").split(b"\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            pass
    return lines


def events(out, name):
    return [line for line in metrics(out) if line.get("event") == name]


def has_mpi(build):
    return bool(shutil.which("mpirun")) and (Path(build) / "libluatrain-mpi.so").exists()


class Wrong(Exception):
    """A fault that a case has found."""


class Skip(Exception):
    """A case that this machine cannot run."""


class Way:
    """A way to run a script: the number of ranks, luatrain's own options, the flags of the script,
    and what starts the ranks: "threads", "mpirun" or "launch"."""

    def __init__(self, ranks=1, options="", flags="", start="threads"):
        self.ranks, self.start = ranks, start
        self.options, self.flags = options.split(), flags.split()

    def command(self, luatrain, out, script, more=()):
        start = {"threads": [luatrain, *(["--ranks", str(self.ranks)] if self.ranks > 1 else [])],
                 "mpirun": [*MPIRUN, "-np", str(self.ranks), luatrain],
                 "launch": [luatrain, "launch", "-n", str(self.ranks)]}[self.start]
        return [*start, "--threads", "1", "--quiet", "--timeout", "30", *self.options, *more,
                "--out", out, script, *self.flags]

    def __str__(self):
        return " ".join([f"{self.ranks} ranks, {self.start}", *self.options, *self.flags])


class Run:
    """What a run has printed, its exit code as a shell reports it, and its folder."""

    def __init__(self, code, text, out):
        self.code, self.text, self.out = code, text, out

    def message(self):
        """The last message of luatrain, which may have several lines, and what follows it."""
        return self.text[max(self.text.rfind("luatrain: "), 0):]

    def sha(self):
        ends = events(self.out, "end")
        return ends[-1].get("weights_sha256") if ends else None

    def steps(self, *more):
        return [tuple(e.get(key) for key in ("step", "epoch", "samples", "lr", "loss", *more))
                for e in events(self.out, "step")]

    def epochs(self):
        return [tuple(e.get(key) for key in ("step", "epoch", "samples", "loss", "test_loss",
                                             "top1")) for e in events(self.out, "epoch")]

    def printed(self):
        """The lines that the script printed for a comparison."""
        return [line for line in self.text.splitlines() if line.startswith("result ")]


class Case:
    """One numbered case: its random numbers, its folder, and the commands that it has run."""

    def __init__(self, luatrain, mpi, folder, seed, index):
        self.random = random.Random(f"{seed} {index}")
        self.luatrain, self.mpi, self.folder = luatrain, mpi, folder
        self.commands = []

    def start(self, way, out, script="train.lua", more=(), env=None):
        """Starts a run and returns its process."""
        if way.start != "threads" and not self.mpi:
            raise Skip("MPI is not installed")
        command = way.command(self.luatrain, out, script, more)
        self.commands.append(" ".join([*(f"{k}={v}" for k, v in (env or {}).items()), *command]))
        own = {"OMPI_MCA_orte_tmpdir_base": str(self.folder)} # see tools/test
        return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env={**os.environ, **own, **(env or {})}, start_new_session=True)

    def finish(self, process, out):
        """Waits for a run. A crash, a hang and a message from inside the library are wrong."""
        try:
            text = process.communicate(timeout=PATIENCE)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[0].decode(errors="replace")[-2000:]
            raise Wrong(f"it did not end within {PATIENCE} s\n{said}") from None
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if CRASHES.search(text) or code in (128 + signal.SIGSEGV, 128 + signal.SIGABRT,
                                            128 + signal.SIGFPE, 128 + signal.SIGBUS):
            raise Wrong(f"exit {code}, a crash or a line from inside the library:\n{text[-2000:]}")
        return Run(code, text, self.folder / out)

    def run(self, way, out, **more):
        return self.finish(self.start(way, out, **more), out)

    def succeed(self, way, out, **more):
        run = self.run(way, out, **more)
        if run.code != 0:
            raise Wrong(f"{way}: exit {run.code}\n{run.text[-2000:]}")
        return run


def differ(what, a, b):
    """Raises Wrong with the first place in which two lists differ."""
    if a == b:
        return
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            raise Wrong(f"{what} {i + 1} differs: {x} and {y}")
    raise Wrong(f"{len(a)} and {len(b)} of {what}")


def same_trace(live, again):
    """Checks that the replay of an asynchronous run agrees with it."""
    more = ("worker", "ticket", "delay")
    differ("step", live.steps(*more), again.steps(*more))
    differ("epoch", live.epochs(), again.epochs())
    if live.sha() != again.sha():
        raise Wrong(f"the weights differ: {live.sha()}, but replayed {again.sha()}")


def check_case(name, given, root, index, trial):
    """Runs a case. Returns its verdict, for the counts of the last line."""
    folder = root / str(index)
    folder.mkdir()
    case = Case(str(Path(given.build).resolve() / "luatrain"), has_mpi(given.build), folder,
                given.seed, index)
    kept, verdict = given.keep, "passed"
    try:
        trial(case)
    except Skip as reason:
        print(f"skipped: {name} {index} ({reason})", flush=True)
        verdict = "skipped"
    except Wrong as fault:
        ran = "".join(f"\n    cd {folder} && {command}" for command in case.commands)
        print(f"FAIL: tests/soak/{name} {given.build} --seed {given.seed} --case {index}: "
              f"{fault}{ran}", flush=True)
        kept, verdict = True, "failed"
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    return verdict


def main(name, trial, text, prepare=None, cases=None):
    """The main program: runs one case, a number of cases, or cases for some minutes. cases: the
    default number; without it, --minutes decides."""
    parser = argparse.ArgumentParser(prog=f"tests/soak/{name}", description=text,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="the build folder")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--case", type=int, metavar="I", help="run only this case")
    parser.add_argument("--cases", type=int, metavar="N", default=cases,
                        help="run the first N cases")
    parser.add_argument("--minutes", type=float, metavar="M", default=10,
                        help="begin no case after M minutes (10), unless --cases is given")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", LUATRAIN_DEVICE="cpu", ASAN_OPTIONS="detect_leaks=0")
    print(f"seed {given.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    if prepare:
        prepare(given, root)
    if given.case is not None:
        indices = [given.case]
    else:
        indices = range(given.cases if given.cases is not None else 1 << 30)
    until = time.monotonic() + 60 * given.minutes
    counts = dict(passed=0, failed=0, skipped=0)
    for index in indices:
        if counts["failed"] == MOST_FAILURES or given.cases is None and time.monotonic() > until:
            break
        counts[check_case(name, given, root, index, trial)] += 1
    if counts["failed"] or given.keep:
        print(f"the folders of the cases are in {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    sys.exit(counts["failed"] > 0)
