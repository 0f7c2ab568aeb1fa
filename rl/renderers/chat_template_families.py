"""Provide chat templates for base models that have a family's special tokens but no template."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

# The prompt format of Llama 3 as published by Meta (text conversations): contents unchanged, no
# date, no default system message.
_LLAMA3 = (
    "{{ '<|begin_of_text|>' }}"
    "{% for message in messages %}"
    "{% if message.get('tool_calls') %}{{ raise_exception('the template of llama3 for tokenizers "
    "without one writes no tool calls') }}"
    "{% endif %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + "
    "'<|end_header_id|>\n\n' }}"
    "{{ message.content + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)


@dataclass(frozen=True)
class FamilyTemplate:
    """Hold a family's chat template and the special tokens that it writes."""

    source: str
    tokens: tuple[str, ...]


_FAMILIES = {
    "llama3": FamilyTemplate(
        _LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    )
}


def add_family_template(tokenizer: Any, name: str) -> Any:
    """Return a copy of the tokenizer with the template of the family `name`, if the tokenizer has
    the family's tokens and no template.

    Otherwise return the tokenizer itself.
    """
    family = _FAMILIES.get(name)
    if (
        family is None
        or tokenizer.chat_template is not None
        or not set(family.tokens) <= set(tokenizer.get_added_vocab())
    ):
        return tokenizer
    templated = copy.copy(tokenizer)
    templated.chat_template = family.source
    return templated
