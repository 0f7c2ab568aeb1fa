"""Continuous batching: a step function over a waiting and a running queue.

A step decodes the running rows, lets waiting requests in as far as the budget allows (reading each
prompt once for its whole group), draws one token for every row and retires the finished ones.
Requests enter in the order they were added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.biases import draw_biased
from rl.sampler.cache import compaction
from rl.sampler.conversations import Conversations
from rl.sampler.decoder import Decoder
from rl.sampler.jobs import Job, Prompt, check_biases, diverged, read_with, tokens_to_draw
from rl.sampler.prompt_logprobs import PromptReader
from rl.sampler.requests import Counters, Finished, Request
from rl.sampler.rows import FROM_PARAMS, Rows
from rl.sampler.stops import StopStrings, StopTable, stop_condition
from rl.sampler.token_sampling import RowSettings, row_settings
from rl.types import SampledSequence, SampleResponse


class Engine(Conversations):
    """Samples from a decoder within a budget of `kv_cache_tokens` (positions held in the cache) and
    `max_rows` rows at once.

    `eos_token_ids` is the union of what tokenizer and generation config name. `tokenizer` is needed
    for stop strings alone. `max_context` bounds the tokens fed, prompt and response, and is by
    default the model's own limit. `version`: of the decoder's weights, which samples carry.
    Requests may be added, and the weights changed, between any two steps.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Any = None,
        max_context: int | None = None,
        kv_cache_tokens: int = 262_144,
        max_rows: int = 1024,
        version: int = 0,
    ):
        limits = [limit for limit in (max_context, decoder.max_positions) if limit is not None]
        if min(kv_cache_tokens, max_rows, *limits) < 1:
            raise ValueError(
                f"kv_cache_tokens={kv_cache_tokens}, max_rows={max_rows}, max_context={limits}: at least 1 each"
            )
        self.decoder = decoder
        self.version = version
        self.eos_token_ids = tuple(sorted({int(token) for token in eos_token_ids}))
        self.max_context = min(limits) if limits else None
        self.kv_cache_tokens = kv_cache_tokens
        self.max_rows = max_rows
        self.counters = Counters()
        self._stop_strings = StopStrings(tokenizer) if tokenizer is not None else None
        self._stops = StopTable(decoder.vocab_size)
        self._state = decoder.new_state(kv_cache_tokens)
        self._waiting: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}  # running, by id
        self._prompts: list[Prompt] = []  # by slot of the state
        self._next_id = 0
        self._rows = Rows()
        self._settings: RowSettings | None = None

    # ------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> int:
        """Queue a request; its id back. Errors name what can never fit, before any work is done."""
        prompt = [int(token) for token in request.prompt]
        params, begun = request.params, request.begun.tokens if request.begun is not None else []
        if not prompt:
            raise ValueError(
                "the prompt is empty; a model needs at least one token to go on from (its BOS, say)"
            )
        if min(prompt) < 0 or max(prompt) >= self.decoder.vocab_size:
            raise ValueError(
                f"prompt tokens lie in [0, {self.decoder.vocab_size}), got {min(prompt)} to {max(prompt)}"
            )
        self.decoder.check_images(prompt, request.images)
        if request.num_samples < 1:
            raise ValueError(f"num_samples is at least 1, got {request.num_samples}")
        if begun and request.num_samples != 1:
            raise ValueError(
                f"a request that has begun is of one sample, got num_samples={request.num_samples}"
            )
        max_tokens = tokens_to_draw(self, self._state, len(prompt), params.max_tokens)
        condition = stop_condition(params.stop, () if params.ignore_eos else self.eos_token_ids)
        check_biases(params, condition.token_ids, self.decoder.vocab_size, max_tokens)
        if condition.strings and self._stop_strings is None:
            raise ValueError(
                f"stop={params.stop!r} holds strings, which need a tokenizer: give the engine one, or stop at ids"
            )
        job = Job(
            request_id=self._next_id,
            request=request,
            max_tokens=max_tokens,
            stop_row=self._stops.row(condition),
            stop_strings=condition.strings,
            key=((*prompt, *begun), *request.reads()),
            left=request.num_samples,
            begun=len(begun),
            sequences=[None] * request.num_samples,
            stop_ids=sorted(
                token for token in condition.token_ids if token < self.decoder.vocab_size
            ),
        )
        self._next_id += 1
        self._waiting.append(job)
        return job.request_id

    def run(self) -> list[SampleResponse]:
        """Step until everything queued has finished; the responses in the order they were added."""
        finished: list[Finished] = []
        while self.busy:
            finished.extend(self.step())
        return [done.given() for done in sorted(finished, key=lambda done: done.request_id)]

    # ---------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One token for every running row, after letting in what fits; the requests that are
        complete back.
        """
        logits = [self._state.decode(self._rows.last_tokens())] if len(self._rows) else []
        self.counters.fed_tokens += len(self._rows)
        logits.extend(self._admit())
        if not logits:
            return []
        logits_NV = logits[0] if len(logits) == 1 else torch.cat([part.float() for part in logits])
        tokens, logprobs = self._draw(logits_NV)
        self._rows.record(tokens, logprobs)
        self.counters.steps += 1
        self.counters.decoded_rows += len(self._rows)
        self.counters.peak_rows = max(self.counters.peak_rows, len(self._rows))
        return self._retire(*self._ended(tokens))

    def _admit(self) -> list[Tensor]:
        """Move samples from the waiting to the running queue, first come first served, while the
        budget holds.

        Returns their first logits: of the prompt's last position.
        """
        if not self._waiting or len(self._rows) >= self.max_rows:
            return []
        slots = {prompt.key: slot for slot, prompt in enumerate(self._prompts)}
        readings: list[Job] = []
        going_on: list[tuple[Job, int]] = []  # of conversations in the cache, with their slots
        entering: list[tuple[Job, int]] = []  # job, samples
        rows = len(self._rows)
        longest_prompt = int(self._state.prompt_lengths.max(initial=0))
        longest_response = int(self._rows["max_tokens"].max(initial=1)) - 1
        while self._waiting:
            job = self._waiting[0]
            fresh = job.key not in slots
            job.shares = job.shares or not (fresh or job.entered)
            shape = (
                max(longest_prompt, len(job.key[0])),
                max(longest_response, job.max_tokens - 1 - job.begun),
            )
            kept = self._kept(job) if fresh else None
            count = self._how_many(
                job, len(slots) + (fresh and kept is None), shape[0], rows, shape[1]
            )
            if count == 0:
                if not entering and self._forget_conversations():
                    return self._admit()
                break
            if kept is not None:
                going_on.append((job, kept))
                del slots[self._prompts[kept].key]
                slots[job.key], self._prompts[kept].key = kept, job.key
            elif fresh:
                slots[job.key] = len(slots)
                readings.append(job)
            longest_prompt, longest_response = shape
            rows += count
            entering.append((job, count))
            if job.entered + count < job.request.num_samples:
                break
            self._waiting.popleft()
        if not entering:
            return []
        # Prompts of similar length side by side (see `make_bands`); it changes no sample.
        readings.sort(key=lambda job: len(job.key[0]))
        slots.update({job.key: len(self._prompts) + i for i, job in enumerate(readings)})
        entering.sort(key=lambda pair: slots[pair[0].key])
        needed = (len(slots), longest_prompt, rows, longest_response)
        self._state.reserve(*needed)
        self.counters.peak_cache_tokens = max(
            self.counters.peak_cache_tokens, self._state.cost(*needed)
        )
        self._extend(going_on)
        self._prefill(readings)
        return [self._enter([(job, slots[job.key], count) for job, count in entering])]

    def _how_many(
        self, job: Job, prompts: int, longest_prompt: int, rows: int, longest_response: int
    ) -> int:
        """How many of the job's waiting samples fit now."""
        count = min(job.request.num_samples - job.entered, self.max_rows - rows)
        low, high = 0, count  # the cost grows with the rows: bisect
        while low < high:
            middle = (low + high + 1) // 2
            fits = (
                self._state.cost(prompts, longest_prompt, rows + middle, longest_response)
                <= self.kv_cache_tokens
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _prefill(self, jobs: list[Job]) -> None:
        """Read the prompts of these jobs, one each."""
        if not jobs:
            return
        readers: list[PromptReader | None] = []
        for job in jobs:
            topk, targets = job.request.topk_prompt_logprobs, job.request.target_prompt_tokens
            readers.append(
                PromptReader(job.key[0], topk=topk, targets=targets)
                if job.request.scores_prompt
                else None
            )
        show, also = (
            [reader.read if reader else None for reader in readers],
            read_with([job.request for job in jobs]),
        )
        logits_PV = self._state.prefill([job.key[0] for job in jobs], show, **also)
        for job, reader, logits_V in zip(jobs, readers, logits_PV, strict=True):
            self._prompts.append(Prompt(job.key, logits_V, reader, job.request.weights))
            self.counters.prefill_tokens += len(job.key[0])
        self.counters.prefill_prompts += len(jobs)

    def _enter(self, entering: list[tuple[Job, int, int]]) -> Tensor:
        """Give the samples rows; their first logits back, [new rows, V]."""
        requests = [job.request for job, _, _ in entering]
        self._rows.enter(
            first_sample=[job.entered for job, _, _ in entering],
            count=[count for _, _, count in entering],
            first_index=[request.first_index for request in requests],
            job=[job.request_id for job, _, _ in entering],
            max_tokens=[job.max_tokens for job, _, _ in entering],
            stop_row=[job.stop_row for job, _, _ in entering],
            has_strings=[bool(job.stop_strings) for job, _, _ in entering],
            seed=[request.seed for request in requests],
            problem=[request.problem for request in requests],
            biased=[bool(request.params.logit_bias) for request in requests],
            **{
                name: [getattr(request.params, name) for request in requests]
                for name in FROM_PARAMS
            },
        )
        first = len(self._rows) - sum(count for _, _, count in entering)
        for job, slot, count in entering:
            if job.request.begun is not None and job.begun:
                self._rows.go_on(first, job.request.begun)
            first += count
            self._jobs[job.request_id] = job
            job.reader = self._prompts[slot].reader
            job.entered += count
        slots = np.repeat([slot for _, slot, _ in entering], [count for _, _, count in entering])
        self._state.enter(slots)
        self._settings = None
        return torch.stack([self._prompts[slot].logits_V for slot in slots])

    def _draw(self, logits_NV: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """A token and its logprob for each row, brought to the host in one transfer."""
        if self._settings is None:
            how = [
                self._rows[name]
                for name in ("temperature", "top_k", "top_p", "untruncated_logprobs", "min_p")
            ]
            self._settings = row_settings(*how, vocab=logits_NV.shape[1], device=logits_NV.device)
        uniform_N = torch.from_numpy(self._rows.uniforms()).to(logits_NV.device)
        tokens, logprobs = draw_biased(logits_NV, uniform_N, self._settings, self._rows, self._jobs)
        # float64 holds every token id exactly
        both = self.decoder.agreed(torch.stack([tokens.double(), logprobs.double()])).cpu().numpy()
        chosen, bad = both[0].astype(np.int64), np.isnan(both[1])
        if bad.any():
            self._no_numbers(chosen, bad)
        return chosen, both[1]

    # the logits of some rows say nothing
    def _no_numbers(self, tokens: np.ndarray, bad: np.ndarray) -> None:
        raise diverged(sorted(set(self._rows["job"][bad].tolist())))

    def _ended(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which rows end with the token just recorded, and which of them because of a stop."""
        rows = self._rows
        stopped = self._stops.table[rows["stop_row"], tokens]
        for row in np.flatnonzero(rows["has_strings"] & ~stopped).tolist():
            strings = self._jobs[int(rows["job"][row])].stop_strings
            assert self._stop_strings is not None  # `add` refuses strings without a tokenizer
            stopped[row] = self._stop_strings.found(strings, rows.response(row)[0])
        return stopped | (rows["drawn"] >= rows["max_tokens"]), stopped

    def _retire(self, ended: np.ndarray, stopped: np.ndarray) -> list[Finished]:
        """Take the ended rows out of the batch, and the prompts that no row needs any more."""
        if not ended.any():
            return []
        gone = np.flatnonzero(ended)
        finished: list[Finished] = []
        lists, switch = self._rows.responses(gone), self.decoder.length_switch
        owners = zip(
            gone.tolist(),
            self._rows["job"][gone].tolist(),
            self._rows["sample"][gone].tolist(),
            lists,
            strict=True,
        )
        for row, job_id, sample, (tokens, logprobs) in owners:
            job = self._jobs[job_id]
            sequence = self._labelled(
                row, SampledSequence(tokens, logprobs, "stop" if stopped[row] else "length")
            )
            sequence.temperature = job.request.params.temperature
            sequence.beyond = switch is not None and len(job.request.prompt) > switch.at
            job.sequences[sample] = sequence
            self._keep(row, job, tokens)
            job.left -= 1
            self.counters.emitted_tokens += len(tokens)
            if job.left == 0:
                finished.append(self._finish(job))
        self.counters.finished_samples += len(gone)
        self._leave(ended)
        return finished

    def _labelled(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """With the version of the weights that drew it: the oldest, and each token's where there
        are several.
        """
        versions = self._rows.versions(row, self.version)
        sequence.version = min(versions, default=self.version)
        sequence.versions = versions if len(set(versions)) > 1 else None
        return sequence

    def _leave(self, ended: np.ndarray) -> None:
        source = compaction(~ended)
        self._rows.keep(source)
        self._settings = None
        used = np.zeros(len(self._prompts), np.bool_)
        used[self._state.prompt_of_row[source]] = True
        used |= np.array([prompt.conversation is not None for prompt in self._prompts], np.bool_)
        if self._waiting and self._waiting[0].entered:  # its other samples still want their prompt
            used |= np.array(
                [prompt.key == self._waiting[0].key for prompt in self._prompts], np.bool_
            )
        prompt_source = compaction(used)
        self._prompts = [self._prompts[slot] for slot in prompt_source]
        self._state.leave(source, prompt_source)

    # ---------------------------------------------------------------------------- between two steps

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._jobs)

    @torch.inference_mode()
    def change_weights(self, decoder: Decoder, version: int) -> None:
        """What is drawn from now on is of `decoder`. Running rows keep what they have read; prompts
        of new rows are read anew.
        """
        self._rows.now_of(self.version)
        self._forget_conversations()
        self.decoder = self._state.decoder = decoder
        self.version = version
        for slot, prompt in enumerate(self._prompts):
            prompt.key = ("of other weights", slot, prompt.key)

    @torch.inference_mode()
    def drop(self, request_id: int) -> None:
        """Forgets a request, whatever has been drawn of it. One that is not there (any more) is
        none to forget.
        """
        self._waiting = deque(job for job in self._waiting if job.request_id != request_id)
        if self._jobs.pop(request_id, None) is not None:
            self._leave(self._rows["job"] == request_id)

    def drawn(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        """What running samples (of these requests) have drawn so far, by request and sample;
        stop_reason says nothing yet.
        """
        found: dict[int, dict[int, SampledSequence]] = {}
        rows = np.flatnonzero(
            np.isin(self._rows["job"], list(self._jobs if request_ids is None else request_ids))
        )
        for row, lists in zip(rows.tolist(), self._rows.responses(rows), strict=True):
            job, sample = int(self._rows["job"][row]), int(self._rows["sample"][row])
            found.setdefault(job, {})[sample] = self._labelled(
                row, SampledSequence(*lists, "length")
            )
        return found

    def unfinished(self) -> list[tuple[int, Request]]:
        """Every request that has not finished, in the order they were added, with what is drawn of
        it: another engine may go on.

        Of a request of several samples nothing is kept but what is asked: its samples are drawn
        again, the same ones.
        """
        asked = {job.request_id: job.request for job in (*self._jobs.values(), *self._waiting)}
        alone = {
            key: samples[0] for key, samples in self.drawn().items() if asked[key].num_samples == 1
        }
        return [
            (key, replace(asked[key], begun=alone[key]) if key in alone else asked[key])
            for key in sorted(asked)
        ]

    def _finish(self, job: Job) -> Finished:
        del self._jobs[job.request_id]
        sequences = [sequence for sequence in job.sequences if sequence is not None]
        response = SampleResponse(
            sequences, prompt_cache_hit_tokens=len(job.key[0]) if job.shares else 0
        )
        job.say_of_prompt(response)
        return Finished(job.request_id, response)
