"""Which engine: over rectangles, or over pages with steps that run by themselves. On CUDA by trying
both once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from rl.errors import UserError, remark
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.engine import Engine
from rl.sampler.engine_stepped import SteppedEngine
from rl.sampler.kept import Kept
from rl.sampler.requests import Request
from rl.types import SamplingParams

CACHES = ("auto", "plain", "paged")
_LAYERS, _WORDS, _ROWS = 2, 4096, 4  # of a trial


def make_engine(
    decoder: Decoder,
    cache: str = "auto",
    kept: Kept | None = None,
    sizes: Iterable[tuple[int, int, int]] | None = None,
    **settings: Any,
) -> Engine:
    """An engine for the decoder. "plain": a rectangle for each batch; "paged": pages, graphs on
    CUDA, several steps between two looks.

    "auto" is plain on a CPU; on CUDA paged, for the fast decoder, where both gave the same samples
    on this device in a trial of a second, which runs once. Where they did not it says so and is
    plain; so is a decoder that several ranks hold together. `kept`: what an engine over pages
    before it left, and this one leaves when it is closed; `sizes`: see `PagedEngine`. `settings`
    are `Engine`'s.
    """
    if cache not in CACHES:
        raise ValueError(f"cache is one of {', '.join(CACHES)}, got {cache!r}")
    if cache == "paged":
        if not isinstance(decoder, FastDecoder):
            raise UserError(
                "the sampler's cache is asked for in pages, which only the fast decoder (Llama and Qwen families) keeps: "
                "leave sampler_cache at auto, or sample such a model"
            )
        if decoder.team is not None:
            raise UserError(
                f"the sampler's cache is asked for in pages, and {decoder.team.size} ranks hold the sampler together, whose steps wait for "
                "each other: leave sampler_cache at auto, or sampler_tp at 1"
            )
        return SteppedEngine(decoder, kept=kept, sizes=sizes, **settings)
    tried = (
        cache == "auto"
        and isinstance(decoder, FastDecoder)
        and decoder.device.type == "cuda"
        and decoder.team is None
    )
    if tried and isinstance(decoder, FastDecoder) and _refusal(_Trial(decoder)) is None:
        return SteppedEngine(decoder, kept=kept, sizes=sizes, **settings)
    return Engine(decoder, **settings)


class _Trial:
    """A decoder as a key of what was found: all of one architecture, dtype and device are one."""

    def __init__(self, decoder: FastDecoder):
        a = decoder.architecture
        self.decoder = decoder
        sizes = (
            len(decoder.layers),
            a.heads,
            a.key_heads,
            a.head_width,
            a.vocab_size,
            decoder.norm_E.shape,
            repr(a.layers[0]),
        )
        self.key = (*sizes, decoder.dtype, decoder.device)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Trial) and self.key == other.key


@cache
def _refusal(trial: _Trial) -> str | None:
    """Why this device does not sample over pages, said once; None where it does."""
    decoder = trial.decoder
    trial.decoder = None  # type: ignore[assignment]  # the key stays, the weights need not
    try:
        said = difference(decoder)
    except Exception as failure:  # noqa: BLE001  (a compiler, a driver, memory: whatever it is, the other branch is there)
        said = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"
    if said is not None:
        remark(
            f"the sampler's cache in pages does not run on this device ({said}), so sampling goes the plain way, slower"
        )
    return said


def difference(decoder: FastDecoder) -> str | None:
    """What is unlike between the samples of both engines, of the first layers and words; None where
    nothing is.

    Prompts around the end of a page and past it, groups that share pages, rows that end within a
    look. Rounding may part two samples at a token whose border the random number lies on; their
    tokens before that have to agree in logprob, and of a hundred tokens after the same ones (and
    after the first, which the prompt gives) ten may part.
    """
    small = decoder.few(min(_LAYERS, len(decoder.layers)), min(_WORDS, decoder.vocab_size))
    most = min(small.max_positions or 640, 640) - 20
    lengths, words = (
        [length for length in (3, 250, 256, 600) if length <= most] or [1],
        small.vocab_size,
    )
    answers = []
    for kind in (SteppedEngine, Engine):
        engine = kind(small, (1, 2), kv_cache_tokens=256 * 40, max_rows=_ROWS * len(lengths))
        for i, length in enumerate(lengths):
            prompt = [(7 * i + 13 * j) % words for j in range(length)]
            engine.add(
                Request(
                    prompt=prompt,
                    num_samples=_ROWS,
                    problem=i,
                    params=SamplingParams(max_tokens=12 + i, temperature=1.0),
                )
            )
        answers.append([sequence for response in engine.run() for sequence in response.sequences])
    bound, parted, asked = (1e-3 if small.dtype == torch.float32 else 0.1), 0, 0
    for mine, plain in zip(*answers, strict=True):
        pairs = list(zip(mine.tokens, plain.tokens, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gaps = [
            abs(a - b)
            for a, b in zip(
                (mine.logprobs or [])[:same], (plain.logprobs or [])[:same], strict=True
            )
        ]
        if not max(gaps, default=0.0) <= bound:  # so that what is no number is unlike
            return f"logprobs of the same tokens differ by {max(gaps):.2g}"
        parts = same < max(len(mine.tokens), len(plain.tokens))
        parted, asked = parted + parts, asked + max(same - 1, 0) + parts
    return (
        None
        if 10 * parted <= asked
        else f"{parted} of {asked} tokens after the same ones are others"
    )
