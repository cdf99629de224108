"""ScreenSandbox: a Sandbox whose terminal shows what a test wrote, one text after another."""

from collections.abc import Mapping
from pathlib import Path

from envs.sandbox import ExecResult


class ScreenSandbox:
    """Each exec answers with the next screen (the last one again and again) as tmux prints a capture.

    A screen is the whole text of the terminal, its last line holding the cursor; an ExecResult is answered as it is.
    """

    workdir = "/app"

    def __init__(self, *screens: str | ExecResult, height: int = 40) -> None:
        self._screens = list(screens)
        self._height = height
        self.commands: list[str] = []
        self.files: dict[str, bytes] = {}

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
    ) -> ExecResult:
        self.commands.append(command)
        screen = self._screens.pop(0) if len(self._screens) > 1 else self._screens[0]
        if isinstance(screen, ExecResult):
            return screen
        return ExecResult(exit_code=0, stdout=self._capture(screen), stderr=b"")

    def _capture(self, text: str) -> bytes:
        lines = text.split("\n")
        history = max(0, len(lines) - self._height)
        rows = lines + [""] * (self._height - len(lines))
        return f"{history} {len(lines) - 1 - history} 0 1\n{chr(10).join(rows)}\n".encode()

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = data

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        return self.files.get(path)

    async def upload_dir(self, source: Path, target: str) -> None:
        self.files |= {f"{target}/{path.name}": path.read_bytes() for path in source.iterdir()}

    async def kill_all(self) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing runs."""
