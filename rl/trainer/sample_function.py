"""Implement `rl.sample(...)`: sample answers from a run, a folder of weights or a base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl.config import DataSettings, SamplingSettings
from rl.errors import UserError
from rl.images import content_to_text
from rl.trainer.prompt_source import iterate_prompts
from rl.trainer.saved_weights import open_weights
from rl.trainer.stage_models import make_renderer
from rl.types import Message, SamplingParams


def sample(
    weights: str | Path,
    prompts: Sequence[str | Sequence[Message]],
    samples: int = 1,
    *,
    checkpoint: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    system_prompt: str | None = None,
    seed: int = 0,
) -> list[list[str]]:
    """Return `samples` answers to each prompt, as `python sample.py WEIGHTS` prints them.

        rl.sample("runs/mine", ["12+34=", "56+78="], samples=4)
        rl.sample("Qwen/Qwen3-0.6B", ["Why is the sky blue?"], temperature=0, max_tokens=64)

    weights: a run's folder, a folder of weights, a hub name or tiny:<preset>.

    prompts: texts, which get the prompt template and the system prompt of the run, or
    conversations (lists of messages), which are used as they are.

    checkpoint: of a run's folder, "best" or a name in checkpoints.jsonl; None: the newest.

    temperature, max_tokens, system_prompt: by default those of the run, else 1, 256 and none.

    Raises UserError if the weights cannot be opened, or prompts is a single text.
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts is a text, expected a list of prompts: pass [{prompts!r}]")
    saved = open_weights(str(weights), checkpoint)
    data = saved.stage.settings.data if saved.stage else DataSettings()
    sampling = saved.stage.settings.sampling if saved.stage else SamplingSettings(temperature=1.0)
    if system_prompt is not None:
        data = replace(data, system_prompt=system_prompt or None)
    with saved.create_service(seed) as service:
        sampler = saved.create_sampler(service)
        renderer = make_renderer(sampler, data.renderer, data.template, sampling.stop)
        params = SamplingParams(
            sampling.max_tokens if max_tokens is None else max_tokens,
            None,
            renderer.get_stop_sequences(),
            sampling.temperature if temperature is None else temperature,
        )
        conversations = [
            next(iterate_prompts(data, [prompt], None, 1)) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        futures = [
            sampler.sample(renderer.build_generation_prompt(messages), samples, params)
            for messages in conversations
        ]
        return [
            [
                content_to_text(renderer.parse_response(sequence.tokens)[0]["content"])
                for sequence in future.result().sequences
            ]
            for future in futures
        ]
