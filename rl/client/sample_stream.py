"""Provide SampleStream: sampling that accepts requests while it runs, a few engine steps
at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rl.client.sampling_client import SamplingClient
from rl.client.service_context import free_when_collected
from rl.errors import UserError
from rl.runtime import Driver, StepOutput, StepRequest
from rl.sampler import SamplingRequest

# engine steps of a step request: the most decode steps that a new request waits
ENGINE_STEPS = 16


class SampleStream:
    """Sample with an engine that persists between calls, with its batch, its KV cache and the
    tokens sampled so far.

        stream = SampleStream(client)
        params = SamplingParams(max_tokens=64)
        ticket = stream.add(SamplingRequest(prompt=[1, 5, 7], params=params, seed=0, problem=3))
        while stream.busy:
            # at most ENGINE_STEPS engine steps, the same number on every rank
            output = stream.run_steps()  # .finished: {ticket: SampleResponse or ValueError}
        stream.close()

    `add` and `drop` only record what the next step request applies, and may be called from any
    thread at any time. `run_steps` (a single caller at a time) is a verb like others, so other
    submitted verbs (an update, `sample_many`) run between two calls. A server calls it in a loop in
    a separate thread while `busy`, and responds to finished requests. With `partial_tickets` it
    also gets the tokens sampled so far by running samples (`.partial_output[ticket][sample]`, the
    whole sample and not only the new tokens), to stream them. A request that cannot run has its
    error in `finished`, and affects no other request. The random stream of a sample depends only on
    its request, not on other requests in the batch.

    `switch_weights` changes the weights between two calls: running samples continue under the new
    weights, and record the version that sampled each token (`SampledSequence.versions`). The stream
    keeps a reference to its client, so those weights stay loaded as long as the stream needs them.

    `mixed`: sample for several clients in a single batch, all with the same
    `SamplingClient.mix_group` as the first client; each request is added with its client. The
    samples are those that each client would have sampled separately. A sample with non-finite
    logits fails by itself.
    """

    _stream_ids = itertools.count()

    def __init__(self, client: SamplingClient, mixed: bool = False):
        """Create a stream that samples from `client`. Raises UserError if `mixed` and the client
        cannot be mixed.
        """
        if mixed and client.mix_group is None:
            raise UserError(
                "these weights share no base with others (or the generic decoder samples them): "
                "set mixed=False"
            )
        self.client, self.mixed = client, mixed
        self._driver: Driver = client._driver
        self._stream_id = next(SampleStream._stream_ids)
        router = self._driver.router
        # a tensor-parallel group counts as a single rank
        self.num_ranks: int = (
            client.info["world"] // client.info["sampler_tp"]
            if router is None
            else router.sampler_ranks
        )
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._new_requests: list[tuple[int, int, SamplingRequest]] = []
        self._dropped: list[int] = []
        self._conversation_ranks: dict[str, int] = {}  # by conversation
        # by ticket: (rank, cost, number of samples, client) of unfinished requests
        self._active: dict[int, tuple[int, int, int, SamplingClient]] = {}
        # samples of these requests that have not finished; too low after a drop, an error, or a
        # recomputed cache, which samples the members of a request of several again
        self.num_unfinished = 0
        self._rank_loads = [0] * self.num_ranks
        self._recompute = False
        self._finalizer = free_when_collected(self, self._driver, "close_stream", self._stream_id)

    @property
    def busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._active)

    def __len__(self) -> int:
        return len(self._active)

    def add(self, request: SamplingRequest, client: SamplingClient | None = None) -> int:
        """Return a ticket for the request, which starts at the next step request. A conversation
        stays with the rank that has it in its KV cache.

        `client`: the client to sample from, in a mixed stream. Its weights stay loaded until the
        request has ended. Raises UserError if the client does not fit the stream.
        """
        if client is not None and self.mixed:
            if client.mix_group != self.client.mix_group:
                raise UserError(
                    "a mixed stream takes clients with equal `mix_group`: this client's weights "
                    "have another base"
                )
            request = replace(request, adapter_id=client._version_id)
        elif client is not self.client and client is not None:
            raise UserError(
                "a stream that is not mixed samples from a single client: use "
                "SampleStream(client, mixed=True), or another stream"
            )
        elif self.mixed:
            raise UserError(
                "a mixed stream needs the client of each request: call add(request, client)"
            )
        with self._lock:
            ticket = next(self._tickets)
            rank = self._conversation_ranks.get(
                request.conversation or "",
                min(range(self.num_ranks), key=lambda r: (self._rank_loads[r], r)),
            )
            if request.conversation is not None:
                self._conversation_ranks[request.conversation] = rank
            cost = len(request.prompt) + request.num_samples * (request.params.max_tokens or 1024)
            self._rank_loads[rank] += cost
            self._active[ticket] = (rank, cost, request.num_samples, client or self.client)
            self.num_unfinished += request.num_samples
            self._new_requests.append((ticket, rank, request))
            return ticket

    def end_conversation(self, conversation: str) -> None:
        """End a conversation: it no longer has a rank."""
        with self._lock:
            self._conversation_ranks.pop(conversation, None)

    def drop(self, ticket: int) -> None:
        """Cancel a request at the next step request. It does not appear in `finished`."""
        with self._lock:
            if num_samples := self._finish(ticket):
                # one that is still new would otherwise start after the engines cancel the dropped
                self._new_requests = [new for new in self._new_requests if new[0] != ticket]
                self._dropped.append(ticket)
                self.num_unfinished = max(0, self.num_unfinished - num_samples)

    def run_steps(
        self, steps: int = ENGINE_STEPS, *, partial_tickets: Collection[int] | bool = False
    ) -> StepOutput:
        """Start the added requests and run at most `steps` engine steps. Return what has finished.
        `partial_tickets`: tickets to return partial output of; True: all.
        """
        with self._lock:
            arrived, self._new_requests = self._new_requests, []
            dropped, self._dropped = self._dropped, []
            recompute, self._recompute = self._recompute, False
        request = StepRequest(steps, arrived, dropped, recompute, self.mixed, partial_tickets)
        output: StepOutput = self._driver.submit(
            "run_steps", self._stream_id, self.client._version_id, request
        ).result()
        with self._lock:
            num_finished = output.counters.get("finished_samples", 0)
            for ticket, response in list(output.finished.items()):
                num_samples = self._finish(ticket)
                if not num_samples:  # dropped
                    del output.finished[ticket]
                elif isinstance(response, Exception):
                    num_finished += num_samples
                else:
                    self.client._record_samples(response)
            self.num_unfinished = max(0, self.num_unfinished - num_finished) if self.busy else 0
        return output

    def switch_weights(self, client: SamplingClient, *, recompute: bool = False) -> None:
        """Sample from these weights from the next step request on. `recompute`: recompute the KV
        cache with them; otherwise keep it.
        """
        self.client = client
        self._recompute = self._recompute or recompute

    def recompute_cache(self) -> None:
        """Recompute the KV cache at the next step request, as a stream does that continues from
        `unfinished`.
        """
        self._recompute = True

    def unfinished(self) -> Mapping[int, SamplingRequest]:
        """Return the unfinished requests by ticket, with the tokens sampled so far. `add` a request
        to another stream to continue it.
        """
        with self._lock:
            queued = {ticket: request for ticket, _, request in self._new_requests}
            running = self._driver.submit("unfinished", self._stream_id).result()
            requests = {**running, **queued}
            return {ticket: requests[ticket] for ticket in sorted(requests.keys() & self._active)}

    def close(self) -> None:
        """Free what the engines hold. Unfinished requests are lost."""
        self._finalizer()

    def _finish(self, ticket: int) -> int:
        """Remove a request from the rank's load. Return the number of its samples; 0 if it was not
        unfinished.
        """
        if ticket not in self._active:
            return 0
        rank, cost, num_samples, _ = self._active.pop(ticket)
        self._rank_loads[rank] -= cost
        return num_samples

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
