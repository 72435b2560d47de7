#!/bin/sh
# All tests but the nightly ones. Those that start processes mostly wait for them, so they run beside the others: two
# lanes, one for each of two cores. COVERAGE=1 also measures the branches of the pure parts.
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

"$python" -m pytest --durations=20 -p no:cacheprovider tests/e2e >"$beside/log" 2>&1 &
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

echo 'The lane with the tests that start processes:'
wait "$processes" || status=$?
cat "$beside/log"
exit "$status"
