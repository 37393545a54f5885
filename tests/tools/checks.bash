# checks.bash - what tests of ranks have in common; they source it. Goes to a folder of its own,
# which goes when the test ends.

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit
passed=0 failed=0 skipped=0

good() { passed=$((passed + 1)); }

# bad TEXT [FILE]: what is wrong, and a file that shows it.
bad() {
    failed=$((failed + 1))
    echo "FAIL: $1"
    [ $# -lt 2 ] || cat "$2"
}

# expect STATUS TEXT COMMAND...: the exit code, and a text in what the command prints, which is then
# in the file output.
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

# The last line that is ours of what a command has printed into the file output: mpirun has more to
# say, between lines of dashes or after a blank line.
own_last() { grep '^luatrain: ' output | tail -n 1; }

# steps FOLDER: how many a run has taken so far.
steps() { cat "$1/metrics.jsonl" 2>/dev/null | grep -c '"event":"step"'; }

# sha FOLDER: of the weights that a run has ended with.
sha() { sed -n 's/.*"weights_sha256":"\([0-9a-f]*\)".*/\1/p' "$1/metrics.jsonl" | tail -n 1; }

# sent FOLDER: the bytes that rank 0 says it has sent in all steps of a run.
sent() {
    awk -F '"wire_bytes":' '/"event":"step"/ {n += $2} END {printf "%d\n", n}' "$1/metrics.jsonl"
}

# half FOLDER FOLDER: the first has sent half of the bytes that the second has, or nearly; in fp16
# what was found in its bucket, too, which is 244 bytes a step.
half() {
    local found=0 part
    [ "$1" != fp16 ] || found=$((244 * $(steps "$1")))
    part=$((100 * ($(sent "$1") - found) / ($(sent "$2") + 1)))
    if [ $part -ge 48 ] && [ $part -le 55 ]; then
        good
    else
        bad "$1 has sent $part % of the bytes of $2"
    fi
}

# same FOLDER FOLDER: they ended with the same weights.
same() {
    if [ -n "$(sha "$1")" ] && [ "$(sha "$1")" = "$(sha "$2")" ]; then
        good
    else
        bad "$1 and $2 have other weights"
    fi
}

# The last command of a test.
finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed = 0 ]
}
