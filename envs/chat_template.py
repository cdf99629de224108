"""Chat templates as transformers compiles them, with jinja2 alone; and their `{% generation %}` block.

Invariant: without marks the block, by which a template says what the assistant itself writes, leaves no trace: a
template renders alike with and without it. Called by envs/renderer.py and envs/gateway/prompts.py.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(source: str, marks: tuple[str, str] = ("", "")) -> Any:
    """The template as transformers compiles it: trimmed blocks, loop controls, `raise_exception`, plain `tojson`."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.generation_marks = marks
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)


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
