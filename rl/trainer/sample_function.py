"""Load saved weights with their settings, read prompts, and sample: `rl.sample(...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.client import SamplingClient, ServiceClient
from rl.config import DataSettings, SamplingSettings
from rl.data import LengthLimits, ProblemSet, PromptTemplate, RowCheck, select_good_rows
from rl.errors import UserError
from rl.images import content_to_text
from rl.renderers import Renderer
from rl.trainer.data_source import load_held_out_problems
from rl.trainer.saved_weights import SavedWeights, open_weights
from rl.trainer.stage_models import make_renderer
from rl.types import Message, SamplingParams


@dataclass(frozen=True)
class SampledModel:
    """Hold loaded weights and the settings to sample them with."""

    name: str
    sampler: SamplingClient
    renderer: Renderer
    params: SamplingParams
    data: DataSettings


def load_sampled_model(
    saved: SavedWeights,
    service: ServiceClient,
    data: DataSettings,
    sampling: SamplingSettings,
    *,
    system_prompt: str | None = None,
    renderer_name: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int = -1,
    top_p: float = 1.0,
) -> SampledModel:
    """Load weights into a sampler of `service`.

    The keywords replace values of `data` and `sampling`; None keeps them, and the system prompt ""
    is none. Raises UserError if the weights cannot be loaded.
    """
    if system_prompt is not None:
        data = replace(data, system_prompt=system_prompt or None)
    sampler = saved.create_sampler(service, prefers_servers=True)
    renderer = make_renderer(sampler, renderer_name or data.renderer, data.template, sampling.stop)
    params = SamplingParams(
        sampling.max_tokens if max_tokens is None else max_tokens,
        None,
        renderer.get_stop_sequences(),
        sampling.temperature if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return SampledModel(saved.name, sampler, renderer, params, data)


def select_fitting_problems(
    problems: ProblemSet,
    data: DataSettings,
    info: Mapping[str, Any],
    renderer: Renderer,
    max_tokens: int,
) -> ProblemSet:
    """Return the problems with prompts that leave room for `max_tokens` of response.

    Longer prompts are truncated, skipped or raise UserError, as the settings of `data` say.
    """
    check = RowCheck(
        info, renderer, problems.name, (), max_tokens, limits=LengthLimits.from_settings(data)
    )
    return select_good_rows(problems, check, data.on_bad_row)


def iterate_prompts(
    data: DataSettings, prompts: Iterable[str], dataset: str | None, limit: int
) -> Iterator[Sequence[Message]]:
    """Yield the conversation of each row of `dataset`, or of each of `prompts` without a dataset.

    The system prompt, template and suffix of `data` are applied. At most `limit` rows are read.
    Raises UserError if a prompt is empty.
    """
    if dataset is not None:
        problems = load_held_out_problems(
            replace(
                data,
                eval_dataset=dataset,
                more_datasets=(),
                dataset_weights=(),
                more_eval_datasets=(),
                eval_limit=limit,
            )
        )
        yield from (problem.messages for problem in problems or () if problem.messages)
        return
    template = PromptTemplate.from_settings(data)
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("a prompt is empty: pass a text with --prompt")
        yield template([{"role": "user", "content": prompt}], {})


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
