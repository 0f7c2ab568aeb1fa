"""Verify a model's behavior on a few tokens with its own weights before any work, instead of
trusting its name.

Sequences of different lengths are decoded together, with rows entering and leaving, and compared
with a plain forward of each sequence by itself, which is what a learner scores. Then the tokens of
the other rows are changed: a row's logits must not depend on them. Attention windows and chunks are
shortened for the probe, so that a few tokens cross them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl.errors import UserError, warn_on_rank_zero
from rl.layers import describe_layers, replay_experts, truncate_layers_, unwrap_model
from rl.sampler.decode_state import BatchSize, Prompt, compact_slots
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.forward_hf import BatchingPlan
from rl.sampler.precision import LOW_PRECISION

_PROBE_VOCAB = 4096  # of the vocabulary, in the probe
_PROBE_WINDOW = 6  # of attention, in the probe
# Allowed rounding error, relative to the spread of the logits. float32: 2^-24 per step, 1e3 to 1e4
# steps; half precision: 2^-9.
_ROUNDING = 3e-4
_ROUNDING_LOW = 5e-2
# Errors that a model's own code raises for an unexpected cache. Running out of memory, which is a
# RuntimeError, is raised again.
_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
)

ProbeRows = list[
    tuple[int, list[int], list[int]]
]  # (step at which the row enters, prompt, response)


def select_batching(decoder: HFDecoder, model: Any | None) -> None:
    """Set the decoder's plan to the fastest exact plan.

    `model` holds the weights (None: only the decoder does). Raises UserError for a model with
    logits that are not a function of the preceding tokens.
    """
    trial, _ = truncated_copy(decoder.model if model is None else model)
    decoder.plan = find_batching(trial)
    if decoder.layers.selected_positions:
        warn_on_rank_zero(
            f"{decoder.name}: its layers select the {decoder.layers.selected_positions} positions "
            "that they read by scores, and rounding can change the order of the scores: beyond "
            "that many tokens a sample's logprob may differ from the learner's "
            "(optim/max_logprob_difference)"
        )
    if decoder.plan.rows == "recompute":
        warn_on_rank_zero(
            f"{decoder.name}: decoding with a cache does not reproduce this model's own logits "
            "(tried: rows of any lengths, rows of equal length), so sampling recomputes the whole "
            "sequence for every token: exact, but slow with long responses"
        )


def truncated_copy(model: Any) -> tuple[HFDecoder, int | None]:
    """Return a truncated decoder around the model's own weights, and its number of layers.

    It keeps a layer of each kind (number None: all layers). A large vocabulary is cut down to its
    first tokens, which do not affect each other's logits.
    """
    trial = HFDecoder.sharing_weights_of(model)
    depth = truncate_layers_(trial.model)
    head = trial.model.get_output_embeddings()
    if type(head) is nn.Linear and len(head.weight) > _PROBE_VOCAB:
        head.weight = nn.Parameter(head.weight[:_PROBE_VOCAB], requires_grad=False)
        head.bias = (
            None
            if head.bias is None
            else nn.Parameter(head.bias[:_PROBE_VOCAB], requires_grad=False)
        )
        trial.vocab_size = _PROBE_VOCAB
    return trial, depth


def find_batching(trial: HFDecoder) -> BatchingPlan:
    """Return the fastest plan that reproduces the logits of the model's plain forward (see
    `select_batching`).
    """
    rows = _probe_rows(trial)
    with torch.inference_mode():
        _shorten_windows(trial.model)
        reference = _reference_logits(trial, rows)
        if not all(bool(logits.isfinite().all()) for logits in reference):
            return BatchingPlan()  # the engine raises when it samples
        bound = _max_difference(trial.dtype, reference)
        _check_causal(trial, rows, reference, bound)
        shortest = min(len(prompt) + len(response) for _, prompt, response in rows)
        together = _reads_exactly(trial, rows, reference, bound, shortest)
        right = together and _reads_exactly(trial, rows, reference, bound)
        plan = BatchingPlan("recompute", "right" if right else "equal", together)
        batched = "slots" if trial.layers.has_state else "padded"
        for kind in (batched, "equal") if together else ():
            if kind == batched and trial.length_switch is not None:
                continue  # the longest row of a forward would select the frequencies of all rows
            trial.plan = BatchingPlan(kind, plan.reading)  # type: ignore[arg-type]
            decoded = _run_within(lambda: _decode_rows(trial, rows), reference, bound)
            if decoded is not None and _rows_are_independent(trial, rows, decoded, bound):
                return trial.plan
        return plan


def matches_model(decoder: FastDecoder, model: Any) -> bool:
    """Return whether a decoder reproduces the logits of the model's plain forward, except for
    rounding.

    In half precision, rounding changes the routing of some tokens. The plain forward then replays
    the decoder's routing, and its own router must agree for most tokens.
    """
    trial, depth = truncated_copy(model)
    _shorten_windows(trial.model)
    decoder = decoder.truncated_copy(depth or len(decoder.layers), trial.vocab_size, _PROBE_WINDOW)
    rows = _probe_rows(trial)
    replay = _RowReplay() if decoder.num_choices and decoder.dtype in LOW_PRECISION else None
    with torch.inference_mode():
        decoded = _decode_rows(decoder, rows, replay)
        reference = _reference_logits(trial, rows, replay)
        if not all(bool(logits.isfinite().all()) for logits in reference):
            return True  # the engine raises when it samples
        if replay is not None and 2 * replay.changed > replay.tokens:
            return False
        bound = _max_difference(decoder.dtype, reference)
        # 4 times the error of the products under a learner's autocast
        if decoder.dtype in LOW_PRECISION and trial.dtype not in LOW_PRECISION:
            with torch.autocast(trial.device.type, dtype=decoder.dtype):
                rounded = _reference_logits(trial, rows, replay)
            bound = max(bound, 4 * _largest_difference(rounded, reference))
        return _largest_difference(decoded, reference) <= bound


@dataclass(slots=True)
class _RowReplay:
    """Hold the experts that a decoder chose for each probe row, and count the replayed tokens and
    those for which the model's routers would have chosen others.
    """

    experts: dict[int, np.ndarray] = field(default_factory=dict)  # [fed tokens, B * K] of each row
    changed: int = 0
    tokens: int = 0

    def compute_logits(self, decoder: HFDecoder, row: int, tokens: list[int]) -> Tensor:
        """Return the logits of a plain forward with the experts of the row, [1, T, V]."""
        layout = describe_layers(decoder.model).experts
        assert layout is not None
        fed = torch.from_numpy(self.experts[row]).to(decoder.device).long()
        # the last token was not fed: its experts are left to the router
        fed = torch.nn.functional.pad(fed, (0, 0, 0, len(tokens) - len(fed)), value=-1)
        choices_TBK = fed.unflatten(1, (-1, layout.per_token))
        with replay_experts(decoder.model, layout, choices_TBK) as result:
            logits = decoder.plain_forward([tokens], last_only=False)
        changed, known = result.counts()
        self.changed, self.tokens = self.changed + int(changed), self.tokens + int(known)
        return logits


# ---------------------------------------------------------------------------------------- the probe


def _probe_rows(decoder: HFDecoder) -> ProbeRows:
    """Return four sequences that fit into the model's context; two prompts have the same length.

    The padding token is part of the prompts and of two responses: some models (RoBERTa's relatives)
    skip it when they count positions, which a cache cannot know, and a policy may sample it.
    """
    most = min(
        limit
        for limit in (
            17,
            decoder.max_positions,
            decoder.length_switch and decoder.length_switch.threshold,
        )
        if limit
    )
    scale = most / 17
    config = unwrap_model(decoder.model).config.get_text_config()
    words = min(decoder.vocab_size, _PROBE_VOCAB)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(words, size=max(int(count * scale), 1)).tolist()

    rows = [
        (0, tokens(5), tokens(6)),
        (0, tokens(12), tokens(5)),
        (2, tokens(9), tokens(5)),
        (0, tokens(12), tokens(2)),
    ]
    pad = getattr(config, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < decoder.vocab_size:
        for i, (_, prompt, response) in enumerate(rows):
            prompt[len(prompt) // 2] = pad
            response[len(response) // 2] = pad if i < 2 else response[len(response) // 2]
    return rows


def _with_other_rows_changed(rows: ProbeRows, kept_row: int, decoder: HFDecoder) -> ProbeRows:
    """Return the rows with other tokens in all rows except `kept_row`."""

    def other(tokens: Sequence[int]) -> list[int]:
        return [(token + 1) % min(decoder.vocab_size, _PROBE_VOCAB) for token in tokens]

    return [
        row if i == kept_row else (row[0], other(row[1]), other(row[2]))
        for i, row in enumerate(rows)
    ]


def _shorten_windows(model: Any) -> None:
    """Reduce attention windows, chunks and top-k sizes to at most `_PROBE_WINDOW`.

    The sizes are set both in the config and in the modules.
    """
    config = unwrap_model(model).config
    places = [
        vars(config),
        vars(config.get_text_config()),
        *(vars(module) for module in model.modules()),
    ]
    for attributes in places:
        for name, value in list(attributes.items()):
            sized = name.endswith(
                (
                    "sliding_window",
                    "attention_window_size",
                    "attention_chunk_size",
                    "window_size",
                    "index_topk",
                )
            )
            if sized and type(value) is int and value > _PROBE_WINDOW:
                attributes[name] = _PROBE_WINDOW


def _reference_logits(
    decoder: HFDecoder, rows: ProbeRows, replay: _RowReplay | None = None
) -> list[Tensor]:
    """Return for each row the logits that predict its response, [tokens, V].

    Each row runs in a separate plain forward, with the experts of `replay`.
    """
    references = []
    for i, (_, prompt, response) in enumerate(rows):
        tokens = [*prompt, *response]
        logits = (
            decoder.plain_forward([tokens], last_only=False)
            if replay is None
            else replay.compute_logits(decoder, i, tokens)
        )[0].float()
        references.append(logits[len(prompt) - 1 : -1].clone())
    return references


def _max_difference(dtype: torch.dtype, reference: Sequence[Tensor]) -> float:
    """Return the largest allowed difference of logits: the rounding error times the spread of
    `reference`.
    """
    spread = max(
        float((logits - logits.mean(-1, keepdim=True)).abs().max()) for logits in reference
    )
    return spread * (_ROUNDING_LOW if dtype in LOW_PRECISION else _ROUNDING)


def _largest_difference(decoded: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest absolute difference; infinity if a value is not finite."""
    worst = max(
        float((actual.to(reference.device) - reference).abs().max())
        for actual, reference in zip(decoded, expected, strict=True)
    )
    return worst if np.isfinite(worst) else float("inf")


def _run_within(
    run: Callable[[], list[Tensor]], expected: Sequence[Tensor], bound: float
) -> list[Tensor] | None:
    """Return the logits of `run`; None if it fails, or they are not within the bound of
    `expected`.
    """
    try:
        logits = run()
        return logits if _largest_difference(logits, expected) <= bound else None
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        return None


def _check_causal(
    decoder: HFDecoder, rows: ProbeRows, reference: Sequence[Tensor], bound: float
) -> None:
    """Check that the logits of a prefix equal those of the whole sequence, and that forwards are
    repeatable.

    Raises UserError if not.
    """
    prefixes = [(step, prompt, response[:1]) for step, prompt, response in rows]
    predictions = _reference_logits(decoder, prefixes)
    worst = _largest_difference(predictions, [logits[:1] for logits in reference])
    if worst > bound:
        raise UserError(
            f"{decoder.name} cannot be sampled from: its logits change by {worst:.3g} with the "
            "tokens after them (or from call to call), so a token's probability is not known when "
            "it is sampled. Use a causal language model; an encoder needs is_decoder=true in its "
            "config.json"
        )


def _reads_exactly(
    decoder: HFDecoder,
    rows: ProbeRows,
    reference: Sequence[Tensor],
    bound: float,
    length: int | None = None,
) -> bool:
    """Return whether sequences of that length (None: padded on the right) may share a forward."""
    sequences = [[*prompt, *response][:length] for _, prompt, response in rows]
    starts = [len(prompt) - 1 for _, prompt, _ in rows]
    predictions = [
        (i, slice(start, len(tokens) - 1))
        for i, (start, tokens) in enumerate(zip(starts, sequences, strict=True))
        if start < len(tokens) - 1
    ]

    def run() -> list[Tensor]:
        batch = decoder.plain_forward(sequences, last_only=False).float()
        return [batch[place] for place in predictions]

    expected = [reference[i][: places.stop - places.start] for i, places in predictions]
    return _run_within(run, expected, bound) is not None


def _rows_are_independent(
    decoder: HFDecoder, rows: ProbeRows, before: Sequence[Tensor], bound: float
) -> bool:
    """Return whether each row's logits stay the same when all other rows change.

    The shapes stay the same, so rounding hardly differs.
    """
    bound = bound if decoder.dtype in LOW_PRECISION else bound / 10
    return all(
        _largest_difference(
            [_decode_rows(decoder, _with_other_rows_changed(rows, i, decoder))[i]], [before[i]]
        )
        <= bound
        for i in (0, len(rows) - 1)
    )


def _decode_rows(
    decoder: Decoder, rows: ProbeRows, replay: _RowReplay | None = None
) -> list[Tensor]:
    """Return the logits of every response token, computed through the decoder's own state.

    Each row enters at its step and leaves at its end. `replay` receives the experts.
    """
    state = decoder.new_state(1 << 30)
    state.records_experts = replay is not None
    logits: list[list[Tensor]] = [[] for _ in rows]
    running: list[int] = []
    step = 0
    while running or any(start >= step for start, _, _ in rows):
        if running:
            tokens = np.array([rows[i][2][len(logits[i]) - 1] for i in running])
            for i, row in zip(running, state.decode(tokens), strict=True):
                logits[i].append(row.float().clone())
        if entering := [i for i, (start, _, _) in enumerate(rows) if start == step]:
            slots = np.arange(len(state.prompt_lengths), len(state.prompt_lengths) + len(entering))
            longest_prompt = max(len(prompt) for _, prompt, _ in rows)
            longest_response = max(len(response) for _, _, response in rows)
            state.reserve(BatchSize(len(rows), longest_prompt, len(rows), longest_response))
            last = state.prefill([Prompt(rows[i][1]) for i in entering])
            for i, first in zip(entering, last, strict=True):
                logits[i].append(first.float().clone())
            state.add_rows(slots)
            running += entering
        keep = np.array([len(logits[i]) < len(rows[i][2]) for i in running], np.bool_)
        for place in np.flatnonzero(~keep).tolist():
            if replay is not None and (experts := state.experts_of_row(place)) is not None:
                replay.experts[running[place]] = experts
        source = compact_slots(keep)
        used = np.zeros(len(state.prompt_lengths), np.bool_)
        used[state.prompt_of_row[source]] = True
        state.retain(source, compact_slots(used))
        running = [running[i] for i in source]
        step += 1
    return [torch.stack(row_logits) for row_logits in logits]
