"""The `{% generation %}` block, by which a chat template says what the assistant itself writes.

Invariant: without marks the block leaves no trace, so a template renders alike with and without it.
Called by envs/renderer.py, which hands the marks over as `environment.generation_marks`.
"""

from collections.abc import Callable
from typing import Any, cast

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    """`{% generation %}body{% endgeneration %}` -> opening mark, body, closing mark."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call, so that its body sees the variables around it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        before, after = cast(tuple[str, str], cast(Any, self.environment).generation_marks)
        return f"{before}{caller()}{after}"
