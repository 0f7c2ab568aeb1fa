"""Run continuous batching: a step function over the queues of a `Scheduler`.

A step decodes the running rows, admits waiting requests as far as the budget allows (the prompt of
a group is prefilled once), samples a token for every row, and removes the finished rows.

Over a paged cache, the device can run several steps per host sync (device_steps.py). The samples
are the same. A call of `step` that admits requests prefills their prompts and samples their first
tokens; their rows join the steps of the device in the next call. All rows run one step at a time
while a row has more than 1,024 biases, penalties that a table of 2^26 token counts does not hold,
or (of several adapters) a rank above 256. Only the host can check stop strings; tokens sampled past
a stop string are discarded. While no waiting request can be admitted, the next steps are launched
before the last ones are read: in `run`, and within the `max_steps` of a caller of `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import compact_slots
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_factory import enable_expert_recording, find_decoder_features
from rl.sampler.decoder_fast import MultiAdapterDecoder
from rl.sampler.device_steps import Chunk, DeviceSteps
from rl.sampler.kv_cache_pool import IdleKVCachePool
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import (
    FinishedRequest,
    SamplingRequest,
    SequenceGroup,
    check_params,
    check_request,
    make_divergence_error,
)
from rl.sampler.scheduler import Scheduler
from rl.sampler.speculative_decoder import SpeculativeDecoder
from rl.sampler.stop_conditions import StopStringMatcher, StopTable, build_stop_condition
from rl.sampler.token_sampling import make_row_settings, sample_next_tokens
from rl.types import SampledSequence, SampleResponse
from rl.types.feature_table import check_features

DEFAULT_CACHE_TOKENS = 262_144
STEPS_PER_SYNC = 8  # steps per host sync


class Engine(Scheduler):
    """Sample from a decoder with `kv_cache_tokens` positions in the cache and at most `max_rows`
    rows.

    `eos_token_ids` is the union of the ids in the tokenizer and the generation config. `tokenizer`
    is needed only for stop strings. `max_context` bounds the fed tokens (prompt and response); the
    default is the model's limit. `version` is the weight version of the decoder, recorded in the
    samples. `record_experts`: the samples hold the experts of their tokens (router replay).
    Requests may be added, and the weights changed, between any two steps.

    `block_size`: positions of a block of a paged cache, for the fast decoder (None: a contiguous
    cache). `idle_pool` provides the pool of blocks, and receives it when the engine is closed.
    `sizes`: the sizes of all expected requests (`max_blocks`); the pool is smaller than the budget
    if they need less (None: unknown). `steps_per_sync`: most tokens of each row in each `step`,
    which the device samples without the host (None: the host runs each step).
    `enable_prefix_caching`: prompts that begin with tokens whose keys and values are in the cache
    prefill only the others; logprobs change by rounding.
    `num_speculative_tokens`: most draft tokens of each row in a step (speculative_decoder.py).

    A decoder of several models (`MultiAdapterDecoder`) samples each request from the model that its
    `adapter_id` selects. If the weights of a request produce no numbers (NaN), only the requests of
    these weights fail; with a single model `step` raises FloatingPointError. Raises ValueError if a
    limit is less than 1, UserError if features do not combine (`rl.types.feature_table`) or if
    experts cannot be recorded.
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
        *,
        block_size: int | None = None,
        idle_pool: IdleKVCachePool | None = None,
        sizes: Iterable[tuple[int, int, int]] | None = None,
        steps_per_sync: int | None = None,
        enable_prefix_caching: bool = True,
        num_speculative_tokens: int = 0,
    ):
        limits = [limit for limit in (max_context, decoder.max_positions) if limit is not None]
        if min(kv_cache_tokens, max_rows, *limits) < 1:
            raise ValueError(
                f"kv_cache_tokens={kv_cache_tokens}, max_rows={max_rows}, max_context={limits}: "
                "at least 1 each"
            )
        features = find_decoder_features(decoder) | {
            "plain cache" if block_size is None else "paged cache",
            *(["device steps"] if steps_per_sync is not None else []),
            *(["speculative decoding"] if num_speculative_tokens else []),
        }
        check_features(features)
        if steps_per_sync is not None and steps_per_sync < 1:
            raise ValueError(f"steps_per_sync={steps_per_sync}: at least 1")
        if record_experts:
            enable_expert_recording(decoder)
        super().__init__(
            decoder, kv_cache_tokens, max_rows, block_size, idle_pool, sizes, enable_prefix_caching
        )
        self.max_context = min(limits) if limits else None
        self.version = version
        self.eos_token_ids = tuple(sorted({int(token) for token in eos_token_ids}))
        self._stop_strings = StopStringMatcher(tokenizer) if tokenizer is not None else None
        self._stops = StopTable(decoder.vocab_size)
        self.records_experts = self._state.records_experts = record_experts
        self.speculation = (
            SpeculativeDecoder(
                num_speculative_tokens, self._rows, self._state, self._blocks, self.counters
            )
            if num_speculative_tokens
            else None
        )
        self._next_id = 0
        self._errors: dict[int, FloatingPointError] = {}  # of requests that diverged in this step
        self._has_non_finite = False  # whether the cache holds NaN or infinity
        self.owns_decoder = False  # no other engine samples from the decoder until this one closes
        self.steps_per_sync = steps_per_sync
        # Maximum number of tokens per row of all next calls of `step` together, which the caller
        # makes without another call between them. None or 0: at most `steps_per_sync` in the next
        # call, and any call may follow, so no chunk is launched ahead.
        self.max_steps: int | None = None
        # whether a chunk is launched before the one before it is read, so that the device does not
        # wait for the host
        self.runs_ahead = decoder.device.type == "cuda"
        self._in_flight: Chunk | None = None
        self._device_steps: DeviceSteps | None = None
        if steps_per_sync is not None:
            assert self._pool is not None
            positions = min([kv_cache_tokens, *limits])
            self._device_steps = DeviceSteps(
                self._rows, self._running, self._state, self._stops, self._pool, max_rows,
                positions, steps_per_sync,
            )  # fmt: skip

    @property
    def is_paged(self) -> bool:
        """Return whether the KV cache is paged."""
        return self._blocks is not None

    def close(self) -> None:
        """Release the pool of a paged cache to the next engine, unless it holds NaN or infinity.

        Attention multiplies masked values by 0, and 0 times NaN is NaN. No request may follow.
        """
        if self._pool is not None and self._state.kv:
            self._state.kv = []
            if self.owns_decoder and isinstance(self.decoder, MultiAdapterDecoder):
                for number in list(self.decoder.decoders):
                    self.decoder.remove_adapter(number)
                self._pool.mixed_decoder = self.decoder
            if not self._has_non_finite:
                self._idle_pool.store(self._pool)

    # ------------------------------------------------------------------------------------- requests

    def add(self, request: SamplingRequest) -> int:
        """Queue a request and return its id.

        Raises ValueError, before any work is done, if the request is invalid or can never fit.
        """
        prompt, params = [int(token) for token in request.prompt], request.params
        resumed_tokens = request.resume_from.tokens if request.resume_from is not None else []
        tokens = (*prompt, *resumed_tokens)
        if isinstance(self.decoder, MultiAdapterDecoder):
            self.decoder.check_adapter(request.adapter_id)
        check_request(request, self.decoder.vocab_size)
        self.decoder.check_images(prompt, request.images)
        max_tokens = self._resolve_max_tokens(len(prompt), params.max_tokens)
        condition = build_stop_condition(
            params.stop, () if params.ignore_eos else self.eos_token_ids
        )
        check_params(
            params, condition.token_ids, self.decoder.vocab_size, max_tokens, resumed_tokens
        )
        if condition.strings and self._stop_strings is None:
            raise ValueError(
                f"stop={params.stop!r} holds strings, which need a tokenizer: "
                "pass a tokenizer to the engine, or stop at ids"
            )
        group = SequenceGroup(
            request_id=self._next_id,
            request=request,
            max_tokens=max_tokens,
            stop_row=self._stops.row_of(condition.token_ids, self._used_stop_rows),
            stop=condition,
            key=(tokens, *request.prompt_key()),
            hashes=self._hash_tokens(tokens, request),
            num_unfinished=request.num_samples,
            num_resumed=len(resumed_tokens),
            sequences=[None] * request.num_samples,
        )
        self._next_id += 1
        self._waiting.append(group)
        return group.request_id

    def run(
        self, on_finish: Callable[[FinishedRequest], object] = lambda done: None
    ) -> list[SampleResponse]:
        """Step until all queued requests have finished, and return their responses in order of
        addition. `on_finish` is called with each as soon as it has finished.
        """
        finished: list[FinishedRequest] = []
        self._runs_to_end = True
        try:
            while self.busy:
                for done in self.step():
                    on_finish(done)
                    finished.append(done)
        finally:
            self._runs_to_end = False
            self._drop_in_flight()
        return [done.result() for done in sorted(finished, key=lambda done: done.request_id)]

    # ---------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self) -> list[FinishedRequest]:
        """Admit what fits, sample a token for every running row (up to `steps_per_sync` tokens on
        the device), return the completed requests and the errors of requests that diverged.
        """
        finished = self._run_step()
        failed, self._errors = self._errors, {}
        if not failed:
            return finished
        for request_id in failed:
            self.cancel(request_id)
        self._state.replace_non_finite()
        return [item for item in finished if item.request_id not in failed] + [
            FinishedRequest(number, error) for number, error in failed.items()
        ]

    def _run_step(self) -> list[FinishedRequest]:
        if self._in_flight is not None:
            return self._process_chunk(self._in_flight)
        self._resume()
        if self._device_steps is not None and self._device_steps.can_run():
            return self._step_on_device(self._device_steps)
        self._preempt_newest()
        if self.speculation and not self._may_admit():
            drafted = self.speculation.draft(self._running, self.max_rows - len(self._rows))
            if drafted is not None:
                return self._verify(self.speculation, drafted)
        logits = [self._state.decode(self._rows.last_tokens())] if len(self._rows) else []
        self.counters.fed_tokens += len(self._rows)
        logits.extend(self._admit())
        if not logits:
            return []
        logits_NV = logits[0] if len(logits) == 1 else torch.cat([part.float() for part in logits])
        return self._sample_rows(logits_NV, self._rows)

    def _verify(self, speculation: SpeculativeDecoder, rows: RunningRows) -> list[FinishedRequest]:
        """Feed the rows' last tokens and their drafts, and sample a token after each. `rows`: an
        entry for each token that is fed.
        """
        tokens, logprobs = self._sample(speculation.feed(rows), rows)
        self._count_steps(1, len(tokens))
        drafts = rows.next_tokens()
        _, ended, stopped = self._find_ended(rows, tokens[None])
        rows.replace_next(tokens, logprobs)
        last = speculation.accept(tokens == drafts, ended)
        return self._retire(ended[last], stopped[last])

    def _sample_rows(self, logits_NV: Tensor, rows: RunningRows) -> list[FinishedRequest]:
        """Sample a token of each of `rows`, which are the newest rows or all, and remove the rows
        that end. No other row ends: it would have ended with its last token.
        """
        tokens, logprobs = self._sample(logits_NV, rows)
        ends = self._find_ended(rows, tokens[None])
        return self._append_tokens(tokens[None], logprobs[None], *ends)

    def _append_tokens(
        self,
        tokens_SN: np.ndarray,
        logprobs_SN: np.ndarray,
        counts: np.ndarray,
        ended: np.ndarray,
        stopped: np.ndarray,
    ) -> list[FinishedRequest]:
        """Append the first `counts` of these tokens to each of the newest N rows, and remove those
        that end (`_find_ended`).
        """
        self._rows.record(tokens_SN, logprobs_SN, counts)
        self._count_steps(int(counts.max()), int(counts.sum()))
        older = np.zeros(len(self._rows) - len(counts), np.bool_)
        return self._retire(np.concatenate([older, ended]), np.concatenate([older, stopped]))

    def _count_steps(self, steps: int, sampled: int) -> None:
        """Count steps in which this number of tokens was sampled."""
        self.counters.steps += steps
        self.counters.decoded_rows += sampled
        self.counters.peak_rows = max(self.counters.peak_rows, len(self._rows))

    def _sample(self, logits_NV: Tensor, rows: RunningRows) -> tuple[np.ndarray, np.ndarray]:
        """Sample a token and its logprob for each of `rows`: all rows, or a view of some."""
        if rows.settings is None:
            rows.settings = make_row_settings(
                rows, vocab=self.decoder.vocab_size, device=self.decoder.device
            )
        tokens, logprobs = sample_next_tokens(
            logits_NV,
            torch.from_numpy(rows.next_uniforms()).to(logits_NV.device),
            rows.settings,
            rows,
            self._running,
        )
        # float64 holds every token id exactly
        sampled = (
            self.decoder.broadcast_tokens(torch.stack([tokens.double(), logprobs.double()]))
            .cpu()
            .numpy()
        )
        chosen = sampled[0].astype(np.int64)
        non_finite = np.isnan(sampled[1])
        self._handle_non_finite(non_finite, rows)
        chosen[non_finite] = 0  # these rows are removed at the end of this step
        return chosen, sampled[1]

    def _handle_non_finite(self, non_finite: np.ndarray, rows: RunningRows) -> None:
        """Handle the rows of this mask [N], which have NaN or infinite logits: of several models,
        record an error for each of their requests. Raises FloatingPointError for a single model.
        """
        if not non_finite.any():
            return
        numbers = sorted(set(rows["request_id"][non_finite].tolist()))
        if not self.decoder.multi_adapter:
            self._has_non_finite = True
            raise make_divergence_error(numbers)
        self._errors |= {number: make_divergence_error([number]) for number in numbers}

    def _find_ended(
        self, rows: RunningRows, tokens_SN: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how many of the next S tokens of each row precede its end, with the token that
        ends it; whether one does; and whether it does because of a stop condition, [N] each.
        """
        size, vocab = len(tokens_SN), self._stops.vocab
        # `take` of flat places is several times as fast as an index of two dimensions
        stopped = self._stops.table.take(rows["stop_row"] * vocab + tokens_SN)
        for row in np.flatnonzero(rows["has_strings"]).tolist():
            strings = self._running[int(rows["request_id"][row])].stop.strings
            assert self._stop_strings is not None  # `add` rejects strings without a tokenizer
            response = np.concatenate([rows.response(row)[0], tokens_SN[:, row]])
            stopped[:, row] |= self._stop_strings.find_match(strings, response, stopped[:, row])
        stop = np.where(stopped.any(0), stopped.argmax(0) + 1, size + 1)
        end = np.minimum(stop, rows["max_tokens"] - rows["num_sampled"])
        counts = np.minimum(end, size)
        return counts, counts == end, counts == stop

    def _retire(self, ended: np.ndarray, stopped: np.ndarray) -> list[FinishedRequest]:
        """Remove the ended rows from the batch, and the prompts that no row needs."""
        if not ended.any():
            return []
        if self.is_paged:
            self._lengths.record(self._rows["num_sampled"][ended], stopped[ended])
        finished, switch = list[FinishedRequest](), self.decoder.length_switch
        for row, group, sequence in self._read_samples(np.flatnonzero(ended)):
            request = group.request
            if stopped[row]:
                sequence.stop_reason = "stop"
            sequence.temperature = request.params.temperature
            sequence.beyond = switch is not None and len(request.prompt) > switch.threshold
            group.sequences[int(self._rows["sample"][row])] = sequence
            if group.request_id not in self._errors and self._may_continue(group):
                self._cache_row(row, group, group.num_resumed + self._state.response_lengths[row])
            group.num_unfinished -= 1
            self.counters.emitted_tokens += len(sequence.tokens)
            if group.num_unfinished == 0:
                del self._running[group.request_id]
                finished.append(FinishedRequest(group.request_id, group.make_response()))
        self.counters.finished_samples += int(ended.sum())
        self._remove_rows(ended)
        return finished

    def _read_samples(
        self, rows: np.ndarray
    ) -> Iterator[tuple[int, SequenceGroup, SampledSequence]]:
        """Yield each of `rows`, its request and its tokens so far, with their weight version (the
        oldest, and the version of each token if they differ) and their experts if these are
        recorded.

        Rows after the running rows are the preempted rows. Tokens that were sampled elsewhere, and
        are only prefilled here, keep the experts of their sampling.
        """
        for row, lists in zip(rows.tolist(), self._rows.responses(rows), strict=True):
            group = self._running[int(self._rows["request_id"][row])]
            request, sequence = group.request, SampledSequence(*lists, "length")
            if isinstance(self.decoder, MultiAdapterDecoder):
                sequence.version = self.decoder.versions[request.adapter_id or 0]
            else:
                sequence.version, sequence.versions = self._rows.find_versions(row, self.version)
            if self.records_experts:
                later, resumed = row - len(self._state.prompt_of_row), request.resume_from
                sequence.experts = (
                    self._state.experts_of_row(row) if later < 0 else self._preempted[later].experts
                )
                if (
                    resumed is not None
                    and resumed.experts is not None
                    and sequence.experts is not None
                ):
                    sequence.experts[: len(resumed.experts)] = resumed.experts
            yield row, group, sequence

    # ------------------------------------------------------------------------------- device steps

    def _step_on_device(self, device: DeviceSteps) -> list[FinishedRequest]:
        """Admit requests and sample their first tokens, or run steps of all rows on the device."""
        if self._may_admit() and (logits := self._admit()):
            logits_NV = torch.cat(logits)
            return self._sample_rows(logits_NV, self._rows.newest(len(logits_NV)))
        if not len(self._rows):
            return []
        most = min(device.steps_per_sync, self.max_steps or device.steps_per_sync)
        count = device.plan(most)
        if count < 1:
            self._preempt_newest()
            count = device.plan(most)
        return self._process_chunk(device.launch(count, *self._plan_graphs()))

    def _process_chunk(self, chunk: Chunk) -> list[FinishedRequest]:
        """Launch the next chunk if nothing else can happen before it, then wait for this one and
        process its tokens.
        """
        assert self._device_steps is not None
        most = self._device_steps.steps_per_sync
        if not self._runs_to_end:
            most = min(most, (self.max_steps or 0) - chunk.count)
        self._in_flight = None
        if self.runs_ahead and not self._preempted and not self._may_admit():
            self._in_flight = self._device_steps.launch_next(chunk, most)
        if self._in_flight is None:  # the next launch reads them while the device waits
            self._rows.generate_uniforms(self._device_steps.steps_per_sync, chunk.count)
        try:
            return self._process_steps(chunk.columns, *chunk.read())
        except BaseException:
            self._drop_in_flight()  # it continues rows whose tokens this chunk did not record
            raise

    def _drop_in_flight(self) -> None:
        """Drop the chunk in flight, if there is one: its tokens are sampled again."""
        chunk, self._in_flight = self._in_flight, None
        if self._device_steps:
            self._device_steps.drop(chunk)

    def _process_steps(
        self,
        columns: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        experts: np.ndarray | None,
    ) -> list[FinishedRequest]:
        """Process the tokens and logprobs [steps, device rows] of a chunk. `columns`: the device
        row of each running row. `experts` [steps, device rows, B * K]: of the fed tokens.
        """
        if not len(columns):
            return []
        rows, state = self._rows, self._state
        tokens_SN, logprobs_SN = (values.take(columns, 1) for values in (tokens, logprobs))
        counts, ended, stopped = self._find_ended(rows, tokens_SN)
        is_sampled = np.arange(len(tokens))[:, None] < counts
        self._handle_non_finite((np.isnan(logprobs_SN) & is_sampled).any(0), rows)
        if experts is not None:
            step, row = np.nonzero(is_sampled)
            state.record_experts(experts[step, columns[row]], row)
        state.response_lengths = state.response_lengths + counts
        self.counters.fed_tokens += int(counts.sum())
        if self._in_flight is not None:
            self._in_flight.columns = columns[compact_slots(~ended)]
        return self._append_tokens(tokens_SN, logprobs_SN, counts, ended, stopped)

    # ---------------------------------------------------------------------------- between two steps

    @property
    def busy(self) -> bool:
        """Return whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def keep_weights(self, adapter_ids: Iterable[int]) -> None:
        """Remove all weights of a `MultiAdapterDecoder` except `adapter_ids` and those of running
        or waiting requests.
        """
        assert isinstance(self.decoder, MultiAdapterDecoder)
        keep = {
            *adapter_ids,
            *(group.request.adapter_id for group in (*self._running.values(), *self._waiting)),
        }
        if removed := self.decoder.decoders.keys() - keep:
            self._drop_in_flight()  # its ended rows read these weights
        for number in removed:
            self.decoder.remove_adapter(number)

    @torch.inference_mode()
    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Sample from `decoder` from the next token on.

        Running rows keep their KV cache. The prompts of new rows are prefilled with the new
        weights, and so are preempted rows when they are resumed. Cached prefixes are forgotten.
        """
        if self.records_experts:
            enable_expert_recording(decoder)
        self._rows.record_version(self.version, [row.fields for row in self._preempted])
        self._state.forget_prefixes()
        self.decoder = self._state.decoder = decoder
        self.version = version
        # The cached logits are of the old weights: no new row may start from them.
        prompts = (*self._state.prompts, *(row.prompt for row in self._preempted))
        for number, prompt in enumerate({id(prompt): prompt for prompt in prompts}.values()):
            prompt.key = ("of other weights", number, prompt.key)
        self._retain(np.arange(len(self._rows)))

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Cancel a request and discard its samples. Does nothing if the request is unknown or
        finished.
        """
        self._waiting = deque(group for group in self._waiting if group.request_id != request_id)
        for row in self._preempted:
            if row.age[0] == request_id:
                self._rows.release(row.fields)
        self._preempted = [row for row in self._preempted if row.age[0] != request_id]
        if self._running.pop(request_id, None) is not None:
            self._drop_in_flight()  # on the device these rows would write to their blocks again
            self._remove_rows(self._rows["request_id"] == request_id)

    def partial_samples(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        """Return the partial samples of running requests, by request id and sample index.

        `request_ids` selects the requests (None: all). The stop_reason of a partial sample has no
        meaning.
        """
        partial: dict[int, dict[int, SampledSequence]] = {}
        running = len(self._rows)
        for preempted in self._preempted:
            self._rows.restore(preempted.fields)
        rows = np.flatnonzero(
            np.isin(
                self._rows["request_id"],
                list(self._running if request_ids is None else request_ids),
            )
        )
        for row, group, sequence in self._read_samples(rows):
            sample = int(self._rows["sample"][row])
            partial.setdefault(group.request_id, {})[sample] = sequence
        self._rows.reorder(np.arange(running))
        return partial

    def unfinished_requests(self) -> list[tuple[int, SamplingRequest]]:
        """Return every unfinished request with its partial sample, in order of addition.

        Another engine can resume them. A request of several samples loses its partial samples; the
        same tokens are sampled again.
        """
        requests = {
            group.request_id: group.request for group in (*self._running.values(), *self._waiting)
        }
        for key, samples in self.partial_samples().items():
            if requests[key].num_samples == 1:
                requests[key] = replace(requests[key], resume_from=samples[0])
        return sorted(requests.items())
