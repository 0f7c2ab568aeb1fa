"""Check before the first step that sampler and learner agree, and that updates reach the sampler.

Most errors that ruin a run silently leave its metrics healthy: weights that are never synchronized,
an adapter that the sampler lacks, a mask that is off by one. The test therefore samples a few
answers to the first problems and compares sampler and learner on them. It leaves no traces:
samples, gradients and weights of the run are bitwise the same without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rl.client import SamplingClient, TrainingClient
from rl.errors import UserError
from rl.renderers import Renderer
from rl.rollout import Trajectory, Transition, trajectory_to_datums
from rl.runtime import ConsistencyReport, check_sync
from rl.sampler import SamplingRequest
from rl.sanitize import list_some
from rl.seed import derive_seed
from rl.types import Datum, Message, ModelInput, SampledSequence, SamplingParams

# number of problems, answers to each problem, tokens of each answer at most
PROBLEMS, ANSWERS, TOKENS = 2, 2, 16
_PLACEHOLDER_TOKENS = range(3, 9)  # tokens that replace the prompt of an environment
TOLERANCE = 2e-3  # nats: fp32 rounding over a deep model stays below 1e-4
# limits with perturbed weights in fp32, of which the largest holds: nats, a multiple of the
# difference before, and a fraction of the mean change. Rounding over ill-conditioned weights took
# 2e-4 of the change (vLLM, a trained tiny:ascii); the least tensor of such models left out, 1e-2.
PERTURBED_TOLERANCE, PERTURBED_GROWTH, PERTURBED_FRACTION = 3e-5, 30, 1e-3
TOLERANCE_BF16 = 0.1  # nats on average; single tokens differ by more
PERTURBED_FRACTION_BF16 = 0.25  # fraction of the mean change that perturbed weights make
# of an external sampler: a difference in nats that is counted, and the share of such tokens from
# which a correction is advised
LARGE_DIFFERENCE, LARGE_SHARE = 1e-2, 0.1
# parts of the names of tensors that may have no gradient
_MAY_LACK_GRADIENT = (
    "expert",
    "vision",
    "visual",
    "image",
    "audio",
    "mm_projector",
    "multi_modal",
)


class SelfTestFailed(UserError):
    """Raised if the run would not learn from what it samples."""

    def __init__(self, problem: str):
        super().__init__(
            f"self-test: {problem}. Nothing was trained; --no-self-test trains without this check"
        )


def self_test(
    policy: TrainingClient,
    sampler: SamplingClient,
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    params: SamplingParams,
    seed: int,
    advises_correction: bool = False,
) -> str:
    """Run the self-test and return its result as a line of text. `sampler`: of the current weights.
    `advises_correction`: whether the method has `correction` as a setting, which is "none".

    Raises SelfTestFailed, naming what is broken.
    """
    start = time.perf_counter()
    samples = _sample_answers(sampler, conversations[:PROBLEMS], renderer, params, seed)
    datums: list[Datum] = []
    for prompt, sequence in samples:
        _check_endings(sequence, prompt, renderer, params)
        sample_datums = trajectory_to_datums(
            Trajectory([Transition(prompt, sequence, 0.0, True)], advantage=1.0)
        )
        _check_tokens(prompt, sequence, sample_datums)
        datums += sample_datums
    versions = {sequence.version for _, sequence in samples}
    if versions != {policy.version}:
        raise SelfTestFailed(
            f"samples are labeled version {sorted(map(str, versions))}, the weights are version "
            f"{policy.version}"
        )
    exact = policy.info["dtype"] == "fp32"
    remark, temperature = "", params.temperature
    if policy.info["sampler"] == "vllm":
        remark, share, exact = _compare_server(policy, datums, temperature, exact)
        if advises_correction and share > LARGE_SHARE:
            remark += "; consider --correction truncate"
        temperature = 1.0  # vLLM scores at temperature 1
    report = check_sync(policy, sampler, datums, temperature)
    names = ("learner", "sampler", "learner_perturbed", "sampler_perturbed")
    learner, read, *perturbed = (_select_actions(datums, getattr(report, name)) for name in names)
    compared = {"reads": read}
    if params.temperature == temperature:
        compared = {"drew": _select_sampled(datums), **compared}
    difference = _check_agreement(learner, compared, exact)
    _check_weight_sync(
        report.num_perturbed,
        (learner, read),
        perturbed,
        difference if exact else None,
    )
    reached = _check_gradients(report)
    return (
        f"the self-test passed in {time.perf_counter() - start:.1f} s: sampler and learner compute "
        f"the same logprobs (largest difference {difference:.1g} in "
        f"{sum(len(s.tokens) for _, s in samples)} tokens), changed weights reach the sampler, and "
        f"{reached} trained tensors get a gradient{remark}"
    )


def _compare_server(
    policy: TrainingClient, datums: Sequence[Datum], temperature: float, exact: bool
) -> tuple[str, float, bool]:
    """Compare the logprobs that came with an external sampler's samples with the learner's.

    Return a remark with the figures, the share of tokens above LARGE_DIFFERENCE, and whether the
    bound of the exact sampler applies: in fp32, if these logprobs are within it. Raises
    SelfTestFailed if they differ by more than TOLERANCE_BF16 on average.
    """
    bare = [
        datum.with_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]})
        for datum in datums
    ]
    outputs = policy.forward(bare, "cross_entropy", {"temperature": temperature}).result()
    logprobs = [output["logprobs"].array for output in outputs.loss_fn_outputs]
    learner = _select_actions(datums, logprobs)
    sampled = _select_sampled(datums)
    gap = learner - sampled
    mean, largest = float(np.abs(gap).mean()), float(np.abs(gap).max())
    share = float((np.abs(gap) > LARGE_DIFFERENCE).mean())
    kl = float((np.exp(gap) - 1 - gap).mean())
    figures = (
        f"KL {kl:.2g}, largest difference {largest:.2g} nats, above {LARGE_DIFFERENCE:g} in "
        f"{share:.0%} of {len(gap)} tokens"
    )
    if mean > TOLERANCE_BF16:
        raise SelfTestFailed(
            f"the vLLM server and the learner disagree on the logprobs of the same tokens at the "
            f"same weights: {figures}. Start the server with the model that is trained and its "
            "dtype (a tied head on a CPU: docs/vllm.md)"
        )
    return f"; vLLM against the learner: {figures}", share, exact and largest <= TOLERANCE


def _sample_answers(
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
    # An environment's prompt is not used: it would begin an episode.
    prompts = [
        renderer.build_generation_prompt(messages)
        if messages
        else ModelInput.from_ints(list(_PLACEHOLDER_TOKENS))
        for messages in conversations
    ]
    sampling_seed = derive_seed(seed, "self-test")
    requests = [
        SamplingRequest(
            prompt=prompt.token_ids(),
            images=prompt.images_with_positions(),
            num_samples=ANSWERS,
            params=short,
            seed=sampling_seed,
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


def _check_endings(
    sequence: SampledSequence, prompt: ModelInput, renderer: Renderer, params: SamplingParams
) -> None:
    """Check that sampler and renderer agree whether an answer ended. A truncated answer did not
    end.
    """
    _, ended = renderer.parse_response(sequence.tokens)
    if ended != (sequence.stop_reason == "stop"):
        reading = "ended" if ended else "not ended"
        raise SelfTestFailed(
            f"an answer of {len(sequence.tokens)} tokens with stop_reason "
            f"{sequence.stop_reason!r} is read as {reading} (its last tokens: "
            f"{renderer.tokenizer.decode(sequence.tokens[-4:])!r})"
        )


def _check_tokens(prompt: ModelInput, sequence: SampledSequence, datums: Sequence[Datum]) -> None:
    """Check that the trained tokens are exactly the sampled tokens, all of them."""
    targets = [datum.loss_fn_inputs["target_tokens"].array for datum in datums]
    trained = [int(t) for t in _select_actions(datums, targets)]
    if trained != list(sequence.tokens):
        raise SelfTestFailed(
            f"the tokens that would be trained {trained[:8]} are not the tokens that were "
            f"sampled {list(sequence.tokens)[:8]}"
        )
    sampled = np.array(sequence.logprobs or [], np.float32)
    if not np.array_equal(_select_sampled(datums).astype(np.float32), sampled):
        raise SelfTestFailed(
            "the logprobs that would be used in training are not the logprobs of the sampled "
            "tokens at their positions"
        )
    last = int(targets[-1][-1])
    whole = [*datums[0].model_input.token_ids(), last]
    if len(datums) == 1 and whole != [*prompt.token_ids(), *sequence.tokens]:
        raise SelfTestFailed("the sequence that would be trained is not the prompt and its answer")


def _select_actions(
    datums: Sequence[Datum], values: Sequence[np.ndarray] | dict[int, np.ndarray]
) -> np.ndarray:
    """Return the values of all datums at their actions, in float64."""
    return np.concatenate([values[i][datum.action_mask] for i, datum in enumerate(datums)]).astype(
        np.float64
    )


def _select_sampled(datums: Sequence[Datum]) -> np.ndarray:
    """Return the logprobs that came with the samples, in float64."""
    return _select_actions(datums, [datum.loss_fn_inputs["logprobs"].array for datum in datums])


def _check_agreement(learner: np.ndarray, compared: Mapping[str, np.ndarray], exact: bool) -> float:
    """Return the largest difference in nats between the learner's logprobs and the first of the
    sampler's logprobs: those that it "drew", and those that it "reads" when it scores.
    """
    for action, sampler in compared.items():
        difference = np.abs(sampler - learner)
        if difference.max() > TOLERANCE if exact else difference.mean() > TOLERANCE_BF16:
            at = int(difference.argmax())
            raise SelfTestFailed(
                "sampler and learner disagree on the logprobs of the same tokens at the same "
                f"weights, by {difference.mean():.3g} nats on average and "
                f"{difference.max():.3g} at worst (the sampler {action} {sampler[at]:.4f}, the "
                f"learner has {learner[at]:.4f})"
            )
    return float(np.abs(next(iter(compared.values())) - learner).max())


def _check_weight_sync(
    num_perturbed: int,
    before: Sequence[np.ndarray],
    perturbed: Sequence[np.ndarray],
    rounding: float | None,
) -> None:
    """Check that perturbed weights change the sampler's logprobs in the same way as the learner's.

    `num_perturbed`: number of perturbed tensors. `before`, `perturbed`: the logprobs of the learner
    and of the sampler. `rounding`: the largest difference before, in fp32; None: in bf16.
    """
    learner, sampler = perturbed
    change = np.abs(learner - before[0])
    if not num_perturbed or not change.max() > 0:
        raise SelfTestFailed(
            "moving the trained weights changes no logprob of the learner: nothing is trained"
        )
    if not np.abs(sampler - before[1]).max() > 0:
        raise SelfTestFailed(
            "the sampler does not notice that the weights changed: the weight sync delivers nothing"
        )
    difference = np.abs(sampler - learner)
    if rounding is not None:
        most = max(PERTURBED_GROWTH * rounding, PERTURBED_FRACTION * float(change.mean()))
        differs = difference.max() > min(TOLERANCE, max(PERTURBED_TOLERANCE, most))
    else:
        most = max(TOLERANCE_BF16, PERTURBED_FRACTION_BF16 * float(change.mean()))
        differs = difference.mean() > most
    if differs:
        raise SelfTestFailed(
            "the weight sync delivers only a part of the weights: with perturbed weights sampler "
            f"and learner disagree by {difference.mean():.3g} nats on average and "
            f"{difference.max():.3g} at worst, where moving them changes the learner by "
            f"{change.mean():.3g}"
        )


def _check_gradients(report: ConsistencyReport) -> str:
    if report.frozen_with_gradient:
        raise SelfTestFailed(
            f"frozen tensors have a gradient: {list_some(report.frozen_with_gradient, 3)}"
        )
    # a few tokens reach few experts, and text reaches no image encoder
    missed = [
        name
        for name, size in report.gradient_sizes.items()
        if not size > 0 and not any(part in name for part in _MAY_LACK_GRADIENT)
    ]
    total = len(report.gradient_sizes)
    if missed:
        raise SelfTestFailed(
            f"no gradient reaches {len(missed)} of {total} trained tensors: {list_some(missed, 3)}"
        )
    return f"{sum(size > 0 for size in report.gradient_sizes.values())} of {total}"
