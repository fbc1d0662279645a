#!/usr/bin/env bash
# Makes .venv and installs dsv4 with all that its tests need, for the CPU. Done once: nothing happens while the stamp in .venv holds the same
# files, place and choice of Python. What is missing is named in one line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
log=$venv/setup.log
stamp=$venv/setup.stamp
torch_cpu_builds=https://download.pytorch.org/whl/cpu

die() {
  echo "dsv4: $*" >&2
  exit 1
}

state() {
  echo "$PWD ${PYTHON:-}"
  cat pyproject.toml constraints/*.txt scripts/setup.sh
}

# torch.compile calls $CXX, else g++ (clang++ on macOS).
check_compiler() {
  local default=g++
  [ "$(uname -s)" = Darwin ] && default=clang++
  local cxx=${CXX:-$default}
  command -v "${cxx%% *}" >/dev/null || die "no C++ compiler found ($cxx); install g++ (Debian: apt-get install g++) or set CXX"
}

is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_supported "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13 ($("$PYTHON" --version 2>&1 | tail -n 1 || true))"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.11 python3.12 python3.13 python3 python; do
    is_supported "$candidate" && echo "$candidate" && return
  done
  die "no Python 3.11, 3.12 or 3.13 found; install one (Debian: apt-get install python3-venv python3-dev) or set PYTHON=/path/to/python3.11"
}

make_venv() {
  local python=$1 version
  version=$("$python" -c 'import sys; print("{}.{}.{}".format(*sys.version_info))')
  "$python" -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null ||
    die "$python has no Python.h, which torch.compile needs; install its headers (Debian: apt-get install python${version%.*}-dev)"
  if [ "$("$venv/bin/python" -c 'import sys; print("{}.{}.{}".format(*sys.version_info))' 2>/dev/null)" != "$version" ]; then
    echo "dsv4: making $venv with Python $version"
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 ||
      die "$python cannot make virtual environments; install its venv module (Debian: apt-get install python${version%.*}-venv)"
  fi
}

pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile --progress-bar off -c constraints/cpu.txt "$@" >"$log" 2>&1
}

is_unreachable() {
  grep -qE 'NewConnectionError|ConnectTimeoutError|ReadTimeoutError|NameResolutionError|ProxyError|SSLError' "$log"
}

explain() {
  is_unreachable && die "$1 could not be installed: the package index cannot be reached, is there a network? (pip's words: $log)"
  die "$1 could not be installed: $(grep -m 1 '^ERROR: ' "$log" | cut -c 8-) (pip's words: $log)"
}

install() {
  local what=$1
  shift
  echo "dsv4: installing $what"
  pip_install "$@" || explain "$what"
}

# torch comes first and by itself, as its CPU build and no other: the default build for Linux brings gigabytes of CUDA.
install_torch() {
  local torch
  torch=$(grep '^torch==' constraints/cpu.txt)
  if [ "$(uname -s)" = Darwin ]; then
    install "$torch" "$torch"
    return
  fi
  echo "dsv4: installing $torch for the CPU"
  pip_install "$torch+cpu" && return
  is_unreachable && explain "$torch for the CPU"
  pip_install --extra-index-url "$torch_cpu_builds" "$torch+cpu" || explain "$torch for the CPU (from $torch_cpu_builds)"
}

check_compiler
state | cmp -s - "$stamp" && exit 0
python=$(find_python)
make_venv "$python"
rm -f "$stamp"
install_torch
install "hatchling" editables hatchling
install "dsv4 and its tools" --no-build-isolation -e '.[dev]'
install "outside oracles" --no-deps -r constraints/oracles.txt
state >"$stamp"
