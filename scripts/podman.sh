#!/usr/bin/env bash
# podman and a runtime for it, for the tests and measurements of the podman provider: installs the Debian packages when
# they are missing (as root), and says what to do where it cannot. Prints nothing when all is there.
# Called by hand and by tests/envs/containers/; no recipe needs it.
set -euo pipefail

say() { printf 'podman: %s\n' "$*" >&2; }

main() {
  command -v podman >/dev/null && command -v runc >/dev/null && return
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "podman or runc is missing and cannot be installed from here."
    say "Install both (on Debian or Ubuntu: sudo apt-get install -y podman runc), then try again."
    exit 1
  fi
  say "installing podman and runc with apt-get"
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends podman runc >/dev/null
}

main
