"""Choose the engine: contiguous or paged KV cache, several steps per host sync, adapters of rows,
recording of experts. `rl.types.feature_table` lists the features that do not combine.

On CUDA the cache is chosen by a trial of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels import check_kernels_agree
from kernels.lora_ops import run_row_lora_trial
from rl.errors import warn_on_rank_zero
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_factory import find_decoder_features
from rl.sampler.decoder_fast import FastDecoder, MultiAdapterDecoder
from rl.sampler.kv_cache_pool import IdleKVCachePool
from rl.sampler.paged_state import BLOCK_SIZE
from rl.sampler.sampling_engine import STEPS_PER_SYNC, Engine
from rl.sampler.sampling_requests import SamplingRequest
from rl.sampler.tensor_parallel import all_ranks_agree
from rl.types import SampledSequence, SamplingParams
from rl.types.feature_table import check_features, find_conflict

CACHE_KINDS = ("auto", "plain", "paged")
_TRIAL_LAYERS, _TRIAL_VOCAB, _TRIAL_ROWS = 2, 4096, 4  # sizes of a trial


def make_engine(
    decoder: Decoder,
    cache: str = "auto",
    idle_pool: IdleKVCachePool | None = None,
    sizes: Iterable[tuple[int, int, int]] | None = None,
    features: Collection[str] = (),
    **settings: Any,
) -> Engine:
    """Return an engine for the decoder.

    "plain": a contiguous KV cache for each batch. "paged": a paged KV cache, and several steps per
    host sync (CUDA graphs on CUDA) unless a feature excludes them. "auto": plain on a CPU, and
    where a feature excludes several steps per host sync. On CUDA, "auto" is otherwise paged if both
    engines returned the same samples on this device in a trial (about a second, run once), and with
    adapters per row if their kernels agree with torch; if not, a warning is printed and "auto" is
    plain. Ranks that split the decoder choose the same.

    `idle_pool` provides the KV cache pool of an earlier paged engine, and receives the pool when
    this engine is closed. `sizes`: see `Engine`. `features`: "adapters per row" (the engine samples
    from the models on the base of the decoder), "router replay" (the engine records experts).
    `settings` are those of `Engine`. Raises ValueError if `cache` is unknown, UserError for
    features that do not combine.
    """
    if cache not in CACHE_KINDS:
        raise ValueError(f"cache is one of {', '.join(CACHE_KINDS)}, got {cache!r}")
    fast = decoder if isinstance(decoder, FastDecoder) else None
    present = {*features, *find_decoder_features(decoder)}
    if settings.get("num_speculative_tokens"):
        present.add("speculative decoding")
    check_features({*present, "paged cache"} if cache == "paged" else present)
    settings["record_experts"] = "router replay" in present
    device_steps = find_conflict({*present, "device steps"}) is None
    if cache == "auto" and fast is not None and device_steps and fast.device.type == "cuda":
        runs = _find_paged_failure(fast) is None
        runs = runs and ("adapters per row" not in present or _can_mix_adapters(fast))
        cache = "paged" if runs else "plain"
    if "adapters per row" in present:
        assert isinstance(decoder.base, FastDecoder), "adapters per row need a decoder with a base"
        reused = None if idle_pool is None else idle_pool.take_mixed_decoder(decoder.base)
        decoder = reused or MultiAdapterDecoder(decoder.base)
    if cache == "paged":
        settings |= {"block_size": BLOCK_SIZE, "idle_pool": idle_pool, "sizes": sizes}
        settings["steps_per_sync"] = STEPS_PER_SYNC if device_steps else None
    engine = Engine(decoder, **settings)
    if "adapters per row" in present:
        engine.owns_decoder = True
    return engine


def _can_mix_adapters(decoder: FastDecoder) -> bool:
    """Return whether the kernels for adapters of rows give this device the numbers of torch."""
    index = decoder.device.index
    index = torch.cuda.current_device() if index is None else index
    names = "the kernel for adapters of rows", "the plain engine"
    agrees = check_kernels_agree(run_row_lora_trial, index, decoder.dtype, names)
    return all_ranks_agree(decoder.tp_group, agrees, decoder.device)


# Why a device does not support the paged engine (None: it does), by architecture, dtype and device.
_trial_failures: dict[tuple, str | None] = {}


def _find_paged_failure(decoder: FastDecoder) -> str | None:
    """Return why this device does not support the paged engine, and warn once; None if it does."""
    a = decoder.architecture
    trial = repr(replace(a, layers=a.layers[:_TRIAL_LAYERS], ropes=()))
    names, width = tuple(decoder.weights.buffers), decoder.norm_E.shape
    group, device = decoder.tp_group, decoder.device
    tp = 1 if group is None else group.size
    key = (len(decoder.layers), trial, names, width, decoder.dtype, device, tp)
    if key in _trial_failures:
        return _trial_failures[key]
    try:
        reason = compare_engines(decoder)
    except Exception as failure:  # noqa: BLE001  (compiler, driver, memory: the plain engine is the fallback for any)
        reason = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"
    if not all_ranks_agree(group, reason is None, device):
        reason = reason or "on another rank of the sampler"
    _trial_failures[key] = reason
    if reason is not None:
        warn_on_rank_zero(
            f"the paged KV cache of the sampler does not run on this device ({reason}), "
            "so the plain engine samples, which is slower"
        )
    return reason


def compare_engines(decoder: FastDecoder) -> str | None:
    """Return the first difference between the samples of both engines, or None if they agree.

    Only the first layers and vocabulary entries are used. The prompts end around the end of a block
    and past it, groups share blocks, and rows end between host syncs. Rounding may make two samples
    diverge at a token if the random number is at the border between two tokens, or if a router's
    scores of two experts are nearly equal. The tokens before it must agree in logprob. Of a hundred
    tokens after equal prefixes (except the first token, which the prompt determines), ten may
    diverge.
    """
    small = decoder.truncated_copy(
        min(_TRIAL_LAYERS, len(decoder.layers)), min(_TRIAL_VOCAB, decoder.vocab_size), 255
    )
    most = min(small.max_positions or 640, 640) - 20
    lengths, vocab = (
        [length for length in (3, 250, 256, 600) if length <= most] or [1],
        small.vocab_size,
    )
    samples = []
    paged: dict[str, Any] = {"block_size": BLOCK_SIZE, "steps_per_sync": STEPS_PER_SYNC}
    for cache_settings in (paged, {}):
        engine = Engine(
            small,
            (1, 2),
            **cache_settings,
            kv_cache_tokens=256 * 40,
            max_rows=_TRIAL_ROWS * len(lengths),
            record_experts=small.num_choices > 0,
        )
        for i, length in enumerate(lengths):
            prompt = [(7 * i + 13 * j) % vocab for j in range(length)]
            engine.add(
                SamplingRequest(
                    prompt=prompt,
                    num_samples=_TRIAL_ROWS,
                    problem=i,
                    params=SamplingParams(max_tokens=12 + i, temperature=1.0),
                )
            )
        samples.append([sequence for response in engine.run() for sequence in response.sequences])
    bound, diverged, compared = (1e-3 if small.dtype == torch.float32 else 0.1), 0, 0
    for stepped, plain in zip(*samples, strict=True):
        same = _count_equal_tokens(stepped, plain, small.experts_per_token)
        assert stepped.logprobs is not None and plain.logprobs is not None
        gap = np.abs(np.subtract(stepped.logprobs[:same], plain.logprobs[:same])).max(initial=0.0)
        if not gap <= bound:  # NaN counts as a difference
            return f"logprobs of the same tokens differ by {gap:.2g}"
        differs = same < max(len(stepped.tokens), len(plain.tokens))
        diverged, compared = diverged + differs, compared + max(same - 1, 0) + differs
    return (
        None
        if 10 * diverged <= compared
        else f"{diverged} of {compared} tokens after equal prefixes differ"
    )


def _count_equal_tokens(
    sample: SampledSequence, other: SampledSequence, experts_per_token: int
) -> int:
    """Return the length of the common prefix: up to the first token that differs, or whose
    predecessor was routed to other experts.
    """
    pairs = zip(sample.tokens, other.tokens, strict=False)
    differs = np.array([a != b for a, b in pairs])
    if sample.experts is not None and other.experts is not None:
        # Each token after the first was sampled from the logits of a token that was fed after the
        # prompt.
        prompt, more = len(sample.experts) - len(sample.tokens) + 1, len(differs) - 1
        # The order of a token's experts does not matter: it changes if scores are nearly equal.
        ids, other_ids = (
            np.sort(x[prompt : prompt + more].reshape(max(more, 0), -1, experts_per_token))
            for x in (sample.experts, other.experts)
        )
        differs[1:] |= (ids != other_ids).any((1, 2))
    return int(differs.argmax()) if differs.any() else len(differs)
