#!/usr/bin/env bash
# Resolves the lock files: cpu.lock (what setup.sh installs) and gpu.lock (for clusters) from pyproject.toml, harbor.lock
# (for scripts/harbor_env.sh) from harbor.in.
# Versions that a lock already holds are kept while they fit: delete the file first for the newest ones.
# Called by `make lock`.
set -euo pipefail
cd "$(dirname "$0")/.."

export UV_CUSTOM_COMPILE_COMMAND="make lock"
compile=(bash scripts/uv.sh pip compile pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28
  --no-emit-index-url --no-annotate --extra dev --extra daytona --extra lora --extra peers)

echo "lock: requirements/cpu.lock"
"${compile[@]}" --extra cpu --extra weights --override requirements/overrides.txt -o requirements/cpu.lock >/dev/null

# Without pip's local folders: they may hold the CPU build of torch, which would win over the CUDA build.
echo "lock: requirements/gpu.lock"
UV_FIND_LINKS='' "${compile[@]}" --extra gpu --extra wandb -o requirements/gpu.lock >/dev/null

echo "lock: requirements/harbor.lock"
bash scripts/uv.sh pip compile requirements/harbor.in --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
  --no-emit-index-url --no-annotate -o requirements/harbor.lock >/dev/null
