"""From the command line to a finished run: the one place that parses flags and turns errors into exit codes.

Invariant: a wrong value is refused before work starts, in one line. Called by every recipe's `__main__`.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import tyro

from recipes.interrupt import run_until_interrupted

C = TypeVar("C")


def launch(config_type: type[C], main: Callable[[C], Awaitable[Any]]) -> None:
    """Parses `config_type` from the command line, runs `main` on it and exits."""
    module = inspect.getmodule(main)
    try:
        config = tyro.cli(
            config_type, description=module.__doc__ if module else None, config=(tyro.conf.EnumChoicesFromValues,)
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.exit(run_until_interrupted(main(config)))
