"""Small tokenizers for tests: byte-level BPE without merges, so an id is a byte or a special token.

Beside them, what playing a written conversation turn by turn gives, as the reference for other ways to render it.
"""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from envs.renderer import ChatRenderer

TINY_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|eos|>")


def byte_tokenizer() -> Tokenizer:
    """Ids 0-255 stand for the byte alphabet in sorted order, 256 and on for SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def tiny_renderer(template: str = TINY_TEMPLATE) -> ChatRenderer:
    return ChatRenderer(tokenizer=byte_tokenizer(), template=template, special={})


def special_id(token: str) -> int:
    return 256 + SPECIAL.index(token)


def text_ids(text: str) -> tuple[int, ...]:
    """Ids of ordinary text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return tuple(alphabet.index(char) for piece, _ in plain for char in piece)


def written_reply(renderer: ChatRenderer, text: str) -> tuple[int, ...]:
    """The ids of a reply that somebody wrote, end token included."""
    return (*renderer.encode_text(text, is_words=True), renderer.stop_ids[0])


def played(renderer: ChatRenderer, messages: Sequence[Mapping[str, str]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(ids, mask) of user and assistant in turn, played one after the other; the mask holds the replies."""
    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    reply: tuple[int, ...] = ()
    for user, assistant in zip(messages[::2], messages[1::2], strict=False):
        context = ids[: len(ids) - len(reply)]
        prefix_len, new_ids = (
            renderer.next(context, reply, user["content"]) if ids else (0, renderer.first(user["content"]))
        )
        assert prefix_len == len(ids), "a template that keeps history appends"
        reply = written_reply(renderer, assistant["content"])
        ids = (*ids, *new_ids, *reply)
        mask = (*mask, *[False] * len(new_ids), *[True] * len(reply))
    return ids, mask
