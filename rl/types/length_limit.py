"""Find the limit of the length of a sample."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def find_length_limit(info: Mapping[str, Any], prompt_length: int) -> tuple[int, str]:
    """Return (maximum number of positions of a sample, name of this limit); sys.maxsize without a
    limit. The last sampled token takes no position.

    `info`: of the client that samples. `prompt_length`: tokens of the prompt.
    """
    switch = info.get("length_switch")
    cache, cache_name = info.get("kv_cache_tokens"), "KV cache (kv_cache_tokens)"
    if cache is not None and info.get("copies_prompts"):
        cache, cache_name = cache - prompt_length, f"{cache_name} beside a copy of the prompt"
    limits = [
        (info["max_context"], "model's context"),
        (cache, cache_name),
        (switch and switch.max_length(prompt_length), "range of the model's rotary frequencies"),
    ]
    return min((item for item in limits if item[0] is not None), default=(sys.maxsize, ""))
