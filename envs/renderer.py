"""Renderer: messages to token ids, so that what was sampled is exactly what the next prompt holds.

Invariant: ids once sampled are never made again from text; a next prompt appends to them, or, where the template drops
earlier thinking, leaves some out. Whatever a model or a terminal wrote stays text: it never becomes a special token.
Called by envs/conversation.py and by recipes for SFT.

It reads a model directory's tokenizer.json and chat template with `tokenizers` and `jinja2`, for the AutoTokenizer of
transformers imports torch, which no rollout worker needs. A test compares the prompts with `apply_chat_template`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer

from envs.chat_template import compile_template
from envs.thinking import THINK_END, ids_without_thinking, without_thinking

Message = Mapping[str, str]
"""{"role": "user" | "assistant" | "system", "content": text}."""

_PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}words\N{OBJECT REPLACEMENT CHARACTER}"


class TemplateRefused(ValueError):
    """The chat template cannot be continued token by token; the message says where, and what to use instead."""


class Renderer(Protocol):
    """Turns what is said into prompt ids, and sampled ids into text."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply; the first one is the template's own end of an assistant message."""
        ...

    def first(self, prompt: str) -> tuple[int, ...]:
        """The ids of the first prompt: one user message and the header of the assistant's reply."""
        ...

    def next(
        self, context_ids: Sequence[int], sampled_ids: Sequence[int], observation: str
    ) -> tuple[int, tuple[int, ...]]:
        """(prefix_len, new_ids): the next prompt is `(context_ids + sampled_ids)[:prefix_len] + new_ids`.

        `context_ids` is the full prompt of the last reply and `sampled_ids` that reply. A prefix_len shorter than both
        together is a break: the template rewrote what was sampled.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The reply's text, without its stop token."""
        ...


@dataclass(frozen=True)
class ChatRenderer:
    """The Renderer for chat templates that keep history as it was; TemplateRefused at construction for the others.

    What follows an assistant message must depend only on the messages after it, never on those before. The message
    itself must stand in the history as it was sampled, or, in templates like Qwen3's, without its thinking: then each
    reply that thought is followed by a break.
    """

    tokenizer: Tokenizer
    template: str
    """Jinja source of the chat template."""
    special: Mapping[str, str]
    """Names that the template may use: bos_token, eos_token, ..."""
    eos_ids: tuple[int, ...] = ()
    """Further ids that end a reply."""

    def __post_init__(self) -> None:
        self._refuse_unstable()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels to workers without what is compiled."""
        return type(self), (self.tokenizer, self.template, dict(self.special), self.eos_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end token of the template, then the others."""
        return (self._end_id, *(i for i in self.eos_ids if i != self._end_id))

    @property
    def end_token(self) -> str:
        """How the token is spelled that ends an assistant message."""
        return self.tokenizer.get_added_tokens_decoder()[self._end_id].content

    def first(self, prompt: str) -> tuple[int, ...]:
        """Ids of the rendered first user message and the assistant header."""
        return tuple(self._encode(lambda words: self._render([_user(words)]), prompt))

    def next(
        self, context_ids: Sequence[int], sampled_ids: Sequence[int], observation: str
    ) -> tuple[int, tuple[int, ...]]:
        """Keeps what the template keeps, and appends what closes the reply, the observation and the assistant header.

        A reply that was cut lacks its end token: that token is then among the new ids, so it is not trained.
        """
        closing = self._encode(self._after_reply, observation)
        if sampled_ids and sampled_ids[-1] == self._end_id:
            closing = closing[1:]
        if self.drops_thinking:
            kept = ids_without_thinking(sampled_ids, self._spell)
            if len(kept) < len(sampled_ids):
                return len(context_ids), (*kept, *closing)
        return len(context_ids) + len(sampled_ids), tuple(closing)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without the stop token at their end."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self._spell(kept)

    @cached_property
    def drops_thinking(self) -> bool:
        """Whether the template leaves the thinking of a reply out once it is history."""
        return self._first_rewritten(lambda reply: reply) is not None

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render_text(self, messages: Sequence[Message], *, is_open: bool, marks: tuple[str, str] = ("", "")) -> str:
        """The template's text; `is_open` ends it with the header of a reply.

        `marks` stand where a `{% generation %}` block of the template begins and ends. jinja2's TemplateError when the
        template refuses these messages.
        """
        values = {"messages": list(messages), "add_generation_prompt": is_open, **self.special}
        return (
            compile_template(self.template, marks).render(**values) if any(marks) else self._compiled.render(**values)
        )

    def encode_text(self, text: str, *, is_words: bool = False) -> list[int]:
        """Ids of text; of `is_words` special tokens are ordinary characters."""
        return (self._plain if is_words else self.tokenizer).encode(text, add_special_tokens=False).ids

    def _render(self, messages: Sequence[Message]) -> str:
        return self.render_text(messages, is_open=True)

    def _after_reply(self, observation: str) -> str:
        """The text between an assistant message's words and the next reply."""
        head = self._render([_user("u")]) + "a"
        return self._render([_user("u"), _assistant("a"), _user(observation)]).removeprefix(head)

    def _encode(self, render: Callable[[str], str], words: str) -> list[int]:
        """Ids of `render(words)`: special tokens where the template wrote them, never where `words` spell one."""
        text = render(words)
        if not self.special_pattern.search(words):
            return self.encode_text(text)
        before, after = render(_PLACEHOLDER).split(_PLACEHOLDER)
        ids: list[int] = []
        done = 0
        for match in self.special_pattern.finditer(text, len(before), len(text) - len(after)):
            ids += self.encode_text(text[done : match.start()])
            ids += self.encode_text(match.group(), is_words=True)
            done = match.end()
        return ids + self.encode_text(text[done:])

    def _spell(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def _compiled(self) -> Any:
        return compile_template(self.template)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, for which special tokens are ordinary text."""
        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any special token as it is spelled."""
        tokens = self.tokenizer.get_added_tokens_decoder().values()
        spellings = sorted((t.content for t in tokens if t.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    @cached_property
    def _end_id(self) -> int:
        ids = self._encode(self._after_reply, "u")
        if not ids or ids[0] not in self.tokenizer.get_added_tokens_decoder():
            raise TemplateRefused("the chat template ends an assistant message without a token of its own")
        return ids[0]

    # -- prefix stability ---------------------------------------------------------------------------------------------

    def _refuse_unstable(self) -> None:
        """Plays three replies, one with thinking, and compares each prompt with what appending gives."""
        try:
            rewritten = self._first_rewritten(lambda reply: reply)
            if rewritten is not None and self._first_rewritten(without_thinking) is not None:
                raise TemplateRefused(_unstable(rewritten))
        except TemplateError as error:
            raise TemplateRefused(f"the chat template failed on plain user and assistant turns: {error}") from error
        _ = self._end_id

    def _first_rewritten(self, as_history: Callable[[str], str]) -> str | None:
        """The first of the replies that the template's history holds otherwise than `as_history` makes it."""
        text = self._render([_user("u0")])
        messages = [_user("u0")]
        for k, reply in enumerate(("a", "<think>\nw\n</think>\n\nb", "c"), start=1):
            messages += [_assistant(reply), _user(f"u{k}")]
            text += as_history(reply) + self._after_reply(f"u{k}")
            if self._render(messages) != text:
                return reply
        return None


def load_renderer(directory: str | Path, *, template: str | None = None) -> ChatRenderer:
    """The ChatRenderer of a model directory (tokenizer.json, tokenizer_config.json, chat_template.jinja).

    `template` replaces the directory's chat template. ValueError when a file is missing, TemplateRefused when the
    template cannot be continued.
    """
    path = Path(directory)
    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"{path}: no tokenizer.json; give a model directory saved with save_pretrained")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = cast(dict[str, Any], _read_json(path / "tokenizer_config.json"))
    source = template or _template_of(path, config)
    special = {name: _spelling(config[name]) for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
    eos_id = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return ChatRenderer(
        tokenizer=tokenizer, template=source, special=special, eos_ids=() if eos_id is None else (eos_id,)
    )


def _template_of(path: Path, config: Mapping[str, Any]) -> str:
    jinja = path / "chat_template.jinja"
    source = jinja.read_text() if jinja.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(f"{path}: no chat template; add chat_template.jinja or choose an instruction-tuned model")
    return source


def _read_json(path: Path) -> object:
    return json.loads(path.read_text()) if path.is_file() else {}


def _spelling(token: object) -> str:
    """A special token's text; older tokenizer configs hold {"content": text, ...}."""
    return str(cast(dict[str, Any], token)["content"]) if isinstance(token, dict) else str(token)


def _unstable(reply: str) -> str:
    what = "thinking" if THINK_END in reply else "an assistant message"
    return (
        f"the chat template rewrites {what} once it is history, so prompts cannot append to sampled tokens; "
        "give a template that keeps every assistant message as it was sampled"
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
