#!/usr/bin/env bash
# .cache/harbor-venv: the `harbor` package in a Python 3.12 of its own, filled from requirements/harbor.lock. Prints its
# path. Does nothing else when the stamp matches the lock. Called by tests/recipes/test_harbor_interop.py and
# tests/envs/test_harbor_agent.py, which may run side by side; harbor needs Python 3.12 and packages that the main
# environment does not have, so it stays apart.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/harbor.lock
venv=.cache/harbor-venv
stamp=$venv/.lock-sha256

main() {
  local sum
  sum=$(sha256sum "$lock" | cut -d' ' -f1)
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  flock 9 # one builds, the others wait for it
  if ! [ -f "$stamp" ] || [ "$(cat "$stamp")" != "$sum" ]; then
    make_venv "$sum" >&2
  fi
  printf '%s\n' "$PWD/$venv"
}

make_venv() {
  local python
  python=$(find_python) || {
    echo "harbor_env: no Python 3.12 on the PATH or among pyenv's versions." \
      "Install one (on Debian or Ubuntu: sudo apt-get install -y python3.12 python3.12-venv; or pyenv install 3.12)."
    exit 1
  }
  rm -rf "$venv"
  "$python" -m venv --without-pip "$venv"
  bash scripts/uv.sh pip install --no-deps --python "$venv/bin/python" -r "$lock"
  printf '%s\n' "$1" >"$stamp"
}

# A name on the PATH may be a shim of pyenv that starts nothing, so each is tried.
find_python() {
  local python
  for python in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && { command -v "$python"; return; }
  done
  return 1
}

main
