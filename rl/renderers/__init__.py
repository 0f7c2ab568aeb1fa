"""Provide renderers, which convert messages to tokens and back: `get_renderer(name, tokenizer)`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from rl.errors import UserError
from rl.renderers.chat_template import (
    ChatTemplateRenderer,
    ConversationRenderer,
    add_llama3_template,
)
from rl.renderers.renderer import (
    Renderer,
    StopTextRenderer,
    TrainOn,
    get_content_text,
    normalize_messages,
    renderer_for_row,
)
from rl.renderers.response_parsing import (
    THOUGHT_BEGIN,
    format_broken_call,
    format_with_calls,
    split_thoughts,
)
from rl.renderers.stop_tokens import set_end_tokens
from rl.renderers.streaming_parser import (
    parse_partial_answer,
    prompt_opens_thoughts,
    trim_uncertain_end,
)
from rl.renderers.text_renderers import PlainRenderer, RoleColonRenderer

__all__ = [
    "ConversationRenderer",
    "ChatTemplateRenderer",
    "PlainRenderer",
    "RENDERER_NAMES",
    "Renderer",
    "RoleColonRenderer",
    "StopTextRenderer",
    "THOUGHT_BEGIN",
    "TrainOn",
    "format_broken_call",
    "trim_uncertain_end",
    "get_content_text",
    "get_renderer",
    "set_end_tokens",
    "prompt_opens_thoughts",
    "parse_partial_answer",
    "split_thoughts",
    "normalize_messages",
    "renderer_for_row",
    "format_with_calls",
]

# Families render with the tokenizer's template; their names exist for scripts that pass them.
_TEMPLATE_NAMES: dict[str, dict[str, Any]] = {
    "chat_template": {},
    "llama3": {},
    "qwen2_5": {},
    "qwen3": {},
    "qwen3_disable_thinking": {"enable_thinking": False},
}
RENDERER_NAMES = (*_TEMPLATE_NAMES, "role_colon", "plain")


def get_renderer(
    name: str, tokenizer: Any, *, eos_token_ids: Iterable[int] = (), **template_settings: Any
) -> Renderer:
    """Return the renderer `name` (an entry of RENDERER_NAMES). `template_settings` are passed to
    the model's chat template. Raises UserError for an unknown name or unusable settings.

    "llama3" needs no chat template in the tokenizer: Llama 3's base models have only its special
    tokens, and the template published by Meta is then used.

    `eos_token_ids`: tokens that end a sample, if the tokenizer does not know them. It knows them if
    it came with the model (`client.get_tokenizer()`) or if the model's config is in its folder.
    """
    if name in _TEMPLATE_NAMES:
        tokenizer = add_llama3_template(tokenizer) if name == "llama3" else tokenizer
        return ChatTemplateRenderer(
            tokenizer, eos_token_ids, **{**_TEMPLATE_NAMES[name], **template_settings}
        )
    if name not in RENDERER_NAMES:
        near = difflib.get_close_matches(name, RENDERER_NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"unknown renderer {name!r}: {hint}the renderers are {', '.join(RENDERER_NAMES)}"
        )
    if template_settings:
        raise UserError(
            f"the renderer {name!r} uses no template, so it takes no settings; got "
            f"{sorted(template_settings)}"
        )
    return (PlainRenderer if name == "plain" else RoleColonRenderer)(tokenizer, eos_token_ids)
