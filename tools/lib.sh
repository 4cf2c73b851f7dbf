# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the tools share: a Python, a virtual environment that is brought up to date only when its
# inputs changed, and steps that say what they do and how long it took. Source it; it needs bash,
# python3 and pip alone. Functions return non-zero after they have said what is wrong.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }

complain() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# find_python: set PYTHON to a Python of 3.11 or later.
find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            return 0
        fi
    done
    complain "Python 3.11 or later is needed; found $("${PYTHON:-python3}" --version 2>&1 || true)." \
        "Install one, or name it: PYTHON=/path/to/python3.12 $0"
    return 1
}

# step TEXT COMMAND...: run a program quietly; show its time, and its output if it fails.
# It gets a process group of its own, so that Ctrl-C here ends it and all that it started.
step() {
    local text=$1 log begin=$SECONDS pid
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/step.XXXXXX") || return 1
    [ -t 1 ] || printf '%s ... ' "$text"
    "${PYTHON:-python3}" -c 'import os, signal, sys
os.setpgid(0, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    # shellcheck disable=SC2064
    trap "kill -TERM -- -$pid 2>/dev/null; rm -f '$log'; printf 'interrupted\n'; exit 130" INT TERM HUP
    while [ -t 1 ] && kill -0 "$pid" 2>/dev/null; do
        printf '\r%s ... %d s ' "$text" "$((SECONDS - begin))"
        sleep 0.2
    done
    if wait "$pid"; then
        [ -t 1 ] && printf '\r%s ... ' "$text"
        printf 'done, %d s\n' "$((SECONDS - begin))"
        trap - INT TERM HUP
        rm -f "$log"
    else
        trap - INT TERM HUP
        printf 'FAILED after %d s\n' "$((SECONDS - begin))"
        tail -n 40 "$log" >&2
        rm -f "$log"
        return 1
    fi
}

# make_venv DIR: a virtual environment with a working pip; sets VENV_PIP to the command words.
# Debian and Ubuntu split ensurepip off; any pip of the machine can install into DIR then.
make_venv() {
    local dir=$1
    if ! "$dir/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        rm -rf "$dir"
        mkdir -p "$(dirname "$dir")"
        if "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
            step "Making $dir" "$PYTHON" -m venv "$dir" || return 1
        elif "$PYTHON" -m pip --version >/dev/null 2>&1 &&
            "$PYTHON" -c 'import venv' 2>/dev/null; then
            step "Making $dir" "$PYTHON" -m venv --without-pip "$dir" || return 1
        else
            complain "$PYTHON has neither ensurepip nor pip, so no virtual environment can be made." \
                "On Debian or Ubuntu: apt install python3-venv"
            return 1
        fi
    fi
    if "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        VENV_PIP=("$dir/bin/python" -m pip)
    elif "$PYTHON" -m pip --python "$dir/bin/python" --version >/dev/null 2>&1; then
        VENV_PIP=("$PYTHON" -m pip --python "$dir/bin/python")
    else
        complain "no pip can install into $dir: pip 22.3 or later is needed, or python3-venv"
        return 1
    fi
}

# fingerprint PATH...: one hash of the names and contents of files, and of all files in folders.
fingerprint() {
    "$PYTHON" - "$@" <<'PY'
import hashlib, pathlib, sys
whole = hashlib.sha256(sys.version.encode())
for given in map(pathlib.Path, sys.argv[1:]):
    found = sorted(given.rglob("*")) if given.is_dir() else [given]
    for path in found:
        if path.is_file() and "__pycache__" not in path.parts:
            whole.update(f"{path}\0".encode() + path.read_bytes() + b"\0")
print(whole.hexdigest())
PY
}

# pip_install TEXT ARGUMENT...: pip install into the environment of make_venv, from the root.
pip_install() {
    local text=$1 constraints=()
    shift
    [ -f "$ROOT/constraints.txt" ] && constraints=(-c "$ROOT/constraints.txt")
    (
        cd "$ROOT" || exit 1
        step "$text" "${VENV_PIP[@]}" install --disable-pip-version-check --no-input \
            ${constraints[@]+"${constraints[@]}"} "$@"
    )
}

# pip_install_project TEXT ARGUMENT...: the project alone; what it needs is there already.
pip_install_project() {
    local text=$1 scratch failed=0
    shift
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/build.XXXXXX") || return 1
    # What setuptools leaves in a checkout (build, egg-info) comes back as stale modules and stale
    # entry points at the next installation. Every source that one pip builds would share this
    # folder, and take our modules along: so nothing else may be built here.
    printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$scratch" "$scratch" \
        >"$scratch/dist.cfg"
    (
        cd "$ROOT" || exit 1
        export DIST_EXTRA_CONFIG=$scratch/dist.cfg
        export SKIP_GENERATE_AUTHORS=1 SKIP_WRITE_GIT_CHANGELOG=1
        # pbr asks git for the version; where there is none, or no clone, it is told.
        if ! git rev-parse HEAD >/dev/null 2>&1; then
            PBR_VERSION=$(sed -n 's/^version = //p' setup.cfg)
            export PBR_VERSION
        fi
        pip_install "$text" --no-deps "$@"
    ) || failed=1
    rm -rf "$scratch"
    return "$failed"
}

# current STAMP HASH: tell whether the environment was made from these inputs.
current() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# test_venv DIR: the environment of the tests in DIR, up to date; run it in the root.
test_venv() {
    local dir=$1 wanted
    local inputs=(requirements.txt test-requirements.txt doc/requirements.txt constraints.txt
        setup.cfg setup.py pyproject.toml tools/lib.sh)
    wanted=$(fingerprint "${inputs[@]}")
    if current "$dir/.made-from" "$wanted"; then
        say "Environment $dir ... up to date"
        return 0
    fi
    make_venv "$dir" || return 1
    pip_install "Installing into $dir (minutes, the first time)" \
        -r requirements.txt -r test-requirements.txt -r doc/requirements.txt || return 1
    pip_install_project "Installing this project" -e . || return 1
    printf '%s\n' "$wanted" >"$dir/.made-from"
}
