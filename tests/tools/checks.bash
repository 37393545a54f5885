# checks.bash - functions for the tests that source it. It changes from the repository, `root`, to a
# temporary folder, which is removed when the test ends.
set -u
root=$PWD build=$PWD/$1 luatrain=$PWD/$1/luatrain
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit
passed=0 failed=0 skipped=0

good() { passed=$((passed + 1)); }

# bad TEXT [FILE]: counts a failure and prints its description, and a file that shows it.
bad() {
    failed=$((failed + 1))
    echo "FAIL: $1"
    [ $# -lt 2 ] || cat "$2"
}

# expect STATUS TEXT COMMAND...: runs the command and checks its exit code, and that its output
# contains TEXT. The output goes to the file output.
expect() {
    local want=$1 text=$2 status=0
    shift 2
    "$@" >output 2>&1 || status=$?
    if [ $status = "$want" ] && [[ $(<output) == *"$text"* ]]; then
        good
    else
        bad "$*: exit $status, not $want, or it does not print: $text" output
    fi
}

# silent STATUS COMMAND...: checks the exit code, and that the command prints nothing.
silent() {
    expect "$1" '' "${@:2}"
    [ ! -s output ] || bad "$*: it prints" output
}

# holds TEXT COMMAND...: checks that the command succeeds. TEXT says what is wrong otherwise.
holds() { if "${@:2}"; then good; else bad "$1: ${*:2}"; fi; }

# equal WHAT GOT WANTED
equal() { if [ "$2" = "$3" ]; then good; else bad "$1: got $2, not $3"; fi; }

# also PATTERN [FILE]: checks that the file, or else `output`, has a line that matches (grep -E).
also() {
    if grep -q -E -e "$1" "${2-output}"; then good; else bad "no line matches: $1" "${2-output}"; fi
}

# lacks PATTERN [FILE]: checks that it has no such line.
lacks() {
    if grep -q -E -e "$1" "${2-output}"; then bad "a line matches: $1" "${2-output}"; else good; fi
}

# of EVENT FIELD FOLDER: prints the values of a field in the log of a run, one per line.
of() { sed -n 's/^{"event":"'"$1"'".*"'"$2"'":\([^,}]*\).*/\1/p' "$3/metrics.jsonl"; }

# Whether a few cases are enough, because the test runs with sanitizers and all cases run without.
# tools/test sets the variable.
few() { [ "${LUATRAIN_TEST_FEW-}" = 1 ]; }

# some CASE...: prints the cases, or only the first if a few are enough.
some() { if few; then echo "$1"; else echo "$@"; fi; }

# Ends the test here if a few cases are enough.
enough() {
    few || return 0
    finish
    exit
}

# emulate BUILD: sets emu to a command prefix for emulated accelerators with the CPU's reference
# kernels.
emulate() {
    emu=(env "LUATRAIN_PLUGINS=$1/tests/cuda" "LUATRAIN_CUDA_LIBS=$1/tests/cuda/libs"
        SHIM_OPS=reference)
}

# dies COMMAND...: runs the command, which a child kills. The file pid has its process id.
dies() { bash -c 'echo $$ >pid; exec "$@"' sh "$@" >output 2>&1; } 2>/dev/null

# Prints luatrain's last line in the file output. mpirun adds its own lines, between lines of dashes
# or after a blank line.
own_last() { grep '^luatrain: ' output | tail -n 1; }

# steps FOLDER: prints the number of steps that a run has taken so far.
steps() { cat "$1/metrics.jsonl" 2>/dev/null | grep -c '"event":"step"'; }

# sha FOLDER: prints the digest of the final weights of a run.
sha() { sed -n 's/.*"weights_sha256":"\([0-9a-f]*\)".*/\1/p' "$1/metrics.jsonl" | tail -n 1; }

# sent FOLDER: prints the bytes that rank 0 has sent in all steps of a run, as in its log.
sent() {
    awk -F '"wire_bytes":' '/"event":"step"/ {n += $2} END {printf "%d\n", n}' "$1/metrics.jsonl"
}

# half FOLDER FOLDER: checks that the first run has sent about half of the bytes of the second. In
# fp16, the tail of the bucket adds 244 bytes per step.
half() {
    local tails=0 part
    [ "$1" != fp16 ] || tails=$((244 * $(steps "$1")))
    part=$((100 * ($(sent "$1") - tails) / ($(sent "$2") + 1)))
    if [ $part -ge 48 ] && [ $part -le 55 ]; then
        good
    else
        bad "$1 has sent $part % of the bytes of $2"
    fi
}

# same FOLDER FOLDER: checks that both runs ended with the same weights.
same() {
    if [ -n "$(sha "$1")" ] && [ "$(sha "$1")" = "$(sha "$2")" ]; then
        good
    else
        bad "$1 and $2 have different weights"
    fi
}

# omit TEXT: says and counts what is skipped.
omit() {
    skipped=$((skipped + 1))
    echo "skipped: $1"
}

# omit_rest TEXT: the same, and ends the test.
omit_rest() {
    omit "$1"
    finish
    exit
}

# Whether MPI is installed. MPI itself leaks.
has_mpi() {
    export ASAN_OPTIONS=detect_leaks=0
    command -v mpirun >/dev/null && [ -e "$build/libluatrain-mpi.so" ]
}
mpirun=(mpirun --allow-run-as-root --oversubscribe --bind-to none)

# Prints the counts. The last command of a test.
finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed = 0 ]
}
