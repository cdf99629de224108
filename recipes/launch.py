"""From the command line to a finished run: the one place that parses flags and turns errors into exit codes.

Invariant: a wrong value is refused before work starts, in one line. Called by every recipe's `__main__`.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro

from recipes.interrupt import run_until_interrupted

C = TypeVar("C")


def launch(
    config_type: type[C], main: Callable[[C], Awaitable[Any]], *, from_file: Callable[[Path], C] | None = None
) -> None:
    """Parses `config_type` from the command line, runs `main` on it and exits.

    With `from_file`, `--config FILE` gives the values that the command line starts from.
    """
    module = inspect.getmodule(main)
    try:
        arguments, file = _split_config(sys.argv[1:]) if from_file else (sys.argv[1:], None)
        start: dict[str, Any] = {"default": from_file(file)} if from_file and file else {}
        config = tyro.cli(
            config_type,
            args=arguments,
            **start,
            description=module.__doc__ if module else None,
            config=(tyro.conf.EnumChoicesFromValues,),
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.exit(run_until_interrupted(main(config)))


def _split_config(arguments: list[str]) -> tuple[list[str], Path | None]:
    """The arguments without `--config FILE` (or `--config=FILE`), and that file. ValueError when FILE is missing."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], Path(argument.partition("=")[2])
        if argument == "--config":
            if index + 1 == len(arguments):
                raise ValueError("--config needs a file")
            return arguments[:index] + arguments[index + 2 :], Path(arguments[index + 1])
    return arguments, None
