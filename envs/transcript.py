"""Transcripts: conversations that others wrote, as token ids and the mask of what the assistant said.

Invariant: the ids are those that playing the conversation turn by turn gives, so what SFT trains is what the policy
will meet; special tokens spelled in a message stay text. Called by recipes/demonstrations.py.

Unlike a rollout, a transcript may open with a system message, hold tool messages, and let one side speak twice.
Trained are the words of each assistant message and the token that ends it, or, where the template marks them, the
contents of its `{% generation %}` blocks.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from jinja2 import TemplateError

from envs.renderer import ChatRenderer, Message, TemplateRefused

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EDGE = "\N{OBJECT REPLACEMENT CHARACTER}"
_MARKS = (f"{_EDGE}begin{_EDGE}", f"{_EDGE}end{_EDGE}")
_STAND_IN = f"{_EDGE}%d{_EDGE}"
_STAND_INS = re.compile(f"{_EDGE}([0-9]+){_EDGE}")

Piece = tuple[str, bool]
"""Text, and whether it is trained."""


def render_transcript(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    *,
    cut: Collection[int] = (),
    known: Collection[int] = (),
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(ids, mask), ending with the last assistant message; what comes after it is left out.

    The messages `cut` ended at a token limit, so the token that ends them is not trained; nothing of those `known` is.
    ValueError without an assistant message; TemplateRefused when the template refuses the messages or rewrites one.
    """
    last = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise ValueError("a transcript needs an assistant message: nothing in it would be trained")
    words = [message["content"] for message in messages[: last + 1]]
    shown = _with_stand_ins(renderer, messages[: last + 1])
    pieces = _marked_pieces if _GENERATION_TAG.search(renderer.template) else _appended_pieces
    ids: list[int] = []
    mask: list[bool] = []
    try:
        for text, is_trained in _trained(renderer.end_token, pieces(renderer, shown), shown, cut, known):
            new_ids = _encode(renderer, text, words)
            ids += new_ids
            mask += [is_trained] * len(new_ids)
    except TemplateError as error:
        raise TemplateRefused(f"the chat template refuses a conversation: {error}") from error
    return tuple(ids), tuple(mask)


def _with_stand_ins(renderer: ChatRenderer, messages: Sequence[Message]) -> list[Message]:
    """The messages, with a number in place of words that spell a special token or could pass for one of our marks."""
    return [
        {**message, "content": _STAND_IN % k}
        if renderer.special_pattern.search(message["content"]) or _EDGE in message["content"]
        else message
        for k, message in enumerate(messages)
    ]


def _trained(
    end: str, pieces: Iterable[Piece], messages: Sequence[Message], cut: Collection[int], known: Collection[int]
) -> Iterator[Piece]:
    """The pieces, those that are trained only as far as their message is."""
    if not cut and not known:
        yield from pieces
        return
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    pieces = list(pieces)
    if len(replies) != (num_blocks := sum(is_trained for _, is_trained in pieces)):
        raise TemplateRefused(f"the chat template has {num_blocks} generation blocks for {len(replies)} replies")
    following = iter(replies)
    for text, is_trained in pieces:
        k = next(following) if is_trained else None
        said, stop, rest = text.rpartition(end) if k in cut else (text, "", "")
        if stop:
            yield said, k not in known
            yield stop + rest, False
        else:
            yield text, is_trained and k not in known


def _appended_pieces(renderer: ChatRenderer, messages: Sequence[Message]) -> Iterator[Piece]:
    """What stands between replies, and each reply with its end token, checked to be what the whole renders to."""
    end = renderer.end_token
    done = ""
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = renderer.render_text(messages[:k], is_open=True)
        if not head.startswith(done):
            raise TemplateRefused(_rewritten(k))
        yield head[len(done) :], False
        yield message["content"] + end, True
        done = head + message["content"] + end
    if not renderer.render_text(messages, is_open=False).startswith(done):
        raise TemplateRefused(_rewritten(len(messages) - 1))


def _marked_pieces(renderer: ChatRenderer, messages: Sequence[Message]) -> Iterator[Piece]:
    """Text outside and inside the template's generation blocks in turn, up to the last block's end."""
    whole = renderer.render_text(messages, is_open=False)
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            said = renderer.render_text(messages[:k], is_open=True) + message["content"]
            if not whole.startswith(said):
                raise TemplateRefused(_rewritten(k))
    before, after = _MARKS
    *blocks, _ = renderer.render_text(messages, is_open=False, marks=_MARKS).split(after)
    if not blocks:
        raise TemplateRefused("the chat template has generation blocks but none for these messages")
    for block in blocks:
        outside, inside = block.split(before)
        yield outside, False
        yield inside, True


def _encode(renderer: ChatRenderer, text: str, words: Sequence[str]) -> list[int]:
    """Ids of a piece: special tokens where the template wrote them, never where a message spells one."""
    ids: list[int] = []
    pending = ""
    for k, part in enumerate(_STAND_INS.split(text)):
        if k % 2 == 0:  # between two stand-ins
            pending += part
            continue
        said, done = words[int(part)], 0
        for match in renderer.special_pattern.finditer(said):
            ids += renderer.encode_text(pending + said[done : match.start()])
            ids += renderer.encode_text(match.group(), is_words=True)
            pending, done = "", match.end()
        pending += said[done:]
    return ids + renderer.encode_text(pending)


def _rewritten(k: int) -> str:
    return (
        f"the chat template does not keep message {k + 1} of a conversation as it was written once others follow; "
        "give a template that does"
    )
