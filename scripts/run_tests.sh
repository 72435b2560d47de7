#!/bin/sh
# All tests but the nightly ones. Those that start processes mostly wait for them, so they run beside the others: two
# lanes, one for each of two cores; the lane that is done first takes of the other's files. COVERAGE=1 also measures the
# branches of the pure parts.
#   scripts/run_tests.sh PYTEST_ARGUMENTS   runs just what these say, in one lane
set -u
cd "$(dirname "$0")/.."
python=.venv/bin/python

if [ $# -gt 0 ]; then
    exec "$python" -m pytest --durations=20 "$@"
fi

# Every process would compile the sources anew otherwise, where nothing may be written beside them.
unset PYTHONDONTWRITEBYTECODE
beside=$(mktemp -d)
export PYTHONPYCACHEPREFIX="$beside/compiled"
trap 'rm -rf "$beside"' EXIT
trap 'kill "$processes" 2>/dev/null; exit 130' INT TERM

# A test file that waits is named in a file of its own, and whoever gets that renamed runs it. The largest come first.
mkdir "$beside/waiting" "$beside/taken"
number=100
# shellcheck disable=SC2012 # names of our own
for file in $(ls -S tests/e2e/test_*.py); do
    number=$((number + 1))
    echo "$file" >"$beside/waiting/$number"
done

take_files() (
    failed=0
    running=
    trap 'kill "$running" 2>/dev/null; exit 130' INT TERM
    while waiting=$(ls "$beside/waiting") && [ -n "$waiting" ]; do
        # Two at a time: each start of pytest takes a second or two.
        files=
        for next in $(echo "$waiting" | head -n 2); do
            if mv "$beside/waiting/$next" "$beside/taken/$next" 2>/dev/null; then
                files="$files $(cat "$beside/taken/$next")"
            fi
        done
        [ -n "$files" ] || continue
        # shellcheck disable=SC2086 # several paths
        "$python" -m pytest --durations=8 -p no:cacheprovider $files &
        running=$!
        wait "$running" || failed=1
    done
    return "$failed"
)

take_files >"$beside/log" 2>&1 &
processes=$!

status=0
pure="tests/unit/format tests/unit/trust tests/unit/protocol"
if [ "${COVERAGE:-}" = 1 ]; then
    make --no-print-directory coverage || status=$?
else
    # shellcheck disable=SC2086 # three paths
    "$python" -m pytest -q -p no:cacheprovider $pure || status=$?
fi
"$python" -m pytest --durations=20 -p no:cacheprovider tests --ignore=tests/e2e \
    --ignore=tests/unit/format --ignore=tests/unit/trust --ignore=tests/unit/protocol || status=$?
take_files || status=$?

echo 'The lane with the tests that start processes:'
wait "$processes" || status=$?
cat "$beside/log"
exit "$status"
