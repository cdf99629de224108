"""ChatPrompts: dialogues with roles and tools as prompt ids, on a ChatRenderer's template and tokenizer.

Invariant: as in envs/renderer.py, sampled ids are never made again from text, and words never become special tokens.
Called by envs/gateway/session.py.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError

from envs.chat_template import compile_template
from envs.gateway.dialogue import Said, Tool
from envs.renderer import ChatRenderer, TemplateRefused

_PROBE = Tool(name="probe_of_tools", description="d", parameters='{"type": "object", "properties": {}}')
_FIRST_PRIVATE, _LAST_PRIVATE = 0xE000, 0xF8FF
_TOOLS = """# Tools

You may call one or more functions. Their signatures are:
<tools>
{signatures}
</tools>

To call a function, write a JSON object with its name and arguments between tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-as-object>}}
</tool_call>"""


class ChatPrompts:
    """Prompt ids of dialogues. A template without tools gets them in the system message, in the Hermes convention."""

    def __init__(self, renderer: ChatRenderer) -> None:
        """TemplateRefused for a template that drops earlier thinking: what follows a reply would rewrite it."""
        if renderer.drops_thinking:
            raise TemplateRefused(
                "the gateway needs a chat template that keeps earlier thinking; give the policy one, such as the "
                "OpenThoughts presets' chatml.jinja"
            )
        self.renderer = renderer
        self._template = compile_template(renderer.template)

    @property
    def num_tokens(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.renderer.tokenizer.get_vocab_size()

    def first(self, said: Sequence[Said], tools: Sequence[Tool]) -> list[int]:
        """Ids of a whole dialogue, as written, and the next reply's header. TemplateRefused when it has no form."""
        messages = [_message(each) for each in said] if self._knows_tools else _with_tools(_folded(said), tools)
        return self._encode(messages, self._specs(tools), self._render)

    def following(self, said: Sequence[Said], tools: Sequence[Tool], sampled_ids: Sequence[int]) -> list[int]:
        """Ids from the end of a sampled reply to the header of the next one, with what was `said` in between."""
        messages = [_message(each) for each in said] if self._knows_tools else _folded(said)
        ids = self._encode(messages, self._specs(tools), self._after_reply)
        end_id = self.renderer.stop_ids[0]
        return ids[1:] if sampled_ids and sampled_ids[-1] == end_id else ids

    def raw(self, text: str) -> list[int]:
        """Ids of a prompt that its sender has templated: here special tokens are what they spell."""
        return self.renderer.encode_text(text)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled."""
        return self.renderer.tokenizer.decode(list(ids), skip_special_tokens=False)

    # -- rendering ----------------------------------------------------------------------------------------------------

    def _render(self, messages: list[dict[str, Any]], specs: list[dict[str, Any]]) -> str:
        variables: dict[str, Any] = {"tools": specs} if specs else {}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self.renderer.special, **variables
            )
        except TemplateError as error:
            raise TemplateRefused(f"the policy's chat template refuses these messages: {error}") from error

    def _after_reply(self, messages: list[dict[str, Any]], specs: list[dict[str, Any]]) -> str:
        """A reply's end and what follows depend on nothing before it: other templates are refused."""
        start: list[dict[str, Any]] = [{"role": "user", "content": "u"}]
        head = self._render(start, specs) + "a"
        text = self._render([*start, {"role": "assistant", "content": "a"}, *messages], specs)
        if not text.startswith(head):
            raise TemplateRefused("the policy's chat template rewrites what came before these messages")
        return text.removeprefix(head)

    @cached_property
    def _knows_tools(self) -> bool:
        return _PROBE.name in self._render([{"role": "user", "content": "u"}], [_PROBE.spec()])

    def _specs(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        return [tool.spec() for tool in tools] if self._knows_tools else []

    # -- encoding -----------------------------------------------------------------------------------------------------

    def _encode(
        self,
        messages: list[dict[str, Any]],
        specs: list[dict[str, Any]],
        render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str],
    ) -> list[int]:
        """Ids of the rendered text; words that spell a special token go through the template as marks."""
        left, right = _unused_characters(json.dumps([messages, specs], ensure_ascii=False))
        spellings: list[str] = []

        def mark(match: re.Match[str]) -> str:
            spellings.append(match.group())
            return f"{left}{len(spellings) - 1}{right}"

        def replace(value: Any) -> Any:
            return _map_strings(value, lambda text: self.renderer.special_pattern.sub(mark, text))

        text = render(replace(messages), replace(specs))
        ids: list[int] = []
        for k, part in enumerate(re.split(f"{left}([0-9]+){right}", text)):
            if k % 2:
                ids += self.renderer.encode_text(spellings[int(part)], is_words=True)
            elif part:
                ids += self.renderer.encode_text(part)
        return ids


def _message(said: Said) -> dict[str, Any]:
    """As templates with tools read it; arguments are values there, since templates spell them."""
    if not said.calls:
        return {"role": said.role, "content": said.content}
    calls = [{"type": "function", "function": {"name": c.name, "arguments": _value(c.arguments)}} for c in said.calls]
    return {"role": said.role, "content": said.content, "tool_calls": calls}


def _value(arguments: str) -> object:
    try:
        return cast(object, json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages for a template without tools: the system message says what they are and how to call them."""
    if not tools:
        return messages
    text = _TOOLS.format(signatures="\n".join(json.dumps(tool.spec(), ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _folded(said: Sequence[Said]) -> list[dict[str, Any]]:
    """Messages for a template without tools: calls as words, results as user messages, those in a row in one."""
    messages: list[dict[str, Any]] = []
    was_result = False
    for each in said:
        text = f"<tool_response>\n{each.content}\n</tool_response>" if each.role == "tool" else each.text
        if each.role == "tool" and was_result:
            text = f"{messages.pop()['content']}\n{text}"
        messages.append({"role": "user" if each.role == "tool" else each.role, "content": text})
        was_result = each.role == "tool"
    return messages


def _unused_characters(text: str) -> tuple[str, str]:
    """Two characters of the private use area that the text lacks; real text holds next to none of its 6,400."""
    unused = (chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE) if chr(code) not in text)
    return next(unused), next(unused)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in cast(list[Any], value)]
    return value
