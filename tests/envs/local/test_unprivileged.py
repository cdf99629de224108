"""The contract, the attacks and the life cycle again, as a user who is not root and may write no cgroup."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_UID = 61_234


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="root runs the other tests as another user; a user has just run them")
def test_the_sandbox_holds_for_an_unprivileged_user(tmp_path: Path) -> None:
    become = ["setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups"]
    packages = os.pathsep.join([os.getcwd(), *(path for path in sys.path if path.endswith("site-packages"))])
    python = next((p for p in (sys.executable, "/usr/bin/python3") if can_run([*become, p], packages)), None)
    if python is None:
        pytest.skip("another user cannot run these tests' Python; keep checkout and Python outside /root")
    home = Path("/tmp") / f"thresher-home-{os.getpid()}"
    home.mkdir()
    os.chown(home, _UID, _UID)
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("contract", "attacks", "lifecycle")]
    try:
        done = subprocess.run(
            [*become, python, "-m", "pytest", "-q", "-m", "sandbox", "-p", "no:cacheprovider", *tests],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "TMPDIR": str(home),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": packages,
            },
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


def can_run(command: list[str], packages: str) -> bool:
    """Whether this Python runs as that user, really from this path, with the packages of the tests."""
    program = "import os, sys, pytest, pytest_asyncio, pytest_timeout; os.stat(os.path.realpath(sys.executable))"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run([*command, "-c", program], env=env, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
