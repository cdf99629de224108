"""Transcripts of others: the ids are those of playing them, the mask is the assistant's part and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.renderer import ChatRenderer, TemplateRefused
from envs.transcript import render_transcript
from tests.envs.templates import DROPS_EARLIER_THINKING, thinking_tokenizer
from tests.envs.tokens import CHATML_TEMPLATE, SPECIAL, TINY_TEMPLATE, played, special_id, text_ids, tiny_renderer

USER, ASSISTANT, END = special_id("<|user|>"), special_id("<|assistant|>"), special_id("<|end|>")
MARKED_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {"tiny": TINY_TEMPLATE, "chatml": CHATML_TEMPLATE, "marked": MARKED_TEMPLATE}
MARKED_TO_THE_LINE = MARKED_TEMPLATE.replace("<|end|>{% endg", "<|end|>\n{% endg")


def say(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def trained_text(renderer: ChatRenderer, ids: tuple[int, ...], mask: tuple[bool, ...]) -> str:
    kept = [i for i, is_trained in zip(ids, mask, strict=True) if is_trained]
    return renderer.tokenizer.decode(kept, skip_special_tokens=False)


words = st.lists(st.text(max_size=6) | st.sampled_from(SPECIAL), max_size=4).map("".join)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=50)
@given(exchanges=st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_a_transcript_of_two_who_take_turns_has_the_ids_of_a_rollout(
    template: str, exchanges: list[tuple[str, str]]
) -> None:
    renderer = tiny_renderer(TEMPLATES[template])
    messages = say(*((r, c) for exchange in exchanges for r, c in zip(("user", "assistant"), exchange, strict=True)))
    assert render_transcript(renderer, messages) == played(renderer, messages)


def test_two_users_in_a_row_and_a_system_message_by_hand() -> None:
    renderer = tiny_renderer(CHATML_TEMPLATE)
    messages = say(("system", "s"), ("user", "u"), ("user", "v"), ("assistant", "a"), ("assistant", "b"), ("user", "w"))
    ids, mask = render_transcript(renderer, messages)
    assert renderer.tokenizer.decode(list(ids), skip_special_tokens=False) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert trained_text(renderer, ids, mask) == "a<|im_end|>b<|im_end|>"


def test_a_template_with_generation_blocks_says_itself_what_is_trained() -> None:
    without_end = MARKED_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    messages = say(("user", "u"), ("assistant", "a<|end|>"), ("user", "v"), ("assistant", "b"))
    for template, expected in ((MARKED_TEMPLATE, "a<|end|><|end|>b<|end|>"), (without_end, "a<|end|>b")):
        renderer = tiny_renderer(template)
        ids, mask = render_transcript(renderer, messages)
        assert trained_text(renderer, ids, mask) == expected
        assert ids.count(END) == (4 if template == MARKED_TEMPLATE else 3)  # the one a message spells stays text


def test_generation_blocks_change_nothing_for_rollouts() -> None:
    marked, plain = tiny_renderer(MARKED_TEMPLATE), tiny_renderer()
    assert marked.first("u") == plain.first("u") == (USER, *text_ids("u"), END, ASSISTANT)
    assert marked.next((1,), (END,), "v") == plain.next((1,), (END,), "v")


def test_words_that_look_like_our_own_marks_stay_words() -> None:
    renderer = tiny_renderer(MARKED_TEMPLATE)
    odd = "\N{OBJECT REPLACEMENT CHARACTER}0\N{OBJECT REPLACEMENT CHARACTER}"
    ids, mask = render_transcript(renderer, say(("user", odd), ("assistant", odd + "<|user|>")))
    assert trained_text(renderer, ids, mask) == odd + "<|user|><|end|>"
    assert ids == (USER, *text_ids(odd), END, ASSISTANT, *text_ids(odd + "<|user|>"), END)


@pytest.mark.parametrize("template", TEMPLATES)
def test_cut_replies_do_not_train_their_end_and_known_ones_train_nothing(template: str) -> None:
    renderer = tiny_renderer(TEMPLATES[template])
    end = renderer.end_token
    messages = say(
        ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"), ("user", "w"), ("assistant", "c")
    )
    ids, _ = render_transcript(renderer, messages)
    for cut, known, expected in (((3,), (1,), f"bc{end}"), ((1, 3, 5), (), "abc"), ((1,), (1, 3), f"c{end}")):
        cut_ids, mask = render_transcript(renderer, messages, cut=cut, known=known)
        assert cut_ids == ids
        assert trained_text(renderer, ids, mask) == expected


def test_a_cut_reply_does_not_train_what_its_block_holds_after_the_end_either() -> None:
    renderer = tiny_renderer(MARKED_TO_THE_LINE)
    messages = say(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    assert trained_text(renderer, *render_transcript(renderer, messages, cut=(1,))) == "ab<|end|>\n"


def test_blocks_that_are_no_replies_cannot_be_cut() -> None:
    twice = MARKED_TEMPLATE.replace("<|end|>{% endg", "{% endgeneration %}{% generation %}<|end|>{% endg")
    with pytest.raises(TemplateRefused, match="2 generation blocks for 1 replies"):
        render_transcript(tiny_renderer(twice), say(("user", "u"), ("assistant", "a")), cut=(1,))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="needs an assistant message"):
        render_transcript(tiny_renderer(), say(("user", "u")))


def test_a_template_that_refuses_or_rewrites_is_named() -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TINY_TEMPLATE
    with pytest.raises(TemplateRefused, match="user first"):
        render_transcript(tiny_renderer(strict), say(("system", "s"), ("user", "u"), ("assistant", "a")))
    trims = TINY_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    marked = MARKED_TEMPLATE.replace("{{ m['content'] }}<|end|>{% endg", "{{ m['content'] | trim }}<|end|>{% endg")
    for template in (trims, marked):
        with pytest.raises(TemplateRefused, match="does not keep message 2"):
            render_transcript(tiny_renderer(template), say(("user", "u"), ("assistant", "a ")))


def test_a_template_that_drops_earlier_thinking_is_refused_with_generation_blocks_too() -> None:
    said = "words + '<|im_end|>\\n'"
    assert said in DROPS_EARLIER_THINKING
    marked = DROPS_EARLIER_THINKING.replace(
        f"{{{{- '<|im_start|>' + m.role + '\\n' + {said} -}}}}",
        "{{- '<|im_start|>' + m.role + '\\n' -}}"
        "{%- if m.role == 'assistant' -%}{% generation %}{{- words + '<|im_end|>' -}}{% endgeneration %}{{- '\\n' -}}"
        "{%- else -%}{{- words + '<|im_end|>\\n' -}}{%- endif -%}",
    )
    assert "generation" in marked
    messages = say(
        ("user", "u"),
        ("assistant", "<think>\na\n</think>\n\nb"),
        ("user", "v"),
        ("assistant", "<think>\nc\n</think>\n\nd"),
    )
    for template in (DROPS_EARLIER_THINKING, marked):
        renderer = ChatRenderer(tokenizer=thinking_tokenizer(), template=template, special={})
        with pytest.raises(TemplateRefused, match=r"does not keep message [24]"):
            render_transcript(renderer, messages)
