#!/usr/bin/env bash
# Runs .venv's uv against the package sources that pip is configured with (environment and pip.conf alike).
# uv reads none of pip's settings; this is the one place that translates them, so that a machine is set up once, for pip.
# Called by setup.sh and lock.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

# The value of one pip setting, whatever its source; empty when unset. pip lists the environment, which overrides its files, first.
setting() {
  .venv/bin/python -m pip --disable-pip-version-check config list |
    sed -n "s/^\(global\|install\|:env:\)\.\.\{0,1\}$1='\(.*\)'$/\2/p" | sed 's/\\n/ /g' | head -n 1
}

# Local folders and indexes that do not exist are left out: pip ignores them, uv stops.
present() {
  local place
  for place in "$@"; do
    case $place in
      file://*) [ -d "${place#file://}" ] && printf '%s ' "$place" ;;
      /*) [ -d "$place" ] && printf '%s ' "$place" ;;
      *) printf '%s ' "$place" ;;
    esac
  done
  return 0
}

index=$(setting index-url)
extra=$(present $(setting extra-index-url))
links=$(present $(setting find-links))
cert=$(setting cert)
[ -n "$index" ] && export UV_DEFAULT_INDEX="$index"
[ -n "$extra" ] && export UV_INDEX="${extra% }"
[ -n "$cert" ] && [ -z "${SSL_CERT_FILE:-}" ] && export SSL_CERT_FILE="$cert"
# Spaces part the folders in pip's settings, commas in uv's.
[ -n "$links" ] && [ -z "${UV_FIND_LINKS+set}" ] && export UV_FIND_LINKS="$(tr ' ' ',' <<<"${links% }")"
# As pip does: the best version among all sources, not the first source that knows the name.
export UV_INDEX_STRATEGY=unsafe-best-match UV_PYTHON_DOWNLOADS=never
exec .venv/bin/uv --quiet "$@"
