"""Renderers: messages to tokens and back. `get_renderer(name, tokenizer)`."""

from __future__ import annotations

import difflib
from typing import Any

from rl.errors import UserError
from rl.renderers.base import Renderer, TrainOn
from rl.renderers.chat_template import ChatTemplateRenderer
from rl.renderers.text import PlainRenderer, RoleColonRenderer

__all__ = [
    "RENDERER_NAMES",
    "ChatTemplateRenderer",
    "PlainRenderer",
    "Renderer",
    "RoleColonRenderer",
    "TrainOn",
    "get_renderer",
]

# Families render with the template that comes with the model; their names are kept for scripts that pass them.
_TEMPLATE_NAMES: dict[str, dict[str, Any]] = {
    "chat_template": {},
    "llama3": {},
    "qwen2_5": {},
    "qwen3": {},
    "qwen3_disable_thinking": {"enable_thinking": False},
}
RENDERER_NAMES = (*_TEMPLATE_NAMES, "role_colon", "plain")


def get_renderer(name: str, tokenizer: Any, **template_settings: Any) -> Renderer:
    """The renderer called `name` (one of RENDERER_NAMES). `template_settings` reach the model's chat template."""
    if name in _TEMPLATE_NAMES:
        return ChatTemplateRenderer(tokenizer, **{**_TEMPLATE_NAMES[name], **template_settings})
    if name not in RENDERER_NAMES:
        near = difflib.get_close_matches(name, RENDERER_NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"no renderer is named {name!r}: {hint}there are {', '.join(RENDERER_NAMES)}")
    if template_settings:
        raise UserError(f"the renderer {name!r} uses no template, so it takes no settings; got {sorted(template_settings)}")
    return PlainRenderer(tokenizer) if name == "plain" else RoleColonRenderer(tokenizer)
