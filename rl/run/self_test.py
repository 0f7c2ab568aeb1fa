"""What a run proves of itself before its first step: that what is sampled is what is trained, and
that what is trained is sampled.

Most of what silently ruins a run leaves its metrics healthy: weights that are never handed over, an
adapter that the sampler does not have, a mask that is off by one. So a few answers are drawn to the
first problems and looked at from both sides. Nothing stays of it: the run's samples, gradients and
weights are the same bits without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl.clients import SamplingClient, Seen, TrainingClient, prove
from rl.episodes import Trajectory, Transition, trajectory_to_datums
from rl.errors import UserError
from rl.renderers import Renderer
from rl.sampler import Request
from rl.seeds import derive_seed
from rl.types import Datum, Message, ModelInput, SampledSequence, SamplingParams

PROBLEMS, ANSWERS, TOKENS = 2, 2, 16  # drawn: answers to each problem, tokens of each at most
_ANY = range(3, 9)  # tokens that stand for the prompt of an environment
AGREE = 2e-3  # nats: fp32's rounding over a deep model stays below 1e-4
# with moved weights in fp32: nats, or as many times what they are apart before
ROUNDING, GROWTH = 3e-5, 30
AGREE_BF16 = 0.1  # nats on average; single tokens differ by more
ARRIVED_BF16 = 0.25  # of the change that moved weights make, on average


class SelfTestFailed(UserError):
    """The run would not have learned from what it samples."""

    def __init__(self, what: str):
        super().__init__(
            f"self-test: {what}. Nothing was trained; --no-self-test trains all the same"
        )


def self_test(
    policy: TrainingClient,
    sampler: SamplingClient,
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    params: SamplingParams,
    seed: int,
) -> str:
    """What was seen, in a line. `sampler`: of the weights as they are. Raises SelfTestFailed,
    naming what is broken.
    """
    start = time.perf_counter()
    drawn = _draw(sampler, conversations[:PROBLEMS], renderer, params, seed)
    datums: list[Datum] = []
    for prompt, sequence in drawn:
        _check_ends(sequence, prompt, renderer, params)
        found = trajectory_to_datums(
            Trajectory([Transition(prompt, sequence, 0.0, True)], advantage=1.0)
        )
        _check_tokens(prompt, sequence, found)
        datums += found
    versions = {sequence.version for _, sequence in drawn}
    if versions != {policy.version}:
        raise SelfTestFailed(
            f"samples are labelled version {sorted(map(str, versions))}, the weights are version {policy.version}"
        )
    seen = prove(policy, sampler, datums, params.temperature)
    whole = policy.info["dtype"] == "fp32"
    apart = _check_agreement(datums, seen, whole)
    _check_hand_over(datums, seen, min(AGREE, max(ROUNDING, GROWTH * apart)) if whole else None)
    reached = _check_gradients(seen)
    return (
        f"self-test: sampler and learner agree to {apart:.1g} nats over {sum(len(s.tokens) for _, s in drawn)} tokens, moved weights reach "
        f"the sampler, gradients reach {reached} tensors ({time.perf_counter() - start:.1f} s)"
    )


def _draw(
    sampler: SamplingClient,
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    params: SamplingParams,
    seed: int,
) -> list[tuple[ModelInput, SampledSequence]]:
    short = replace(
        params,
        max_tokens=min(TOKENS, params.max_tokens or TOKENS),
        stop=renderer.get_stop_sequences(),
    )
    # What an environment asks is not asked here: it would begin an episode.
    prompts = [
        renderer.build_generation_prompt(said) if said else ModelInput.from_ints(list(_ANY))
        for said in conversations
    ]
    own = derive_seed(seed, "self-test")
    requests = [
        Request(
            prompt=prompt.flat(),
            images=prompt.placed(),
            num_samples=ANSWERS,
            params=short,
            seed=own,
            problem=i,
        )
        for i, prompt in enumerate(prompts)
    ]
    responses, _ = sampler.sample_many(requests).result()
    return [
        (prompt, sequence)
        for prompt, response in zip(prompts, responses, strict=True)
        for sequence in response.sequences
    ]


def _check_ends(
    sequence: SampledSequence, prompt: ModelInput, renderer: Renderer, params: SamplingParams
) -> None:
    """An answer that was cut off is no ended one, for the sampler and for whoever reads it."""
    _, ended = renderer.parse_response(sequence.tokens)
    if ended != (sequence.stop_reason == "stop"):
        said = "ended" if ended else "not ended"
        raise SelfTestFailed(
            f"an answer of {len(sequence.tokens)} tokens whose stop_reason is {sequence.stop_reason!r} is read as {said} "
            f"(its last tokens: {renderer.tokenizer.decode(sequence.tokens[-4:])!r})"
        )


def _check_tokens(prompt: ModelInput, sequence: SampledSequence, datums: Sequence[Datum]) -> None:
    """What is trained is what was drawn, all of it, and nothing else."""
    trained: list[int] = []
    logprobs: list[float] = []
    for datum in datums:
        inputs = datum.loss_fn_inputs
        mask = inputs["mask"].array != 0
        trained += inputs["target_tokens"].array[mask].tolist()
        logprobs += inputs["logprobs"].array[mask].tolist()
    if trained != list(sequence.tokens):
        raise SelfTestFailed(
            f"the tokens that would be trained {trained[:8]} are not those that were sampled {list(sequence.tokens)[:8]}"
        )
    if not np.array_equal(
        np.array(logprobs, np.float32), np.array(sequence.logprobs or [], np.float32)
    ):
        raise SelfTestFailed(
            "the logprobs that would be trained with are not those of the sampled tokens, in their places"
        )
    whole = [
        *datums[0].model_input.flat(),
        int(datums[-1].loss_fn_inputs["target_tokens"].array[-1]),
    ]
    if len(datums) == 1 and whole != [*prompt.flat(), *sequence.tokens]:
        raise SelfTestFailed("the sequence that would be trained is not the prompt and its answer")


def _at_actions(datums: Sequence[Datum], found: dict[int, np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [found[i][datum.loss_fn_inputs["mask"].array != 0] for i, datum in enumerate(datums)]
    )


def _check_agreement(datums: Sequence[Datum], seen: Seen, whole: bool) -> float:
    """The largest difference in nats of sampler, as it drew and as it reads, and learner."""
    drawn = np.concatenate(
        [d.loss_fn_inputs["logprobs"].array[d.loss_fn_inputs["mask"].array != 0] for d in datums]
    ).astype(np.float64)
    learner, read = _at_actions(datums, seen.learner), _at_actions(datums, seen.sampler)
    for what, sampler in (("drew", drawn), ("reads", read)):
        apart = np.abs(sampler - learner)
        if apart.max() > AGREE if whole else apart.mean() > AGREE_BF16:
            at = int(apart.argmax())
            raise SelfTestFailed(
                f"sampler and learner disagree on the logprobs of the same tokens at the same weights, by {apart.mean():.3g} nats on "
                f"average and {apart.max():.3g} at worst (the sampler {what} {sampler[at]:.4f}, the learner has {learner[at]:.4f})"
            )
    return float(np.abs(drawn - learner).max())


def _check_hand_over(datums: Sequence[Datum], seen: Seen, most: float | None) -> None:
    """Moved weights change what the sampler says, and as they change what the learner says. `most`:
    nats in fp32; None: in bf16.
    """
    learner, sampler = (
        _at_actions(datums, seen.learner_moved),
        _at_actions(datums, seen.sampler_moved),
    )
    change = np.abs(learner - _at_actions(datums, seen.learner))
    if not seen.moved or not change.max() > 0:
        raise SelfTestFailed(
            "moving the trained weights changes nothing that the learner says: nothing is trained"
        )
    if not np.abs(sampler - _at_actions(datums, seen.sampler)).max() > 0:
        raise SelfTestFailed(
            "the sampler does not notice that the weights changed: the hand-over delivers nothing"
        )
    apart = np.abs(sampler - learner)
    if (
        apart.max() > most
        if most is not None
        else apart.mean() > max(AGREE_BF16, ARRIVED_BF16 * float(change.mean()))
    ):
        raise SelfTestFailed(
            f"the hand-over delivers only a part of the weights: with moved weights sampler and learner disagree by {apart.mean():.3g} "
            f"nats on average and {apart.max():.3g} at worst, where moving them changes the learner by {change.mean():.3g}"
        )


def _check_gradients(seen: Seen) -> str:
    if seen.frozen:
        raise SelfTestFailed(f"frozen tensors have a gradient: {_named(seen.frozen)}")
    missed = [
        name for name, size in seen.sizes.items() if not size > 0 and not _may_be_missed(name)
    ]
    if missed:
        raise SelfTestFailed(
            f"no gradient reaches {len(missed)} of {len(seen.sizes)} trained tensors: {_named(missed)}"
        )
    return f"{sum(size > 0 for size in seen.sizes.values())} of {len(seen.sizes)}"


def _may_be_missed(name: str) -> bool:
    """A few tokens reach few experts, and text reaches no image encoder."""
    return any(
        part in name
        for part in ("expert", "vision", "visual", "image", "audio", "mm_projector", "multi_modal")
    )


def _named(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:3])) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )
