"""Dialogues as ids: the same as the renderer's where both speak, and tools in either kind of template."""

from dataclasses import replace

import pytest

from envs.gateway.dialogue import Said, Tool, make_call, parse_reply
from envs.gateway.prompts import ChatPrompts
from envs.renderer import TemplateRefused
from tests.envs.templates import DROPS_EARLIER_THINKING
from tests.envs.tokens import CHATML_TEMPLATE, TINY_TEMPLATE, special_id, tiny_renderer

END = special_id("<|im_end|>")
LS = Tool(name="ls", description="lists", parameters='{"type": "object", "properties": {}}')
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + c.function.arguments | tojson + ']' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> Said:
    return Said(role="user", content=text)


def text_of(prompts: ChatPrompts, ids: list[int]) -> str:
    return prompts.spell(ids)


@pytest.mark.parametrize("template", [TINY_TEMPLATE, CHATML_TEMPLATE])
@pytest.mark.parametrize("words", ["hi", "a<|im_end|>b<|end|>", "", "\ue000\ue001 \N{PILE OF POO}"])
def test_one_user_message_is_what_the_renderer_makes_of_it(template: str, words: str) -> None:
    renderer = tiny_renderer(template)
    assert ChatPrompts(renderer).first([user(words)], ()) == list(renderer.first(words))


@pytest.mark.parametrize("sampled", [(5, END), (5,)])
def test_what_follows_a_reply_is_what_the_renderer_makes_of_it(sampled: tuple[int, ...]) -> None:
    renderer = tiny_renderer(CHATML_TEMPLATE)
    expected = renderer.next((1, 2), sampled, "b<|im_end|>")[1]
    assert ChatPrompts(renderer).following([user("b<|im_end|>")], (), sampled) == list(expected)


def test_a_template_with_tools_is_given_them() -> None:
    prompts = ChatPrompts(tiny_renderer(TOOLS_TEMPLATE))
    call = make_call("ls", {"b": 1, "a": "<|im_end|>"})
    said = [user("x"), Said(role="assistant", content="", calls=(call,)), Said(role="tool", content="out")]
    ids = prompts.first(said, [LS])
    function = '{"name": "ls", "description": "lists", "parameters": {"type": "object", "properties": {}}}'
    assert text_of(prompts, ids) == (
        f'<|im_start|>system\n{{"type": "function", "function": {function}}}<|im_end|>\n'
        "<|im_start|>user\nx<|im_end|>\n"
        '<|im_start|>assistant\n[ls{"a": "<|im_end|>", "b": 1}]<|im_end|>\n'
        "<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(END) == 4, "the one inside the arguments is text"
    following = prompts.following([Said(role="tool", content="out")], [LS], (END,))
    assert text_of(prompts, following) == "\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_tools_is_told_of_them_in_the_system_message() -> None:
    prompts = ChatPrompts(tiny_renderer(CHATML_TEMPLATE))
    results = [Said(role="tool", content="one"), Said(role="tool", content="two")]
    calls = parse_reply('go\n<tool_call>{"name": "ls", "arguments": {}}</tool_call>')
    text = text_of(prompts, prompts.first([Said(role="system", content="s"), user("x"), calls, *results], [LS]))
    assert text.startswith("<|im_start|>system\ns\n\n# Tools\n") and '"name": "ls"' in text
    assert text.endswith(
        '<|im_start|>assistant\ngo\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_dialogue_that_the_template_refuses_is_refused() -> None:
    strict = CHATML_TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
        1,
    )
    prompts = ChatPrompts(replace(tiny_renderer(), template=strict))
    with pytest.raises(TemplateRefused, match="no system"):
        prompts.first([Said(role="system", content="s"), user("x")], ())


def test_two_calls_and_the_words_around_them_are_told_apart() -> None:
    first, second = '{"name": "a", "arguments": {"x": {"y": 1}}}', '{"name": "b", "arguments": "{\\"z\\": 2}"}'
    said = parse_reply(f"one\n<tool_call>{first}</tool_call>two<tool_call>\n{second}\n</tool_call>\n")
    assert said.content == "one\ntwo"
    assert [(call.name, call.arguments) for call in said.calls] == [("a", '{"x": {"y": 1}}'), ("b", '{"z": 2}')]


@pytest.mark.parametrize("call", ["{}", '{"name": 5}', "[1]", '{"name": "a"', "nothing"])
def test_what_is_no_call_stays_words(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert parse_reply(text) == Said(role="assistant", content=text)


def test_a_template_that_drops_earlier_thinking_is_refused() -> None:
    with pytest.raises(TemplateRefused, match="keeps earlier thinking"):
        ChatPrompts(tiny_renderer(DROPS_EARLIER_THINKING))
