"""What is new in a terminal: the text since the last look, found again in the scrollback.

Invariant: pure; new text is reported only when everything seen before still stands above it. Called by
envs/terminus2/terminal.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The end of the scrollback and the screen, as tmux holds them."""

    history_size: int
    """Lines above the screen."""
    cursor_row: int
    """Row of the cursor on the screen, from 0."""
    is_alternate: bool
    """Whether a full-screen program shows its own screen."""
    lines: tuple[str, ...]
    """The last lines, every row of the screen included; no blanks at the end of a line."""
    height: int
    """Rows of the screen."""
    title: str = ""
    """The pane's title: the count of prompts, where the shell keeps it."""

    @property
    def first_line(self) -> int:
        """Absolute number of lines[0]; line 0 is the oldest of the scrollback."""
        return self.history_size + self.height - len(self.lines)

    @property
    def last_line(self) -> int:
        """Absolute number of the cursor's line, or of the last one with text if that is further down."""
        cursor = self.history_size + self.cursor_row
        return max([cursor, *(self.first_line + k for k, line in enumerate(self.lines) if line)])

    @property
    def screen(self) -> str:
        """The visible rows, without the blank ones below."""
        return "\n".join(self.lines[-self.height :]).rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Where the last look ended."""

    first_line: int
    lines: tuple[str, ...]
    """The lines up to the last one seen, at absolute numbers from first_line on; never empty."""

    @property
    def last_line(self) -> int:
        """Absolute number of the last line seen."""
        return self.first_line + len(self.lines) - 1


def look(capture: Capture) -> Seen | None:
    """What this capture shows for the next one to continue; None on an alternate screen."""
    if capture.is_alternate:
        return None
    lines = capture.lines[: capture.last_line - capture.first_line + 1][-capture.height :]
    return Seen(first_line=capture.last_line - len(lines) + 1, lines=lines)


def new_start(seen: Seen | None, capture: Capture) -> int | None:
    """Absolute number of the line where new text starts (the last line seen, which goes on); None when not found."""
    if seen is None or capture.is_alternate or capture.last_line < seen.last_line:
        return None
    shared = range(max(seen.first_line, capture.first_line), seen.last_line + 1)
    for number in shared:
        before, now = seen.lines[number - seen.first_line], capture.lines[number - capture.first_line]
        if not (now.startswith(before) if number == seen.last_line else now == before):
            return None
    return seen.last_line
