"""Run continuous batching: a step function over a waiting and a running queue.

A step decodes the running rows, admits waiting requests as far as the budget allows (the prompt of
a group is prefilled once), samples a token for every row, and removes the finished rows. Requests
are admitted in the order in which they were added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.conversation_cache import ConversationCache
from rl.sampler.decode_state import compact_slots
from rl.sampler.decoder import Decoder
from rl.sampler.expert_recording import enable_expert_recording
from rl.sampler.prompt_logprobs import PromptLogprobs
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import (
    CachedPrompt,
    EngineCounters,
    FinishedRequest,
    SamplingRequest,
    SequenceGroup,
    check_params,
    make_divergence_error,
    make_prefill_kwargs,
    resolve_max_tokens,
)
from rl.sampler.stop_conditions import StopStringMatcher, StopTable, build_stop_condition
from rl.sampler.token_sampling import (
    RowSamplingSettings,
    make_row_settings,
    sample_next_tokens,
)
from rl.types import SampledSequence, SampleResponse

DEFAULT_CACHE_TOKENS = 262_144


@dataclass(slots=True)
class _Admission:
    """Hold the samples that move to the running queue, and the batch's size with them."""

    slots: dict[Any, int]  # slot by key of a prompt
    rows: int
    longest_prompt: int
    longest_response: int
    entering: list[tuple[SequenceGroup, int]] = field(default_factory=list)  # group, samples
    prefills: list[SequenceGroup] = field(default_factory=list)
    # groups of cached conversations, with their slots
    continued: list[tuple[SequenceGroup, int]] = field(default_factory=list)


class Engine(ConversationCache):
    """Sample from a decoder with `kv_cache_tokens` positions in the cache and at most `max_rows`
    rows.

    `eos_token_ids` is the union of the ids in the tokenizer and the generation config. `tokenizer`
    is needed only for stop strings. `max_context` bounds the fed tokens (prompt and response); the
    default is the model's limit. `version` is the weight version of the decoder, recorded in the
    samples. `record_experts`: the samples hold the experts of their tokens (router replay).
    Requests may be added, and the weights changed, between any two steps. Raises ValueError if a
    limit is less than 1, UserError if experts cannot be recorded.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Any = None,
        max_context: int | None = None,
        kv_cache_tokens: int = DEFAULT_CACHE_TOKENS,
        max_rows: int = 1024,
        version: int = 0,
        record_experts: bool = False,
    ):
        limits = [limit for limit in (max_context, decoder.max_positions) if limit is not None]
        if min(kv_cache_tokens, max_rows, *limits) < 1:
            raise ValueError(
                f"kv_cache_tokens={kv_cache_tokens}, max_rows={max_rows}, max_context={limits}: "
                "at least 1 each"
            )
        self.decoder = decoder
        self.version = version
        self.eos_token_ids = tuple(sorted({int(token) for token in eos_token_ids}))
        self.max_context = min(limits) if limits else None
        self.kv_cache_tokens = kv_cache_tokens
        self.max_rows = max_rows
        self.counters = EngineCounters()
        self._stop_strings = StopStringMatcher(tokenizer) if tokenizer is not None else None
        self._stops = StopTable(decoder.vocab_size)
        self.records_experts = record_experts
        self._state = decoder.new_state(kv_cache_tokens)
        if record_experts:
            enable_expert_recording(decoder)
            self._state.records_experts = True
        self._waiting: deque[SequenceGroup] = deque()
        self._running: dict[int, SequenceGroup] = {}  # running, by id
        self._prompts: list[CachedPrompt] = []  # by slot of the state
        self._next_id = 0
        self._rows = RunningRows()
        self._settings: RowSamplingSettings | None = None

    # ------------------------------------------------------------------------------------- requests

    def add(self, request: SamplingRequest) -> int:
        """Queue a request and return its id.

        Raises ValueError, before any work is done, if the request is invalid or can never fit.
        """
        prompt = [int(token) for token in request.prompt]
        params, resumed_tokens = (
            request.params,
            request.resume_from.tokens if request.resume_from is not None else [],
        )
        if not prompt:
            raise ValueError(
                "the prompt is empty: a model needs at least 1 token, for example its BOS"
            )
        if min(prompt) < 0 or max(prompt) >= self.decoder.vocab_size:
            raise ValueError(
                f"prompt tokens lie in [0, {self.decoder.vocab_size}), "
                f"got {min(prompt)} to {max(prompt)}"
            )
        self.decoder.check_images(prompt, request.images)
        if request.num_samples < 1:
            raise ValueError(f"num_samples is at least 1, got {request.num_samples}")
        if resumed_tokens and request.num_samples != 1:
            raise ValueError(
                "a request with a partial sample (resume_from) needs num_samples=1, "
                f"got num_samples={request.num_samples}"
            )
        max_tokens = resolve_max_tokens(self, self._state, len(prompt), params.max_tokens)
        condition = build_stop_condition(
            params.stop, () if params.ignore_eos else self.eos_token_ids
        )
        check_params(params, condition.token_ids, self.decoder.vocab_size, max_tokens)
        if condition.strings and self._stop_strings is None:
            raise ValueError(
                f"stop={params.stop!r} holds strings, which need a tokenizer: "
                "pass a tokenizer to the engine, or stop at ids"
            )
        group = SequenceGroup(
            request_id=self._next_id,
            request=request,
            max_tokens=max_tokens,
            stop_row=self._stops.row_of(condition),
            stop_strings=condition.strings,
            key=((*prompt, *resumed_tokens), *request.prompt_key()),
            num_unfinished=request.num_samples,
            num_resumed=len(resumed_tokens),
            sequences=[None] * request.num_samples,
            stop_ids=sorted(
                token for token in condition.token_ids if token < self.decoder.vocab_size
            ),
        )
        self._next_id += 1
        self._waiting.append(group)
        return group.request_id

    def run(self) -> list[SampleResponse]:
        """Step until all queued requests have finished, and return their responses in order of
        addition.
        """
        finished: list[FinishedRequest] = []
        while self.busy:
            finished.extend(self.step())
        return [done.result() for done in sorted(finished, key=lambda done: done.request_id)]

    # ---------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self) -> list[FinishedRequest]:
        """Admit what fits, sample a token for every running row, return the completed requests."""
        logits = [self._state.decode(self._rows.last_tokens())] if len(self._rows) else []
        self.counters.fed_tokens += len(self._rows)
        logits.extend(self._admit())
        if not logits:
            return []
        logits_NV = logits[0] if len(logits) == 1 else torch.cat([part.float() for part in logits])
        tokens, logprobs = self._sample(logits_NV)
        self._rows.record(tokens, logprobs)
        self.counters.steps += 1
        self.counters.decoded_rows += len(self._rows)
        self.counters.peak_rows = max(self.counters.peak_rows, len(self._rows))
        return self._retire(*self._find_ended(tokens))

    def _admit(self) -> list[Tensor]:
        """Move samples from the waiting to the running queue, first come first served, within the
        budget.

        Returns the logits of their first tokens, from the last position of the prompt.
        """
        if not self._waiting or len(self._rows) >= self.max_rows:
            return []
        admission = self._select_waiting()
        if not admission.entering:
            return self._admit() if self._evict_conversations() else []
        # Sort prompts by length (see `make_bands`). The order does not change any sample.
        slots, prefills = admission.slots, admission.prefills
        prefills.sort(key=lambda group: len(group.key[0]))
        slots.update({group.key: len(self._prompts) + i for i, group in enumerate(prefills)})
        entering = sorted(admission.entering, key=lambda pair: slots[pair[0].key])
        needed = (
            len(slots), admission.longest_prompt, admission.rows, admission.longest_response
        )  # fmt: skip
        self._state.reserve(*needed)
        self._extend_conversations(admission.continued)
        self._prefill(prefills)
        self.counters.peak_cache_tokens = max(
            self.counters.peak_cache_tokens, self._used_cache_tokens(*needed)
        )
        return [self._add_rows([(group, slots[group.key], count) for group, count in entering])]

    def _used_cache_tokens(self, *batch: int) -> int:
        """Return the part of the budget that a batch of this size takes (`DecodeState.cost`)."""
        return self._state.cost(*batch)

    def _select_waiting(self) -> _Admission:
        """Take samples from the waiting queue, first come first served, as long as the budget holds
        them.
        """
        admission = _Admission(
            slots={prompt.key: slot for slot, prompt in enumerate(self._prompts)},
            rows=len(self._rows),
            longest_prompt=int(self._state.prompt_lengths.max(initial=0)),
            longest_response=int(self._rows["max_tokens"].max(initial=1)) - 1,
        )
        slots = admission.slots
        while self._waiting:
            group = self._waiting[0]
            fresh = group.key not in slots
            group.shares_prompt = group.shares_prompt or not (fresh or group.num_admitted)
            longest_prompt = max(admission.longest_prompt, len(group.key[0]))
            longest_response = max(
                admission.longest_response, group.max_tokens - 1 - group.num_resumed
            )
            cached_slot = self._find_cached_slot(group) if fresh else None
            prompts = len(slots) + (fresh and cached_slot is None)
            count = self._count_admissible(
                group, prompts, longest_prompt, admission.rows, longest_response
            )
            if count == 0:
                break
            if cached_slot is not None:
                admission.continued.append((group, cached_slot))
                del slots[self._prompts[cached_slot].key]
                slots[group.key], self._prompts[cached_slot].key = cached_slot, group.key
            elif fresh:
                slots[group.key] = len(slots)
                admission.prefills.append(group)
            admission.longest_prompt = longest_prompt
            admission.longest_response = longest_response
            admission.rows += count
            admission.entering.append((group, count))
            if group.num_admitted + count < group.request.num_samples:
                break
            self._waiting.popleft()
        return admission

    def _count_admissible(
        self,
        group: SequenceGroup,
        prompts: int,
        longest_prompt: int,
        rows: int,
        longest_response: int,
    ) -> int:
        """Return the number of the group's waiting samples that fit now."""
        count = min(group.request.num_samples - group.num_admitted, self.max_rows - rows)
        low, high = 0, count  # the cost grows with the rows: bisect
        while low < high:
            middle = (low + high + 1) // 2
            fits = (
                self._state.cost(prompts, longest_prompt, rows + middle, longest_response)
                <= self.kv_cache_tokens
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _prefill(self, groups: list[SequenceGroup]) -> None:
        """Prefill the prompts of these groups, one prompt per group."""
        if not groups:
            return
        readers: list[PromptLogprobs | None] = []
        for group in groups:
            topk, targets = group.request.topk_prompt_logprobs, group.request.target_prompt_tokens
            readers.append(
                PromptLogprobs(group.key[0], topk=topk, targets=targets)
                if group.request.scores_prompt
                else None
            )
        callbacks, inputs = (
            [reader.add_logits if reader else None for reader in readers],
            make_prefill_kwargs([group.request for group in groups]),
        )
        logits_PV = self._state.prefill([group.key[0] for group in groups], callbacks, **inputs)
        for group, reader, logits_V in zip(groups, readers, logits_PV, strict=True):
            self._prompts.append(
                CachedPrompt(group.key, logits_V, reader, group.request.adapter_id)
            )
            self.counters.prefill_tokens += len(group.key[0])
        self.counters.prefill_prompts += len(groups)

    def _add_rows(self, entering: list[tuple[SequenceGroup, int, int]]) -> Tensor:
        """Add rows for the samples and return the logits of their first tokens, [new rows, V]."""
        requests = [group.request for group, _, _ in entering]
        self._rows.add(
            first_sample=[group.num_admitted for group, _, _ in entering],
            count=[count for _, _, count in entering],
            first_index=[request.first_index for request in requests],
            job=[group.request_id for group, _, _ in entering],
            max_tokens=[group.max_tokens for group, _, _ in entering],
            stop_row=[group.stop_row for group, _, _ in entering],
            has_strings=[bool(group.stop_strings) for group, _, _ in entering],
            seed=[request.seed for request in requests],
            problem=[request.problem for request in requests],
            params=[request.params for request in requests],
        )
        first = len(self._rows) - sum(count for _, _, count in entering)
        for group, slot, count in entering:
            if group.request.resume_from is not None and group.num_resumed:
                self._rows.resume(first, group.request.resume_from)
            first += count
            self._running[group.request_id] = group
            group.reader = self._prompts[slot].reader
            group.num_admitted += count
        slots = np.repeat([slot for _, slot, _ in entering], [count for _, _, count in entering])
        self._state.add_rows(slots)
        self._settings = None
        return torch.stack([self._prompts[slot].logits_V for slot in slots])

    def _sample(self, logits_NV: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Sample a token and its logprob for each row, copied to the host in a single transfer."""
        if self._settings is None:
            self._settings = make_row_settings(
                self._rows, vocab=logits_NV.shape[1], device=logits_NV.device
            )
        return self._sample_rows(logits_NV, self._rows.next_uniforms(), self._settings, self._rows)

    def _sample_rows(
        self,
        logits_NV: Tensor,
        uniform_N: np.ndarray,
        settings: RowSamplingSettings,
        rows: RunningRows,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample a token and its logprob for each of `rows`, which are the newest rows or all."""
        tokens, logprobs = sample_next_tokens(
            logits_NV,
            torch.from_numpy(uniform_N).to(logits_NV.device),
            settings,
            rows,
            self._running,
        )
        # float64 holds every token id exactly
        sampled = (
            self.decoder.broadcast_tokens(torch.stack([tokens.double(), logprobs.double()]))
            .cpu()
            .numpy()
        )
        chosen, bad = sampled[0].astype(np.int64), np.isnan(sampled[1])
        if bad.any():
            self._handle_non_finite(chosen, np.pad(bad, (len(self._rows) - len(bad), 0)))
        return chosen, sampled[1]

    def _handle_non_finite(self, tokens: np.ndarray, non_finite: np.ndarray) -> None:
        """Handle rows with NaN or infinite logits. Raises FloatingPointError."""
        raise make_divergence_error(sorted(set(self._rows["job"][non_finite].tolist())))

    def _find_ended(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows end with the last token, and which of them end because of a stop
        condition.
        """
        rows = self._rows
        stopped = self._stops.table[rows["stop_row"], tokens]
        for row in np.flatnonzero(rows["has_strings"] & ~stopped).tolist():
            strings = self._running[int(rows["job"][row])].stop_strings
            assert self._stop_strings is not None  # `add` rejects strings without a tokenizer
            stopped[row] = self._stop_strings.matches(strings, rows.response(row)[0])
        return stopped | (rows["drawn"] >= rows["max_tokens"]), stopped

    def _retire(self, ended: np.ndarray, stopped: np.ndarray) -> list[FinishedRequest]:
        """Remove the ended rows from the batch, and the prompts that no row needs."""
        if not ended.any():
            return []
        ended_rows = np.flatnonzero(ended)
        finished: list[FinishedRequest] = []
        lists, switch = self._rows.responses(ended_rows), self.decoder.length_switch
        owners = zip(
            ended_rows.tolist(),
            self._rows["job"][ended_rows].tolist(),
            self._rows["sample"][ended_rows].tolist(),
            lists,
            strict=True,
        )
        for row, job_id, sample, (tokens, logprobs) in owners:
            group = self._running[job_id]
            sequence = self._describe_sample(
                row, SampledSequence(tokens, logprobs, "stop" if stopped[row] else "length")
            )
            sequence.temperature = group.request.params.temperature
            sequence.beyond = switch is not None and len(group.request.prompt) > switch.threshold
            group.sequences[sample] = sequence
            self._cache_conversation(row, group, tokens)
            group.num_unfinished -= 1
            self.counters.emitted_tokens += len(tokens)
            if group.num_unfinished == 0:
                finished.append(self._finish(group))
        self.counters.finished_samples += len(ended_rows)
        self._remove_rows(ended)
        return finished

    def _describe_sample(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """Record the weight version in a sample, and the experts of its tokens if these are
        recorded.

        Tokens that were sampled elsewhere, and are only prefilled here, keep the experts of their
        sampling.
        """
        sequence = self._set_version(row, sequence)
        if self.records_experts:
            resumed = self._running[int(self._rows["job"][row])].request.resume_from
            sequence.experts = self._get_experts(row)
            if resumed is not None and resumed.experts is not None and sequence.experts is not None:
                sequence.experts[: len(resumed.experts)] = resumed.experts
        return sequence

    def _get_experts(self, row: int) -> np.ndarray | None:
        """Return the experts of the tokens that a row has been fed, [tokens, B * K]."""
        return self._state.experts_of_row(row)

    def _set_version(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """Record the weight version in a sample: the oldest, and the version of each token if they
        differ.
        """
        versions = self._rows.versions(row, self.version)
        sequence.version = min(versions, default=self.version)
        sequence.versions = versions if len(set(versions)) > 1 else None
        return sequence

    def _remove_rows(self, ended: np.ndarray) -> None:
        """Remove the ended rows and the unused prompts from the batch."""
        source = compact_slots(~ended)
        self._rows.keep_rows(source)
        self._settings = None
        used = np.zeros(len(self._prompts), np.bool_)
        used[self._state.prompt_of_row[source]] = True
        used |= np.array([prompt.conversation is not None for prompt in self._prompts], np.bool_)
        if self._waiting and self._waiting[0].num_admitted:  # its remaining samples need the prompt
            used |= np.array(
                [prompt.key == self._waiting[0].key for prompt in self._prompts], np.bool_
            )
        prompt_source = compact_slots(used)
        self._prompts = [self._prompts[slot] for slot in prompt_source]
        self._state.retain(source, prompt_source)

    # ---------------------------------------------------------------------------- between two steps

    @property
    def busy(self) -> bool:
        """Return whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Sample from `decoder` from the next token on.

        Running rows keep their KV cache. The prompts of new rows are prefilled with the new
        weights.
        """
        if self.records_experts:
            enable_expert_recording(decoder)
        self._rows.record_version(self.version)
        self._evict_conversations()
        self.decoder = self._state.decoder = decoder
        self.version = version
        for slot, prompt in enumerate(self._prompts):
            prompt.key = ("of other weights", slot, prompt.key)

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Cancel a request and discard its samples. Does nothing if the request is unknown or
        finished.
        """
        self._waiting = deque(group for group in self._waiting if group.request_id != request_id)
        if self._running.pop(request_id, None) is not None:
            self._remove_rows(self._rows["job"] == request_id)

    def partial_samples(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        """Return the partial samples of running requests, by request id and sample index.

        `request_ids` selects the requests (None: all). The stop_reason of a partial sample has no
        meaning.
        """
        partial: dict[int, dict[int, SampledSequence]] = {}
        rows = np.flatnonzero(
            np.isin(self._rows["job"], list(self._running if request_ids is None else request_ids))
        )
        for row, lists in zip(rows.tolist(), self._rows.responses(rows), strict=True):
            group, sample = int(self._rows["job"][row]), int(self._rows["sample"][row])
            partial.setdefault(group, {})[sample] = self._describe_sample(
                row, SampledSequence(*lists, "length")
            )
        return partial

    def unfinished_requests(self) -> list[tuple[int, SamplingRequest]]:
        """Return every unfinished request with its partial sample, in order of addition.

        Another engine can resume them. A request of several samples loses its partial samples; the
        same tokens are sampled again.
        """
        requests = {
            group.request_id: group.request for group in (*self._running.values(), *self._waiting)
        }
        partial = {
            key: samples[0]
            for key, samples in self.partial_samples().items()
            if requests[key].num_samples == 1
        }
        return [
            (
                key,
                replace(requests[key], resume_from=partial[key])
                if key in partial
                else requests[key],
            )
            for key in sorted(requests)
        ]

    def _finish(self, group: SequenceGroup) -> FinishedRequest:
        """Build the response of a group whose samples are complete."""
        del self._running[group.request_id]
        sequences = [sequence for sequence in group.sequences if sequence is not None]
        response = SampleResponse(
            sequences, prompt_cache_hit_tokens=len(group.key[0]) if group.shares_prompt else 0
        )
        group.set_prompt_logprobs(response)
        return FinishedRequest(group.request_id, response)
