#!/usr/bin/env bash
# Everything that Thresher needs on this machine: .venv filled from requirements/cpu.lock (vLLM's CPU build, bubblewrap
# and SmolLM2's weights are in it), tmux and a C compiler. Does nothing when the stamp matches the lock.
# Called by every make target that runs code. Outside .venv it installs only missing Debian packages, and only as root.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/cpu.lock
stamp=.venv/.lock-sha256

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

main() {
  need tmux tmux "terminus-2 types into a tmux session"
  need cc gcc "the sandbox's agent is a small C program"
  local sum
  sum=$(sha256sum "$lock" | cut -d' ' -f1)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ] && return
  make_venv
  install_lock
  printf '%s\n' "$sum" >"$stamp"
  say "ready (.venv, $(.venv/bin/python --version))"
}

# need COMMAND DEBIAN_PACKAGE REASON: the command is there when this returns.
need() {
  command -v "$1" >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $2 with apt-get ($3)"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$2"; } >/dev/null || true
    command -v "$1" >/dev/null && return
  fi
  fail "$1 is missing: $3." "Install it (on Debian or Ubuntu: sudo apt-get install -y $2), then run make again."
}

make_venv() {
  local python
  [ -x .venv/bin/python ] && return
  python=$(find_python) || fail "no Python 3.11 or newer on the PATH (tried python3.11 to python3.14 and python3)." \
    "Install one (on Debian or Ubuntu: sudo apt-get install -y python3.11 python3.11-venv), then run make again."
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || fail "$python cannot make a virtual environment." \
    "Install its venv module (on Debian or Ubuntu: sudo apt-get install -y python3-venv), then run make again."
}

# 3.11 first: the lock was resolved for it.
find_python() {
  local name
  for name in python3.11 python3.12 python3.13 python3.14 python3; do
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$name"; return; }
  done
  return 1
}

install_lock() {
  local uv log=.venv/install.log
  uv=$(grep -m1 '^uv==' "$lock")
  say "installing $(grep -c == "$lock") locked packages into .venv (about a minute, and the download)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$uv" >"$log" 2>&1 ||
    { cat "$log" >&2; fail "pip could not install $uv." "Check that pip reaches its package index, then run make again."; }
  bash scripts/uv.sh pip install --no-deps --compile-bytecode --python .venv/bin/python -r "$lock" >"$log" 2>&1 && return
  cat "$log" >&2
  if grep -q 'no version of torch==' "$log"; then
    fail "$(grep '^torch==' "$lock") was not found; it is on PyTorch's CPU wheel index, not on the default one." \
      "Point pip at that index (pip config set global.extra-index-url URL; PyTorch's install page shows it under CPU)" \
      "or at a folder that holds the wheel (pip config set global.find-links DIR), then run make again."
  fi
  fail "the locked packages could not be installed; the reason is above." "Run make again once it is mended."
}

main
