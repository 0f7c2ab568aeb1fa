"""Random workloads for an engine. The expected result of each request comes from an engine that
runs only this request.

Requests of all kinds arrive, the engine steps, requests are cancelled, weights change, and
unfinished requests move to a new engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from sampler_models import add_lora, multistep_engine, paged_engine, tiny_model
from test_block_tables import check_blocks
from test_sampler_mixed import make_family

from rl.sampler import (
    Engine,
    IdleKVCachePool,
    MultiAdapterDecoder,
    SamplingRequest,
    make_decoder,
)
from rl.sampler.decode_state import Prompt
from rl.sampler.running_rows import as_uint64, philox_uniforms
from rl.sampler.token_sampling import find_adjusted_rows
from rl.types import SampledSequence, SamplingParams

EOS = (3,)
PAGES = (2, 4, 8, 32)
LORA = ["q_proj", "o_proj", "down_proj"]


class Letters:
    """A tokenizer with the methods that stop strings need."""

    @staticmethod
    def decode(tokens: Any, **_: Any) -> str:
        return "".join(chr(ord("a") + int(token) % 26) for token in tokens)


def two_models(family: str = "qwen3") -> tuple[Any, Any]:
    """Return a model and a copy with other weights."""
    models = tiny_model(family), tiny_model(family)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.15)
    return models


def two_weights(models: tuple[Any, Any] | None = None, team: Any = None) -> tuple[Any, Any]:
    """Return the decoders of `two_models`. `team`: the process group that shards them."""
    first, other = (
        make_decoder(copy.deepcopy(model), kind="fast", tp_group=team)
        for model in models or two_models()
    )
    return first, other


@cache
def decoders_of(kind: str) -> tuple[Any, Any]:
    """Return the decoders of a kind of engine: `two_weights`, or two of the same adapters."""
    if kind.endswith("adapters"):
        base, adapters = make_family("qwen3", 2)
        decoder = MultiAdapterDecoder(base)
        for number, adapter in enumerate([base, *adapters]):
            decoder.add_adapter(number, adapter, 0)
        return decoder, decoder
    models = two_models("qwen3_moe" if kind.endswith("experts") else "qwen3")
    if kind.endswith("LoRA"):
        first, other = (add_lora(model, LORA) for model in models)
        return two_weights((first, other))
    return two_weights(models)


def pick_model(decoder: Any, request: SamplingRequest) -> Any:
    """Return the decoder that samples a request alone."""
    return decoder.decoders[request.adapter_id] if decoder.multi_adapter else decoder


class ReferenceSampler:
    """Computes the result of a request by itself, with these weights."""

    def __init__(self, decoder: Any):
        self.decoder = decoder
        # keeps the request, so that its id is not reused
        self.known = dict[int, tuple[SamplingRequest, list[SampledSequence]]]()

    def __call__(self, request: SamplingRequest) -> list[SampledSequence]:
        if id(request) not in self.known:
            decoder = pick_model(self.decoder, request)
            engine = Engine(decoder, EOS, Letters(), record_experts=decoder.num_choices > 0)
            engine.add(request)
            self.known[id(request)] = request, engine.run()[0].sequences
        return self.known[id(request)][1]


class RequestGenerator:
    """Generates random requests. `single` gives the expected samples, so the next turn of a
    conversation or a resumed request can be made before the engine has answered.
    """

    def __init__(self, rng: np.random.Generator, single: ReferenceSampler, most: int):
        # most: maximum number of positions of a request
        self.rng, self.single, self.most = rng, single, most
        self.vocab = single.decoder.vocab_size
        self.adapters = len(getattr(single.decoder, "decoders", ()))
        self.beginning = rng.integers(0, self.vocab, most // 2).tolist()  # of many prompts
        self.prompts = [self._prompt() for _ in range(3)]
        self.talks: dict[str, list[int]] = {}  # the text so far
        self.made: list[SamplingRequest] = []

    def _prompt(self) -> list[int]:
        """Return a prompt that may share its beginning with others."""
        rng = self.rng
        shared = self.beginning[: int(rng.integers(0, len(self.beginning) + 1))]
        own = rng.integers(0, self.vocab, int(rng.integers(1, self.most // 4)))
        return [*(shared if rng.random() < 0.7 else self.beginning), *own.tolist()]

    def first(self) -> SamplingRequest:
        rng, mode = self.rng, self.rng.random()
        known = rng.random() < 0.6
        prompt = list(self.prompts[int(rng.integers(3))]) if known else self._prompt()
        more = dict[str, Any]()
        if mode < 0.25:
            name = f"talk {int(rng.integers(2))}"
            prompt, more["conversation"] = self.talks.get(name, prompt), name
        elif mode < 0.35:
            more["include_prompt_logprobs"] = True
        room = self.most - len(prompt)
        params = self._params(int(rng.integers(1, min(26, room + 1))))
        several = 1 if more else int(rng.integers(1, 5))
        more |= dict(problem=len(self.made), seed=4, first_index=int(rng.integers(3)))
        if self.adapters:
            more["adapter_id"] = int(rng.integers(self.adapters))
        request = SamplingRequest(prompt=prompt, num_samples=several, params=params, **more)
        if mode > 0.85:
            request = self._begun(request, more)
        self.made.append(request)
        if "conversation" in more:
            self._said(request, more["conversation"])
        return request

    def _params(self, max_tokens: int) -> SamplingParams:
        rng = self.rng
        stops: list[Any] = [
            None,
            [],
            rng.integers(0, self.vocab, int(rng.integers(1, 4))).tolist(),
            ["ab", "q"],
            ["zz"],
        ]
        cut, more = rng.random(), dict[str, Any]()
        stop = stops[int(rng.integers(len(stops)))]
        if 0.15 < cut < 0.28:
            more = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
        if 0.22 < cut < 0.35:
            more["logit_bias"] = {int(rng.integers(0, self.vocab)): 2.5}
        if 0.2 < cut < 0.3 and not (stop and isinstance(stop[0], str)):
            more["min_tokens"] = int(rng.integers(0, max_tokens + 1))
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            stop=stop,
            min_p=0.1 if 0.1 < cut < 0.2 else 0.0,
            **more,
            top_k=3 if cut < 0.1 else -1,
            top_p=0.8 if 0.05 < cut < 0.15 else 1.0,
            untruncated_logprobs=bool(rng.random() < 0.3),
        )

    def _begun(self, request: SamplingRequest, more: dict[str, Any]) -> SamplingRequest:
        """Return the request with some tokens of its first sample already sampled; the result stays
        the same.
        """
        single = SamplingRequest(prompt=request.prompt, params=request.params, **more)
        whole = self.single(single)[0]
        if len(whole.tokens) < 2 or whole.logprobs is None:
            return single
        upto = int(self.rng.integers(1, len(whole.tokens)))
        begun = SampledSequence(whole.tokens[:upto], whole.logprobs[:upto], version=0)
        going = SamplingRequest(
            prompt=request.prompt, params=request.params, resume_from=begun, **more
        )
        self.single.known[id(going)] = going, [whole]
        return going

    def _said(self, request: SamplingRequest, name: str) -> None:
        messages = [
            *request.prompt,
            *self.single(request)[0].tokens,
            *self.rng.integers(0, self.vocab, int(self.rng.integers(1, 4))).tolist(),
        ]
        if len(messages) < self.most - 2:
            self.talks[name] = messages
        else:
            self.talks.pop(name, None)


def check_readers(engine: Engine) -> None:
    """Check that sequences in the same block agree in all tokens up to its end."""
    manager, texts = engine._state.block_manager, dict[int, list[int]]()
    for i, length in enumerate(manager.rows["length"].tolist()):
        group = engine._running[int(engine._rows["request_id"][i])]
        text = [*group.request.prompt, *engine._rows.response(i)[0].tolist()]
        for j, block in enumerate(manager.row_table(i)):
            part = text[: min((j + 1) * manager.block_size, length)]
            other = texts.setdefault(block, part)
            count = min(len(part), len(other))
            assert part[:count] == other[:count] and count > j * manager.block_size


KINDS = ("plain", "paged", "stepped", "plain, drafts", "paged, drafts")
KINDS += ("plain, experts", "paged, experts", "stepped, experts", "plain, adapters")
KINDS += ("paged, adapters", "stepped, adapters", "stepped, LoRA")


def engine_of(
    kind: str,
    decoder: Any,
    rng: np.random.Generator,
    most: int,
    page: int,
    version: int = 0,
    kept: IdleKVCachePool | None = None,
) -> Engine:
    """Return an engine with room for little more than a single request."""
    pages = int(rng.integers(1, 24))
    max_rows = int(rng.integers(1, 12))
    look = int(rng.integers(1, 10))
    settings: dict[str, Any] = dict(max_rows=max_rows, version=version)
    settings["record_experts"] = decoder.num_choices > 0
    if kind.endswith("drafts"):
        settings["num_speculative_tokens"] = look
    if kind.startswith("plain"):
        settings["kv_cache_tokens"] = 2 * most + page * pages
        engine = Engine(decoder, EOS, Letters(), **settings)
    else:
        settings |= dict(
            kv_cache_tokens=page * (-(-most // page) + pages), page=page, idle_pool=kept
        )
        engine = (
            multistep_engine(decoder, EOS, Letters(), steps_per_sync=look, **settings)
            if kind.startswith("stepped")
            else paged_engine(decoder, EOS, Letters(), **settings)
        )
        engine.runs_ahead = kind.startswith("stepped")
        # half of them admit while pages are free, and preempt
        engine.expects_lengths = look % 2 == 0
    if engine.speculation is not None:  # draft also where it does not pay
        engine.speculation.controller.may_draft = lambda rows: True
    return engine


class EngineWorkload:
    """Runs a workload through an engine. `finished` is keyed by the index of the request in
    `requests_seen.made`.
    """

    def __init__(
        self, kind: str, seed: int, decoders: tuple[Any, Any], single: ReferenceSampler, change: str
    ):
        """Set up the workload. `change`: new weights have other numbers ("other"), the same numbers
        ("same"), or never come ("none").
        """
        self.kind, self.change, self.decoders = kind, change, decoders
        # Requests must not depend on the engine's speed, so they have a separate random stream.
        self.rng, asking = np.random.default_rng(seed), np.random.default_rng(seed + 1_000_000)
        self.page, self.most = int(self.rng.choice(PAGES)), int(self.rng.integers(20, 90))
        self.requests_seen = RequestGenerator(asking, single, self.most)
        self.version, self.decoder = 0, decoders[0]
        self.between = IdleKVCachePool()  # the KV cache pool that the next engine takes over
        self.engine = engine_of(
            kind, decoders[0], self.rng, self.most, self.page, kept=self.between
        )
        self.place: dict[int, int] = {}  # engine's request id -> index in `made`
        self.finished: dict[int, list[SampledSequence]] = {}
        self.first_seen: dict[int, int] = {}  # the weight version at the first submission
        self.dropped: set[int] = set()
        self.happened: dict[str, int] = dict.fromkeys(
            "waited looks ahead adjusted dropped changed moved cached begun drafted accepted".split(),
            0,
        )

    def all(self) -> None:
        for _ in range(int(self.rng.integers(6, 14))):
            self._something()
        while self.engine.busy:
            self._step()
        self._count()
        tables = self.engine._blocks
        if tables is not None:
            assert tables.pool.num_free == len(tables.pool.ref_counts)
            assert not len(tables.rows)
            assert not tables.prompts
        expected = set(range(len(self.requests_seen.made))) - self.dropped
        assert set(self.finished) == expected, (set(self.finished) ^ expected, self.dropped)

    def _something(self) -> None:
        what, engine = self.rng.random(), self.engine
        if what < 0.45:
            for _ in range(int(self.rng.integers(1, 4))):
                self._ask(self.requests_seen.first(), len(self.requests_seen.made) - 1)
        elif what < 0.75:
            for _ in range(int(self.rng.integers(1, 12))):
                self._step()
        elif what < 0.82 and self.place:
            number = int(self.rng.choice(list(self.place)))
            engine.cancel(number)
            self.happened["dropped"] += 1
            self.dropped.add(self.place.pop(number))
        elif what < 0.90 and self.change != "none":
            self.version += 1
            self.decoder = (
                self.decoders[self.version % 2] if self.change == "other" else self.decoder.fork()
            )
            engine.change_weights(self.decoder, self.version)
            self.happened["changed"] += 1
        elif what < 0.95:
            self._move()
        else:
            self._look()

    def _ask(self, request: SamplingRequest, place: int) -> None:
        self.place[self.engine.add(request)] = place
        self.first_seen.setdefault(place, self.version)
        self.happened["begun"] += request.resume_from is not None

    def _step(self) -> None:
        """Take a step; half of the engines on a device take several with nothing between them."""
        steps, engine = 1, self.engine
        if engine.steps_per_sync and self.rng.random() < 0.5:
            steps = engine.max_steps = int(self.rng.integers(1, 30))
        while steps > 0 and engine.busy:
            before = engine.counters.steps
            for done in engine.step():
                place = self.place.pop(done.request_id)
                assert place not in self.finished
                self.finished[place] = done.result().sequences
            steps -= max(engine.counters.steps - before, 1)
            if engine.max_steps is not None:
                is_ahead = engine._in_flight is not None
                self.happened["ahead"] += is_ahead
                self.happened["adjusted"] += is_ahead and find_adjusted_rows(engine._rows).any()
                engine.max_steps = max(steps, 0) or None
        assert engine._in_flight is None or not len(engine._in_flight.columns)
        if self.engine.is_paged and engine._in_flight is None:
            check_blocks(self.engine._state.block_manager)
            check_readers(self.engine)

    def _move(self) -> None:
        """Move to another engine with the current progress. Requests with several samples start
        over.
        """
        unfinished = self.engine.unfinished_requests()
        assert [self.place.get(number) for number, _ in unfinished] == list(self.place.values())
        self._count()
        self.engine.close()
        self.engine = engine_of(
            self.kind, self.decoder, self.rng, self.most, self.page, self.version, self.between
        )
        places, self.place = list(self.place.values()), {}
        for place, (_, request) in zip(places, unfinished, strict=True):
            self._ask(request, place)
        self.happened["moved"] += 1

    def _look(self) -> None:
        """Check that partial samples are prefixes of the final samples, and that reading them
        changes nothing.
        """
        once, again = self.engine.partial_samples(), self.engine.partial_samples()
        assert {
            key: {s: first.tokens for s, first in samples.items()} for key, samples in once.items()
        } == {
            key: {s: first.tokens for s, first in samples.items()} for key, samples in again.items()
        }
        if self.change == "other":
            return
        for number, samples in once.items():
            single = self.requests_seen.single(self.requests_seen.made[self.place[number]])
            for sample, first in samples.items():
                assert first.tokens == single[sample].tokens[: len(first.tokens)]

    def _count(self) -> None:
        self.happened["waited"] += getattr(self.engine, "preemptions", 0)
        self.happened["looks"] += getattr(self.engine._device_steps, "num_syncs", 0)
        self.happened["cached"] += self.engine.counters.prefix_cached_tokens
        self.happened["drafted"] += self.engine.counters.drafted_tokens
        self.happened["accepted"] += self.engine.counters.accepted_tokens


def on_a_border(decoder: Any, request: SamplingRequest, index: int, drawn: list[int]) -> bool:
    """Return whether the random number of the next token is within 1e-6 of the border between two
    tokens. Rounding, which depends on the rest of the batch, then decides the token. Seen once
    in some 200,000 tokens, 9e-8 from the border.
    """
    params, logits = request.params, list[torch.Tensor]()
    if params.temperature == 0 or params.changes_distribution:
        return False
    with torch.inference_mode():
        prompt, reader = [*request.prompt, *drawn], lambda start, some: logits.append(some)
        pick_model(decoder, request).read_prompts([Prompt(prompt, reader)])
    ends = (torch.cat(logits)[-1].double() / params.temperature).softmax(-1).cumsum(-1)
    seed, problem, member, place = (
        as_uint64(n)
        for n in (request.seed, request.problem, request.first_index + index, len(drawn))
    )
    return bool((ends - float(philox_uniforms(seed, problem, member, place))).abs().min() < 1e-6)


def same(
    mine: SampledSequence,
    single: SampledSequence,
    upto: int | None = None,
    border: Callable[[list[int]], bool] | None = None,
) -> None:
    """Check the first `upto` tokens (None: all tokens, their experts, and the stop reason).
    `border`: returns whether the next token, and all after it, may differ.
    """
    count = len(single.tokens) if upto is None else upto
    other = next(
        (
            i
            for i, (a, b) in enumerate(
                zip(mine.tokens[:count], single.tokens[:count], strict=False)
            )
            if a != b
        ),
        None,
    )
    if other is not None and border is not None and border(single.tokens[:other]):
        return np.testing.assert_allclose(mine.logprobs[:other], single.logprobs[:other], atol=2e-4)
    assert mine.tokens[:count] == single.tokens[:count]
    np.testing.assert_allclose(mine.logprobs[:count], single.logprobs[:count], atol=2e-4)
    if upto is None:
        assert len(mine.tokens) == count and mine.stop_reason == single.stop_reason
        if single.experts is not None:  # two for each token and layer, in any order
            experts = (np.sort(s.experts.reshape(-1, 2)) for s in (mine, single))
            np.testing.assert_array_equal(*experts)


def play(
    kind: str, seed: int, decoders: tuple[Any, Any], change: str, split: Any = None
) -> dict[str, int]:
    """Run a workload and return the counts of events. Raises AssertionError if a sample, a version
    or a page is wrong. `split`: the engine's decoders if several ranks shard them.
    """
    single = ReferenceSampler(decoders[0])
    item = EngineWorkload(kind, seed, split or decoders, single, change)
    item.all()
    others = ReferenceSampler(decoders[1])
    compared = 0
    for place, sequences in item.finished.items():
        request = item.requests_seen.made[place]
        for i, mine in enumerate(sequences):
            versions = mine.versions or [mine.version] * len(mine.tokens)
            assert len(versions) == len(mine.tokens)
            assert versions == sorted(versions)
            assert min(versions) == mine.version
            if change != "other":
                same(mine, single(request)[i], None, partial(on_a_border, decoders[0], request, i))
                compared += len(mine.tokens)
            elif (
                request.resume_from is None
                and len(set(v % 2 for v in versions)) == 1
                and max(versions) - min(versions) < 2
            ):
                border = partial(on_a_border, decoders[versions[0] % 2], request, i)
                # with weights of a single kind from the prompt on
                same(mine, (single, others)[versions[0] % 2](request)[i], None, border)
                compared += len(mine.tokens)
            elif request.resume_from is None:
                first = next(n for n, v in enumerate(versions) if v != versions[0])
                same(mine, (single, others)[versions[0] % 2](request)[i], first)
                compared += first
    return item.happened | {"compared": compared, "requests": len(item.requests_seen.made)}
