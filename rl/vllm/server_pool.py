"""Distribute samples over vLLM servers, and load weights into all of them."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl.errors import UserError, warn_on_rank_zero
from rl.types import LoraConfig
from rl.vllm.sample_reply import VllmServerError
from rl.vllm.started_server import StartedServer
from rl.vllm.transfer_validation import MAX_DIFFERENCE, ServerWeights
from rl.vllm.vllm_server import SUPPORTED_RELEASES, VllmServer
from rl.vllm.weight_folder import WeightFolder

ATTEMPTS = 3  # of a sample, on different servers where there are several
_RETRY_SECONDS = 0.5  # wait before another attempt if no server is left, times its number
_MAX_THREADS = 512  # requests that a process waits for at once
_CHECK_TOKENS = 32  # of the text that `check_scores` compares
_SCORE_THREADS = 16  # threads for scores, which do not wait for samples
_COPIES = 2  # of the weights in their folder: those of the servers, and the next
_PARAMETER_BYTES = 4  # at most
T = TypeVar("T")


class RejectedRequestError(UserError):
    """Report a request that a server refuses and that another attempt cannot help."""


class UnavailableServerError(UserError):
    """Report that no server has the weights or returns a right sample."""

    status_code = 503


class ServerPool:
    """Hold the servers, and the weights that they have.

    `nonce`: equal on all ranks and different in other runs: weights of other runs on the same
    server are detected. `root`: folder of the weights that servers load. `started_server`: one that
    this run starts, in place of `urls`; `sleeps`: it frees its memory in `sleep`. `needs_experts`:
    samples hold the experts of their tokens. `needs_adapters`: the servers hold the adapters of
    many clients. `max_rows`: most samples in flight. Raises UserError if a server of `urls` does
    not answer, or was started with settings that cannot work.
    """

    def __init__(
        self,
        urls: Sequence[str],
        nonce: str,
        *,
        folder: str | None = None,
        request_seconds: float = 600.0,
        max_rows: int = _MAX_THREADS,
        started_server: StartedServer | None = None,
        sleeps: bool = False,
        needs_experts: bool = False,
        needs_adapters: bool = False,
    ):
        servers = [VllmServer(url, request_seconds) for url in urls]
        self.servers = list({server.url: server for server in servers}.values())
        for server in self.servers:
            server.check()
            if needs_experts and not server.returns_experts:
                raise UserError(
                    f"router_replay needs the experts of each token, which {server.url} does not "
                    "return: start it with --enable-return-routed-experts, or turn router_replay "
                    "off"
                )
        self._may_sleep, self._is_awake = sleeps, False
        if started_server is not None:
            self.servers = [started_server]
        self.unties_head = any(not server.tied_head for server in self.servers)
        self.uses_adapters = all(server.max_lora_rank for server in self.servers)
        if not self.uses_adapters and any(server.max_lora_rank for server in self.servers):
            raise UserError(
                "some vLLM servers of sampler_url were started with --enable-lora and others "
                "without: start all of them with it (LoRA adapters are sent as adapters), or none "
                "(they are merged)"
            )
        if needs_adapters and not self.uses_adapters:
            raise UserError(
                "serve.py samples LoRA adapters of many clients from vLLM servers, and these hold "
                "one model: start them with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (docs/vllm.md)"
            )
        self.adapters: weakref.WeakSet[Any] = weakref.WeakSet()  # decoders (VllmDecoder)
        self.nonce, self._folder = nonce, folder
        self.last_loaded_id = ""  # of the weights that the servers loaded last
        self._resident_ids: set[str] = set()  # of the model that they hold, or of its adapters
        self._resident_learner: Hashable = None
        self.executor = ThreadPoolExecutor(min(max_rows, _MAX_THREADS), "vllm")
        self._score_executor = ThreadPoolExecutor(_SCORE_THREADS, "vllm-score")
        self._max_rows, self._free_rows = max_rows, threading.Semaphore(max_rows)
        self._next_in_line = threading.Lock()  # held by the request that waits for free rows
        self.is_closed = False
        # atexit's functions run after the threads have executed all that is queued
        threading._register_atexit(_close_pool, weakref.ref(self))  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._labels: dict[str, tuple[Hashable, int]] = {}  # learner and version by weights id
        self._load_history: list[str] = []  # ids of the weights in order of their loads
        self.num_parameters = 0  # of the largest model whose weights are sent
        self._root: WeightFolder | None = None
        # of rank 0: folders that a server may load again, and folders that no decoder needs
        self._loaded_folders: set[Path] = set()
        self._released_folders: set[Path] = set()

    def check_adapters(self, lora: LoraConfig, has_tied_head: bool) -> None:
        """Raise UserError if the servers cannot load such adapters. `has_tied_head`: the head of
        the model is the matrix of its embedding.
        """
        parts = {
            "train_experts": lora.train_experts,
            "train_unembed, of a head that is tied to the embedding,": (
                lora.train_unembed
                and has_tied_head
                and any(server.tied_head for server in self.servers)
            ),
        }
        for part in [name for name, is_trained in parts.items() if is_trained]:
            raise UserError(
                f"{part} makes LoRA adapters that vLLM does not load as adapters: turn it off, or "
                "start the servers without --enable-lora, so that adapters are merged"
            )
        for server in self.servers:
            server.check_lora_rank(lora.rank)

    @property
    def max_context(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return min(server.max_context for server in self.servers)

    @property
    def max_samples(self) -> int:
        """Return the most samples of a request: every server takes them, and `max_rows` allows
        them.
        """
        return min(self._max_rows, *(server.max_samples for server in self.servers))

    @property
    def root(self) -> Path:
        """Return the folder of the weights, which is removed at the end."""
        if self._root is None:
            parent = None if self._folder is None else Path(self._folder).expanduser()
            num_bytes = _COPIES * _PARAMETER_BYTES * self.num_parameters
            self._root = WeightFolder(parent, num_bytes)
        return self._root.path

    def add_weights(self, learner_id: Hashable, version: int) -> str:
        """Return the id of further weights, the same on all ranks."""
        weights_id = f"{self.nonce}-{len(self._labels) + 1}"
        self._labels[weights_id] = (learner_id, version)
        return weights_id

    def release_folder(self, folder: Path) -> None:
        """Remove a folder of weights, later if a server may have to load it again."""
        self._released_folders.add(folder)
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._released_folders - self._loaded_folders:
            shutil.rmtree(folder, ignore_errors=True)
            self._released_folders.discard(folder)

    def find_versions(self, weights_id: str, first_id: str) -> dict[str, int]:
        """Return by weights id the versions that a sample may have tokens of: of the learner of
        `weights_id`, those that were loaded since the sample was requested, when its server held
        `first_id`, or may be loading. An adapter may have any: its name shows that it sampled.
        """
        learner_id, _ = self._labels[weights_id]
        with self._lock:
            loads, labels = list(self._load_history), list(self._labels.items())
        since = loads[::-1].index(first_id) + 1 if first_id in loads else 0
        ids = [key for key, _ in labels]
        newer = ids[ids.index(first_id) :] if first_id in ids else []
        allowed = {weights_id, *loads[len(loads) - since :], *newer}
        if self._is_adapter(weights_id):
            allowed = set(ids)
        return {
            key: version
            for key, (learner, version) in labels
            if learner == learner_id and key in allowed
        }

    def _is_adapter(self, weights_id: str) -> bool:
        return any(decoder.weights_id == weights_id for decoder in list(self.adapters))

    def is_resident(self, weights_id: str) -> bool:
        """Return whether the servers hold weights: the last, or an adapter on the same model."""
        return weights_id in self._resident_ids

    def find_used_adapters(self) -> list[str]:
        """Return the ids of the adapters that this rank samples from, or may sample from."""
        return [decoder.weights_id for decoder in list(self.adapters)]

    def load_weights(
        self, weights: ServerWeights, used_adapters: Collection[str] = ()
    ) -> list[bool]:
        """Load weights into all servers, also into those that failed before. Return which servers
        have them, for `set_weights` on all ranks.

        `used_adapters`: of all ranks, which servers may load again. Raises UnavailableServerError
        if no server has the weights, or a server kept other weights.
        """
        folders = {weights.folder, weights.model.folder}
        folders |= {weights.folder.parent / name for name in used_adapters}
        self._loaded_folders |= folders
        for server in self.servers:
            weights.model.read_manifest(server.dtype)

        def load(server: VllmServer) -> VllmServerError | None:
            try:
                server.load_weights(weights)
            except VllmServerError as error:
                return error
            return None

        with ThreadPoolExecutor(len(self.servers)) as executor:
            errors = list(executor.map(load, self.servers))
        self._loaded_folders = folders
        self._remove_folders()
        failures = [error for error in errors if error is not None]
        messages = [str(error) for error in failures]
        for failure in failures:
            if failure.has_wrong_weights:
                raise UnavailableServerError(f"{failure}. Nothing was sampled with these weights")
        if len(messages) == len(self.servers):
            advice = self.servers[0].remedy
            if any(server.reads_folders for server in self.servers):
                path = f"Every server must see {weights.folder} under this path (sampler_folder)"
                advice = f"{path}; {advice}"
            raise UnavailableServerError(
                f"no vLLM server has the new weights: {messages[0]}. {advice}"
            )
        for message in messages:
            warn_on_rank_zero(f"{message}: no samples are sent to it until the next weights")
        return [error is None for error in errors]

    @property
    def can_sleep(self) -> bool:
        """Return whether a server of this run holds memory that `sleep` frees, as on all ranks."""
        return self._may_sleep and self._is_awake

    def sleep(self) -> None:
        """Let the server of this run free its memory until weights are loaded. All ranks call it,
        without samples in flight.
        """
        self._is_awake = False
        self._resident_ids.clear()
        for server in self.servers:
            server.sleep()

    def set_weights(
        self,
        weights_id: str,
        has_weights: Sequence[bool],
        limits: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Record which servers have loaded weights, and their (max_context, max_samples), which
        only rank 0 knows of a server that it started. The others get no samples until the next
        weights.
        """
        for server, values in zip(self.servers, limits, strict=False):
            server.max_context, server.max_samples = values
        with self._lock:
            self.last_loaded_id, self._is_awake = weights_id, True
            learner_id, _ = self._labels[weights_id]
            if not self._is_adapter(weights_id) or learner_id != self._resident_learner:
                self._resident_ids.clear()
            self._resident_ids.add(weights_id)
            self._resident_learner = learner_id
            self._load_history.append(weights_id)
            for server, has in zip(self.servers, has_weights, strict=True):
                server.needs_reload = not has
                server.last_loaded_id = weights_id if has else ""

    def close(self) -> None:
        """Drop the requests that have not been sent, send no request again, and end the server that
        this run started.
        """
        self.is_closed = True
        for server in self.servers:
            server.close()
        for executor in (self.executor, self._score_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def reserve_rows(self, num_samples: int) -> Iterator[None]:
        """Wait until the samples in flight with these, at most `max_samples`, are at most
        `max_rows`. The time limit of a request would otherwise include its time in the queue of a
        server.
        """
        with self._next_in_line:
            for _ in range(num_samples):
                self._free_rows.acquire()
        try:
            yield
        finally:
            self._free_rows.release(num_samples)

    def send(
        self,
        work: Callable[[VllmServer], T],
        is_needed: Callable[[], bool] = lambda: True,
        num_samples: int = 1,
    ) -> T:
        """Return the result of `work`, which makes `num_samples` samples, on the server with the
        least load.

        A server that fails gets no more samples until it has loaded weights, and its work is sent
        to another server, or to the same if no other has the weights. `is_needed`: whether a
        failed request is sent again; otherwise its VllmServerError is raised. Raises
        UnavailableServerError, naming the server, after `ATTEMPTS` attempts. An attempt during
        which a server of this run failed does not count. Raises RejectedRequestError if the server
        refuses the request.
        """
        attempt = 0
        while True:
            with self._lock:
                usable = [server for server in self.servers if not server.needs_reload]
                current = [s for s in self.servers if s.last_loaded_id == self.last_loaded_id]
                server = min(usable or current, key=lambda server: server.num_running)
                server.num_running += num_samples
                weights_id, num_failures = server.last_loaded_id, server.num_failures
            try:
                return work(server)
            except VllmServerError as error:
                if self.is_closed or not is_needed():
                    raise
                server.wait_for_recovery(error, self._labels)
                if server.num_failures > num_failures:
                    continue
                attempt += 1
                with self._lock:  # unless it failed before, or has loaded weights since
                    is_new = not server.needs_reload and server.last_loaded_id == weights_id
                    server.needs_reload |= is_new and not error.rejected
                if is_new and not error.rejected:
                    warnings.warn(
                        f"{error}: its samples are requested again, and it gets no others until "
                        "the next weights unless no server is left",
                        stacklevel=2,
                    )
                if error.rejected or attempt == ATTEMPTS:
                    kind = RejectedRequestError if error.rejected else UnavailableServerError
                    raise kind(
                        f"{error} ({attempt} attempts). No sample of it was used; {server.remedy}"
                    ) from error
            finally:
                with self._lock:
                    server.num_running -= num_samples
            if all(server.needs_reload for server in self.servers):
                if self.uses_adapters:
                    self._resident_ids.clear()  # the next verb loads them again
                time.sleep(_RETRY_SECONDS * attempt)

    def score(
        self, sequences: Sequence[Sequence[int]], weights_id: str, adapter: str | None = None
    ) -> list[list[float | None]]:
        """Return the logprob of each token of each sequence at temperature 1; entry 0 is None."""

        def score(tokens: Sequence[int]) -> list[float | None]:
            return self.send(lambda server: self._score(server, tokens, weights_id, adapter))

        return list(self._score_executor.map(score, sequences))

    def _score(
        self,
        server: VllmServer,
        tokens: Sequence[int],
        weights_id: str,
        adapter: str | None = None,
    ) -> list[float | None]:
        """Return the logprobs of a sequence from one server. Raises VllmServerError."""
        first_id = server.last_loaded_id
        logprobs, versions = server.score(tokens, adapter)
        # another adapter may have been loaded since this one
        known = {weights_id} if adapter is None else self.find_versions(weights_id, first_id).keys()
        if not known >= set(versions) or (not versions and len(tokens) > 1):
            raise VllmServerError(
                server.url, f"scored with the weights {versions}, {weights_id} were expected"
            )
        return logprobs

    @property
    def max_logprobs(self) -> int:
        """Return the most logprobs of a position that every server returns; -1: no limit."""
        return min((s.max_logprobs for s in self.servers if s.max_logprobs >= 0), default=-1)

    def check_scores(
        self, weights_id: str, compute_logprobs: Callable[[list[int]], list[float]]
    ) -> None:
        """Compare the logprobs of a sample by each server with `compute_logprobs(tokens)`, those of
        all tokens but the first.

        Find wrong tensors that vLLM's checksums do not cover (packed matrices, a tied head). Raises
        UserError if the logprobs differ by more than 0.1 nats on average.
        """
        params: dict[str, Any] = {
            "max_tokens": min(_CHECK_TOKENS, self.max_context - 2),
            "ignore_eos": True,
        }
        params |= {"temperature": 1.0, "seed": 0, "logprobs": 0, "detokenize": False}
        for server in [server for server in self.servers if not server.needs_reload]:
            tokens, logprobs = self._sample_and_score(server, params, weights_id)
            gap = float(np.abs(np.subtract(logprobs, compute_logprobs(tokens))).mean())
            if not gap <= MAX_DIFFERENCE:
                raise UserError(
                    f"the vLLM server {server.url} computes other logprobs than the model whose "
                    f"weights it has loaded: they differ by {gap:.2g} nats on average. Start it "
                    "with a model of the same shape and dtype (a tied head on a CPU: docs/vllm.md)"
                )

    def _sample_and_score(
        self, server: VllmServer, params: dict[str, Any], weights_id: str
    ) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a sample of one server, and the logprobs of all but the first."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                tokens = [0, *server.sample([0], params)["choices"][0]["token_ids"]]
                return tokens, np.array(self._score(server, tokens, weights_id)[1:], np.float64)
            except VllmServerError as error:
                if attempt == ATTEMPTS or error.rejected:
                    raise UserError(f"{error}; {server.remedy}") from error
                server.wait_for_recovery(error, self._labels)
            except (KeyError, IndexError, TypeError) as error:
                raise UserError(
                    f"the vLLM server {server.url} returned a sample in another form than vLLM "
                    f"{SUPPORTED_RELEASES} "
                    f"({type(error).__name__}: {error}); {server.remedy}"
                ) from error
        raise AssertionError("unreachable")


def _close_pool(reference: weakref.ref[ServerPool]) -> None:
    if (pool := reference()) is not None:
        pool.close()
