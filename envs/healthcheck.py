"""Health checks: a started Sandbox is waited for until the Task's command says that it is ready.

Invariant: the semantics are Docker's, as Harbor has them: within the start period failures do not count, after it so
many in a row are fatal; the first check comes at once. Called by envs/steps.py.
"""

import asyncio
import time

from envs.sandbox import Sandbox
from envs.task import Healthcheck


async def wait_healthy(check: Healthcheck, sandbox: Sandbox) -> str:
    """ "" once the command exits with 0; otherwise, after `retries` failures in a row, what the last one said."""
    counts_from = time.monotonic() + check.start_period_s
    num_failures = 0
    while True:
        is_counted = time.monotonic() >= counts_from
        result = await sandbox.exec(check.command, timeout_s=check.timeout_s)
        if result.exit_code == 0:
            return ""
        num_failures += is_counted
        if num_failures >= check.retries:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-300:]
            return f"{num_failures} checks in a row failed, the last with exit code {result.exit_code}: {said}"
        await asyncio.sleep(check.interval_s if is_counted else check.start_interval_s)
