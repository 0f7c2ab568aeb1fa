"""What the stages of a run need, made and checked before the run's folder is touched and before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl import checkpoint
from rl.cli import Stage as StagePlan
from rl.data import load_problems
from rl.data.problem_set import ProblemSet
from rl.errors import UserError
from rl.learner import LearnerSettings
from rl.methods import METHODS
from rl.renderers import Renderer, get_renderer
from rl.rewards import Scorer
from rl.sampling_client import SamplingClient
from rl.seeds import derive_seed
from rl.service import ServiceClient
from rl.settings import DataSettings, ModelSettings
from rl.training_client import TrainingClient
from rl.types import Problem
from rl.worker import SamplerSettings, WorkerSettings


@dataclass
class Prepared:
    """A stage's data and reward, loaded."""

    plan: StagePlan
    problems: ProblemSet
    test_problems: ProblemSet | None
    scorer: Scorer


def worker_settings(stages: Sequence[StagePlan]) -> WorkerSettings:
    """The device side, one for the whole run. Raises UserError where stages ask for different ones."""
    found = []
    for plan in stages:
        model, optim, sampling = plan.settings.model, plan.settings.optim, plan.settings.sampling
        learner = LearnerSettings(optim.token_budget, optim.layout, model.fused_logprobs, model.gradient_checkpointing)
        sampler = SamplerSettings(sampling.kv_cache_tokens, sampling.max_rows, sampling.sampler)
        found.append(WorkerSettings(dtype=model.precision, learner=learner, sampler=sampler))
    if any(settings != found[0] for settings in found):
        raise UserError(
            "precision, token_budget, layout, fused_logprobs, gradient_checkpointing, kv_cache_tokens, max_rows and sampler "
            "hold for the whole run: set them at the recipe's top level or on the line"
        )
    return found[0]


def prepare(plan: StagePlan) -> Prepared:
    """Loads a stage's data and starts its reward. Raises UserError or ValueError naming what is wrong."""
    data = plan.settings.data
    problems, test_problems = _problems(data, plan.settings.loop.eval_every > 0)
    scorer = Scorer(data.reward, timeout=data.reward_timeout, workers=data.reward_workers)
    return Prepared(plan, problems, test_problems, scorer)


def _columns(data: DataSettings) -> dict[str, Any]:
    return {
        "format": data.data_format,
        "config": data.dataset_config,
        "prompt_column": data.prompt_column,
        "answer_column": data.answer_column,
        "response_column": data.response_column,
        "system_prompt": data.system_prompt,
        "on_bad_row": data.on_bad_row,
    }


def _problems(data: DataSettings, held_out: bool) -> tuple[ProblemSet, ProblemSet | None]:
    train = load_problems(data.dataset, split="train", limit=data.train_limit, **_columns(data))
    if not held_out:
        return train, None
    if data.eval_dataset is None and Path(data.dataset).is_file():
        return _held_out(train, data.eval_limit)
    return train, held_out_problems(data)


def held_out_problems(data: DataSettings) -> ProblemSet | None:
    """The problems that evaluation asks; None for a file too short to hold any out."""
    if data.eval_dataset is None and Path(data.dataset).is_file():
        return _problems(data, True)[1]
    return load_problems(data.eval_dataset or data.dataset, split="test", limit=data.eval_limit, **_columns(data))


def _held_out(problems: ProblemSet, limit: int) -> tuple[ProblemSet, ProblemSet | None]:
    """A single file has no test split: its last tenth (at most `limit` rows) is held out and never trained on."""
    count = min(limit, len(problems) // 10)
    if count == 0:
        return problems, None
    rows = list(problems)
    return ProblemSet(rows[:-count], name=problems.name), ProblemSet(rows[-count:], name=f"{problems.name}, held out")


def names_its_model(stages: Sequence[StagePlan], index: int) -> bool:
    """Whether a stage begins from a base model of its own: the first, and one that names another than those before it.

    A model named for all stages (at a recipe's top level, on the line) is the one that the first begins from.
    """
    default = ModelSettings().base_model
    *before, asked = [stage.settings.model.base_model for stage in stages[: index + 1]]
    named = [base for base in before if base != default]
    return not before or asked not in (default, *named[-1:])


def make_policy(
    service: ServiceClient, model: ModelSettings, previous: str | None, resume_from: str | None, seed: int
) -> TrainingClient:
    """The learner of a stage: resumed, from `previous` (the final checkpoint of the stage before), or from its base model."""
    if resume_from is not None:
        return service.create_training_client_from_state_with_optimizer(resume_from)
    base = model.base_model
    if previous is not None:
        base = str(Path(previous) / "model")
        if (Path(base) / "adapter_config.json").is_file():
            _check_adapter(previous, model)
            return service.create_training_client_from_state(previous)  # an adapter: go on with it
    weights_seed = derive_seed(seed, "weights") % 2**31
    if model.lora_rank == 0:
        return service.create_full_training_client(base, tokenizer=model.tokenizer, seed=weights_seed)
    return service.create_lora_training_client(
        base,
        rank=model.lora_rank,
        seed=derive_seed(seed, "adapter") % 2**31,
        train_mlp=model.train_mlp,
        train_attn=model.train_attn,
        train_unembed=model.train_unembed,
        alpha=model.lora_alpha,
        tokenizer=model.tokenizer,
        model_seed=weights_seed,
    )


def _check_adapter(previous: str, model: ModelSettings) -> None:
    """A stage goes on with the adapter of the stage before; one that asks for another shape must not be told nothing."""
    saved = checkpoint.read_state(Path(previous))["spec"]["lora"]
    asked = {"rank": model.lora_rank, "alpha": model.lora_alpha}
    asked |= {name: getattr(model, name) for name in ("train_attn", "train_mlp", "train_unembed")}
    changed = [f"{name} {saved[name]} -> {value}" for name, value in asked.items() if saved[name] != value]
    if changed:
        raise UserError(
            f"the stage before trained a LoRA adapter, which this stage goes on with, but it asks for another: {', '.join(changed)}. "
            "Set the lora settings at the recipe's top level, for all stages"
        )


def make_renderer(client: TrainingClient | SamplingClient, asked: str | None) -> Renderer:
    """The renderer asked for by name; else the model's own chat template, or plain text where its tokenizer has none."""
    tokenizer = client.get_tokenizer()
    if tokenizer is None:
        raise UserError(f"{client.info['base_model']} has no tokenizer: name one with --tokenizer, or put it into the folder")
    return get_renderer(asked or ("chat_template" if tokenizer.chat_template else "plain"), tokenizer)


def check_rows(prepared: Prepared, policy: TrainingClient, renderer: Renderer) -> None:
    """Raises UserError naming the first row that could not be trained on or evaluated, before anything is.

    Online: every prompt leaves room for max_tokens in the context. Offline: every row has a response, and the whole fits.
    Held-out rows are sampled in both. A text of so few bytes that it must fit is not tokenised: every token is at least one.
    """
    plan = prepared.plan
    limit, wanted = policy.info["max_context"], plan.settings.sampling.max_tokens
    online = METHODS[plan.method].hooks(plan.settings).online
    sets = [(prepared.problems, online)] + ([(prepared.test_problems, True)] if prepared.test_problems is not None else [])
    for problems, sampled in sets:
        for problem in problems:
            if not sampled and problem.response is None:
                raise UserError(f"row {problem.index} of {problems.name} has no response to learn: name its column with --response-column")
            size = _TEMPLATE + sum(len(str(m.get("content") or "").encode()) for m in problem.messages)
            size += wanted if sampled else len((problem.response or "").encode())
            if limit is None or size <= limit:
                continue
            length = _length(problem, renderer, None if sampled else problem.response) + (wanted if sampled else 0)
            if length > limit:
                what = f"its prompt and max_tokens {wanted}" if sampled else "its prompt and response"
                raise UserError(
                    f"row {problem.index} of {problems.name} does not fit: {what} take {length} tokens, the model's context holds "
                    f"{limit}; shorten or leave out the row" + (", or lower --max-tokens" if sampled else "")
                )


_TEMPLATE = 256  # tokens that a chat template may add around the messages


def _length(problem: Problem, renderer: Renderer, response: str | None) -> int:
    if response is None:
        return renderer.build_generation_prompt(problem.messages).length
    return renderer.build_supervised_example([*problem.messages, {"role": "assistant", "content": response}])[0].length
