# shellcheck shell=bash
# Sourced by the scripts beside it: the paths, pins and messages that more than one of them needs. Runs nothing.
# shellcheck disable=SC2034  # the variables are used by the scripts that source this

MKD_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MKD_VENV=$MKD_ROOT/.venv
MKD_PYTHON=$MKD_VENV/bin/python
MKD_LLAMA_REQUIREMENT=$MKD_ROOT/scripts/requirements/llama-cpp-python.txt

# Version and sha256 of the pinned llama-cpp-python source archive, read from the requirement file.
MKD_LLAMA_VERSION=$(sed -n 's/^llama-cpp-python==\([^ ]*\) .*/\1/p' "$MKD_LLAMA_REQUIREMENT")
MKD_LLAMA_SHA256=$(sed -n 's/^llama-cpp-python==.*--hash=sha256://p' "$MKD_LLAMA_REQUIREMENT")

# Where the unpacked archive lives: shared by all clones of one user, named by its hash.
MKD_CACHE=${MKDEPLOY_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/mkdeploy}
MKD_LLAMA_UNPACKED=$MKD_CACHE/llama-cpp-python-$MKD_LLAMA_VERSION-${MKD_LLAMA_SHA256:0:12}
MKD_LLAMA_SOURCE=$MKD_LLAMA_UNPACKED/vendor/llama.cpp

say() { printf '[%s] %s\n' "$(basename "$0")" "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# hash_of PATH...: one hash over the names and contents of these files and folders.
hash_of() {
    (cd "$MKD_ROOT" && find "$@" -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-64)
}

# is_stamped FILE TEXT / stamp FILE TEXT: was this step done with these inputs? / it is now.
is_stamped() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$1"; }
