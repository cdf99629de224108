"""New text is found again only below everything that was seen."""

from envs.terminus2.scrollback import Capture, look, new_start

HEIGHT = 4


def capture(*lines: str, history: int = 0, cursor_row: int | None = None, is_alternate: bool = False) -> Capture:
    """Lines of the scrollback and the screen; the rows below are blank."""
    num_lines = history + HEIGHT
    row = len(lines) - 1 - history if cursor_row is None else cursor_row
    return Capture(
        history_size=history,
        cursor_row=row,
        is_alternate=is_alternate,
        lines=(*lines, *[""] * (num_lines - len(lines))),
        height=HEIGHT,
    )


def test_new_text_starts_at_the_last_line_seen() -> None:
    assert new_start(look(capture("$")), capture("$ ls", "a", "$")) == 0
    assert new_start(look(capture("$ ls", "a", "$")), capture("$ ls", "a", "$ pwd", "/", "$", history=1)) == 2


def test_what_scrolled_off_the_screen_is_still_found() -> None:
    after = capture("$ seq 6", *"123456", "$", history=4)
    assert new_start(look(capture("$")), after) == 0


def test_a_cleared_screen_is_not_found() -> None:
    assert new_start(look(capture("$ ls", "a", "$")), capture("$")) is None


def test_a_line_that_was_overwritten_is_not_found() -> None:
    before = look(capture("10%", "$"))
    assert new_start(before, capture("99%", "$ ls", "$")) is None
    assert new_start(before, capture("10%", "# ls", "$")) is None


def test_the_last_line_may_go_on() -> None:
    assert new_start(look(capture("$ make", "wait")), capture("$ make", "wait.....", "$")) == 1


def test_text_below_the_cursor_counts_as_seen() -> None:
    seen = look(capture("a", "b", "c", cursor_row=0))
    assert seen is not None and seen.last_line == 2
    assert new_start(seen, capture("a", "x", "c", "d")) is None


def test_a_full_screen_program_breaks_the_thread() -> None:
    assert look(capture("~", "~", is_alternate=True)) is None
    assert new_start(look(capture("$")), capture("$", is_alternate=True)) is None
    assert new_start(None, capture("$")) is None


def test_a_start_beyond_what_was_captured_is_still_its_number() -> None:
    tail = Capture(history_size=5000, cursor_row=3, is_alternate=False, lines=("w", "x", "y", "$"), height=HEIGHT)
    assert new_start(look(capture("$")), tail) == 0
    assert tail.first_line == 5000
