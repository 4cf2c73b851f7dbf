# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Shared functions of the tools: find a Python, keep a virtual environment up to date, and run steps
# with their output and duration. Source this file; it needs only bash, python3 and pip. Functions
# print an error and return non-zero on failure.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }

print_error() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# base_python PROGRAM: print the interpreter from which the environment of an interpreter was made. That of
# the environment may have no pip.
base_python() { "$1" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))' 2>/dev/null; }

# find_python: set PYTHON to a Python 3.11 or later: by default that of the environment VENV, because a
# Python of another version would replace it.
find_python() {
    local candidate
    if [ -z "${PYTHON:-}" ] && [ -n "${VENV:-}" ] && [ -x "$VENV/bin/python" ]; then
        PYTHON=$(base_python "$VENV/bin/python")
    fi
    for candidate in "${PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            return 0
        fi
    done
    print_error "Python 3.11 or later is required; found $("${PYTHON:-python3}" --version 2>&1 || true)." \
        "Install one, or set its path: PYTHON=/path/to/python3.12 $0"
    return 1
}

# step TEXT COMMAND...: run a program, show its duration, and its output only if it fails.
# The program runs in its own process group, so that Ctrl-C ends it with all its child processes.
step() {
    local text=$1 log begin=$SECONDS pid traps code
    shift
    traps=$(trap -p INT TERM HUP)
    log=$(mktemp "${TMPDIR:-/tmp}/step.XXXXXX") || return 1
    [ -t 1 ] || printf '%s ... ' "$text"
    "${PYTHON:-python3}" -c 'import os, signal, sys
os.setpgid(0, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    # Also the program alone: it may not have its group yet.
    trap 'kill -TERM -- "-$pid" "$pid" 2>/dev/null; rm -f "$log"; printf "interrupted\n"; exit 130' INT TERM HUP
    while [ -t 1 ] && kill -0 "$pid" 2>/dev/null; do
        printf '\r%s ... %d s ' "$text" "$((SECONDS - begin))"
        sleep 0.2
    done
    wait "$pid"
    code=$?
    trap - INT TERM HUP
    eval "$traps"
    if [ "$code" -eq 0 ]; then
        [ -t 1 ] && printf '\r%s ... ' "$text"
        printf 'done, %d s\n' "$((SECONDS - begin))"
    else
        printf 'FAILED after %d s\n' "$((SECONDS - begin))"
        tail -n 40 "$log" >&2
    fi
    rm -f "$log"
    [ "$code" -eq 0 ]
}

# is_usable DIR: return whether a virtual environment is of the version of PYTHON, and where it was created.
is_usable() {
    local dir=$1 version program interpreter='' second=''
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || return 1
    # After an upgrade of the system the interpreter is another version, which finds none of the packages.
    [ -d "$dir/lib/python$version" ] && "$dir/bin/python" -c "import sys
sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null || return 1
    # Programs begin with the path of their interpreter; if it is long or has a blank, /bin/sh starts it:
    # '''exec' "/PATH/bin/python" "$0" "$@"
    for program in "$dir/bin/pip" "$dir/bin/pytest" "$dir/bin/cyborg-standalone"; do
        [ -f "$program" ] || continue
        { read -r interpreter && read -r second; } <"$program"
        interpreter=${interpreter#'#!'}
        if [ "$interpreter" = /bin/sh ]; then
            interpreter=${second#*exec\' }
            # shellcheck disable=SC2016
            interpreter=${interpreter%' "$0"'*}
            interpreter=${interpreter#[\"\']}
        fi
        # The path may lead through links.
        [ "${interpreter%/*}" -ef "$dir/bin" ] || return 1
    done
}

# clear_venv DIR: make a folder for an environment, or clear one that these tools have made. Its mark
# stays, so that this also works after a kill.
clear_venv() {
    local mark=.made-by-tools
    if [ -n "$(ls -A "$1" 2>/dev/null)" ] && [ ! -f "$1/$mark" ]; then
        print_error "$1 is not a virtual environment of this Python that these tools have made: delete it, or" \
            "choose another folder"
        return 1
    fi
    mkdir -p "$1" && : >"$1/$mark" &&
        find "$1/" -mindepth 1 -maxdepth 1 ! -name "$mark" -exec rm -rf {} +
}

# make_venv DIR: create a virtual environment with a working pip, again if it is not usable; set VENV_PIP
# to the command of pip.
# On Debian and Ubuntu ensurepip is a separate package; without it the system's pip is used.
make_venv() {
    local dir=$1 method
    if ! is_usable "$dir"; then
        # PYTHON may be that of the environment.
        PYTHON=$(base_python "$PYTHON") || return 1
        if "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
            method=()
        elif "$PYTHON" -m pip --version >/dev/null 2>&1 &&
            "$PYTHON" -c 'import venv' 2>/dev/null; then
            method=(--without-pip)
        else
            print_error "$PYTHON has neither ensurepip nor pip, cannot create a virtual environment." \
                "On Debian or Ubuntu: apt install python3-venv"
            return 1
        fi
        clear_venv "$dir" || return 1
        step "Creating $dir" "$PYTHON" -m venv ${method[@]+"${method[@]}"} "$dir" || return 1
    fi
    if "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        VENV_PIP=("$dir/bin/python" -m pip)
    elif "$PYTHON" -m pip --python "$dir/bin/python" --version >/dev/null 2>&1; then
        VENV_PIP=("$PYTHON" -m pip --python "$dir/bin/python")
    else
        print_error "no pip can install into $dir: pip 22.3 or later, or python3-venv is required"
        return 1
    fi
}

# fingerprint PATH...: print one hash of the names and contents of files and folders.
fingerprint() {
    "$PYTHON" - "$@" <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256(sys.version.encode())
for argument in map(pathlib.Path, sys.argv[1:]):
    paths = sorted(argument.rglob("*")) if argument.is_dir() else [argument]
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path}\0".encode() + path.read_bytes() + b"\0")
print(digest.hexdigest())
PY
}

# pip_install TEXT ARGUMENT...: run pip install in the environment of make_venv, from the root.
pip_install() {
    local text=$1 constraints=()
    shift
    [ -f "$ROOT/constraints.txt" ] && constraints=(-c "$ROOT/constraints.txt")
    # Not in a subshell: Ctrl-C would end only this one.
    # shellcheck disable=SC2016
    step "$text" sh -c 'cd "$0" && exec "$@"' "$ROOT" "${VENV_PIP[@]}" install \
        --disable-pip-version-check --no-input ${constraints[@]+"${constraints[@]}"} "$@"
}

# list_requirements: print the requirements of the project with all its extras but "live", which only
# machines with the headers of libvirt can build, and "tempest", which is large and is installed for
# the tests that use it.
list_requirements() {
    "$PYTHON" - "$ROOT" <<'PY'
import configparser, pathlib, sys
root = pathlib.Path(sys.argv[1])
setup = configparser.ConfigParser(interpolation=None)
setup.read(root / "setup.cfg", encoding="utf-8")
print((root / "requirements.txt").read_text(encoding="utf-8"))
for name, extra in setup["extras"].items():
    # An extra may include others of this project.
    if name not in ("live", "tempest"):
        print(*(line for line in extra.split() if not line.startswith("cyborg[")), sep="\n")
PY
}

# pip_install_requirements TEXT ARGUMENT...: install the requirements with all extras.
# They are not installed together with the project, because sources share its build folder.
pip_install_requirements() {
    local text=$1 list failed=0
    shift
    list=$(mktemp "${TMPDIR:-/tmp}/requirements.XXXXXX") || return 1
    list_requirements >"$list" && pip_install "$text" -r "$list" "$@" || failed=1
    rm -f "$list"
    return "$failed"
}

# pip_install_project TEXT ARGUMENT...: install only the project, without its requirements.
pip_install_project() {
    local text=$1 scratch failed=0
    shift
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/build.XXXXXX") || return 1
    # Files that setuptools leaves in a checkout (build, egg-info) cause stale modules and stale
    # entry points at the next installation, so they are written to a scratch folder. All sources
    # that one pip run builds share this folder: build nothing else in this run.
    printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$scratch" "$scratch" \
        >"$scratch/dist.cfg"
    local -x DIST_EXTRA_CONFIG=$scratch/dist.cfg
    local -x SKIP_GENERATE_AUTHORS=1 SKIP_WRITE_GIT_CHANGELOG=1
    # pbr gets the version from git; without git or a clone it is set here.
    if ! git -C "$ROOT" rev-parse HEAD >/dev/null 2>&1; then
        local -x PBR_VERSION
        PBR_VERSION=$(sed -n 's/^version = //p' "$ROOT/setup.cfg")
    fi
    pip_install "$text" --no-deps "$@" || failed=1
    rm -rf "$scratch"
    return "$failed"
}

# is_current STAMP HASH: return whether the environment was created from these inputs.
is_current() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# add_libvirt_python DIR: install the extra "live" into an environment, if its headers are installed.
# It is optional: it needs a compiler and, the first time, the network.
add_libvirt_python() {
    if "$1/bin/python" -c 'import libvirt' 2>/dev/null || ! pkg-config --exists libvirt 2>/dev/null; then
        return 0
    fi
    if ! { make_venv "$1" && pip_install "Installing libvirt-python" libvirt-python; }; then
        say "Without libvirt-python the tests of running guests are skipped"
    fi
}

# install_hook: let git run tools/hooks before each commit, unless the clone has hooks of its own.
install_hook() {
    local top current reason
    if ! top=$(git rev-parse --show-toplevel 2>&1); then
        reason=${top%%$'\n'*}
    elif [ ! "$top" -ef "$ROOT" ]; then
        reason="this tree is no clone, only in $top"
    else
        current=$(git config core.hooksPath)
        [ "$current" != tools/hooks ] || return 0
        if [ -n "$current" ] || [ -n "$(find "$(git rev-parse --git-path hooks)" ! -type d ! -name '*.sample' \
            2>/dev/null)" ]; then
            reason="this clone has hooks; remove those of pre-commit by 'pre-commit uninstall', or call"
            reason+=" tools/hooks/pre-commit in yours"
        elif reason=$(git config core.hooksPath tools/hooks 2>&1); then
            say "git hook ... installed: core.hooksPath = tools/hooks"
            return
        fi
    fi
    say "git hook ... not installed: $reason"
}

# test_venv DIR: create or update the environment of the tests in DIR; call it in the root. Concurrent
# first runs in one checkout wait for each other.
test_venv() {
    local failed=0
    exec 9<"$ROOT/tools/lib.sh"
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        say "Waiting for another run that creates the environment"
        flock 9
    fi
    update_test_venv "$1" && add_libvirt_python "$1" || failed=1
    exec 9<&-
    return "$failed"
}

needs_all_packages() { [ "${CYBORG_VENV_PACKAGES:-}" = all ] || [ -f "$1/.all-packages" ]; }

# venv_hash DIR: print the fingerprint of what the environment is made from, in the current folder. With
# CYBORG_VENV_PACKAGES=all, or where it was so before, also of what only some tiers of the tests need.
venv_hash() {
    local inputs=(requirements.txt test-requirements.txt doc/requirements.txt constraints.txt
        setup.cfg setup.py pyproject.toml tools/lib.sh)
    if needs_all_packages "$1"; then inputs+=(test-requirements-all.txt); fi
    fingerprint "${inputs[@]}"
}

# update_test_venv DIR: install what venv_hash reads. Bytecode is written when a module is first imported:
# pip's would take a third of the time and of the space, mostly for modules that nothing imports.
update_test_venv() {
    local dir=$1 hash
    local lists=(-r test-requirements.txt -r doc/requirements.txt)
    if needs_all_packages "$dir"; then lists+=(-r test-requirements-all.txt); fi
    hash=$(venv_hash "$dir")
    if is_current "$dir/.made-from" "$hash" && is_usable "$dir"; then
        say "Environment $dir ... up to date"
        return 0
    fi
    make_venv "$dir" || return 1
    # Not current until all is installed.
    : >"$dir/.made-from"
    pip_install_requirements "Installing into $dir (minutes, the first time)" --no-compile "${lists[@]}" ||
        return 1
    pip_install_project "Installing this project" -e . || return 1
    [ ${#lists[@]} -eq 4 ] || touch "$dir/.all-packages"
    printf '%s\n' "$hash" >"$dir/.made-from"
}
