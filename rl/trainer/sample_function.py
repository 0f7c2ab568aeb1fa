"""Implement `rl.sample(...)`: sample answers from a run, a folder of weights or a base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.errors import UserError
from rl.images import content_to_text
from rl.trainer.prompt_source import iterate_prompts
from rl.trainer.sampled_model import load_sampled_model
from rl.trainer.saved_weights import open_weights
from rl.types import Message


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
    trusted: bool = False,
) -> list[list[str]]:
    """Return `samples` answers to each prompt, as `python sample.py WEIGHTS` prints them.

        rl.sample("runs/mine", ["12+34=", "56+78="], samples=4)
        rl.sample("Qwen/Qwen3-0.6B", ["Why is the sky blue?"], temperature=0, max_tokens=64)

    weights: a run's folder, a folder of weights, a hub name or tiny:<preset>.

    prompts: texts, which get the prompt template and the system prompt of the run, or
    conversations (lists of messages), which are used as they are.

    checkpoint: of a run's folder, "best" or a name in checkpoints.jsonl; None: the newest.

    temperature, max_tokens, system_prompt: by default those of the run, else 1, 256 and none.

    trusted: import a run's custom method from any folder, not from the current folder alone.

    Raises UserError if the weights cannot be opened, or prompts is a single text.
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts is a text, expected a list of prompts: pass [{prompts!r}]")
    saved = open_weights(str(weights), checkpoint, trusted=trusted)
    with saved.create_service(seed) as service:
        model = load_sampled_model(
            saved,
            service,
            *saved.prompt_settings,
            system_prompt=system_prompt,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        conversations = [
            next(iterate_prompts(model.data, [prompt], None, 1))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        futures = [
            model.sampler.sample(
                model.renderer.build_generation_prompt(messages), samples, model.params
            )
            for messages in conversations
        ]
        return [
            [
                content_to_text(model.renderer.parse_response(sequence.tokens)[0]["content"])
                for sequence in future.result().sequences
            ]
            for future in futures
        ]
