"""Test malformed requests to the clients' verbs, from fixed seeds."""

import atexit
import functools
import math
import random
import tempfile
import time

import numpy as np
import pytest
import torch
from fuzzing import ACCEPTED, REFUSED
from helpers import random_datums

from rl import ServiceClient
from rl.losses import LOSSES
from rl.sampler import Engine
from rl.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SamplingParams,
    TensorData,
)

VOCABULARY, CONTEXT = 14, 512
ODD = [
    math.nan, math.inf, -math.inf, 1e40, -1e40, -1, 0, 1, 2, 14, -0.0, 0.5, 1.5, 1e-320, 2**31,
    2**63, 2**70, -(2**63), True, None, "", "x", "0.5", b"1", [], [0.5], [[1, 2], [3]], {},
    {"a": 1}, (), object(), 1j, range(3), np.float32("nan"), np.int64(3), np.zeros((2, 2)),
    np.array(["a"]), torch.zeros(3), torch.full((3,), math.nan),
]  # fmt: skip
PROMPT = ModelInput.from_ints([3, 4, 12, 5, 6, 13])
KEEP = AdamParams(learning_rate=0.0)


class FuzzTarget:
    """A model that receives every request, and the expected result of a valid request."""

    def __init__(self, service):
        self.client = service.create_full_training_client("tiny:addition", seed=2, value_head=True)
        self.sampler = self.client.save_weights_and_get_sampling_client()
        self.good = random_datums(2, seed=9)
        self.expected = self.scores()
        self.tokens = [s.tokens for s in self.ask().result().sequences]
        self.taken = self.refused = self.requests_seen = 0

    def ask(self):
        return self.sampler.sample(PROMPT, 2, SamplingParams(max_tokens=3, seed=1))

    def scores(self):
        result = self.client.forward(self.good, "ppo", {"temperature": 1.0}).result(60)
        return np.concatenate([output["logprobs"].array for output in result.loss_fn_outputs])

    def still_works(self):
        np.testing.assert_array_equal(self.scores(), self.expected)
        assert [s.tokens for s in self.ask().result(60).sequences] == self.tokens

    def attempt(self, what, call, finite, *, neighbor=False):
        """Run one request. An error has a message, comes in time and affects no other request."""
        begin, neighbour = time.monotonic(), self.ask() if neighbor else None
        try:
            finite(call())
            self.taken, outcome = self.taken + 1, ACCEPTED
        except ValueError as error:
            assert str(error).strip(), what
            self.refused, outcome = self.refused + 1, REFUSED
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        if neighbour is not None:
            assert [s.tokens for s in neighbour.result(60).sequences] == self.tokens, what
        assert time.monotonic() - begin < 60, what
        return outcome

    def settle(self):
        """Drop what the requests have accumulated, and check that the model is unchanged."""
        self.client._pending_backwards.clear()
        self.client.optim_step(KEEP).result(60)
        self.still_works()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out")) as service:
        ground = FuzzTarget(service)
        yield ground
    if ground.taken + ground.refused >= 600:  # the whole file was run: both outcomes must occur
        assert ground.taken > 70 and ground.refused > 250, (ground.taken, ground.refused)


def format_value(value) -> str:
    return repr(value)[:200]


def fields_for(loss: str, rng: random.Random) -> Datum:
    """Return a datum that is valid for the loss."""
    (datum,) = random_datums(1, seed=rng.randrange(10**6), low=3)
    n, spec = datum.model_input.length, LOSSES[loss]
    extra = {"returns": 0.1, "ref_logprobs": -2.0, "weights": 1.0, "values_old": 0.0}
    values = {**datum.loss_fn_inputs, **{name: [value] * n for name, value in extra.items()}}
    inputs = {
        name: value
        for name, value in values.items()
        if name in spec.known_fields and (name in spec.required or rng.random() < 0.7)
    }
    if spec.needs_mask and "mask" not in inputs:
        inputs["mask"] = [1.0] * n
    return Datum(datum.model_input, inputs)


def mutate_datum(datum: Datum, rng: random.Random) -> Datum:
    """Return the datum with a single change, which mostly makes it invalid."""
    inputs = {name: data.array.copy() for name, data in datum.loss_fn_inputs.items()}
    tokens, name, odd = datum.model_input.to_ints(), rng.choice(list(inputs)), rng.choice(ODD)
    match rng.randrange(9):
        case 0:
            values = inputs[name].tolist()
            values[rng.randrange(len(values))] = odd
            inputs[name] = values
        case 1:
            inputs[name] = odd
        case 2:
            inputs[name] = inputs[name][: rng.randrange(len(inputs[name]))]
        case 3:
            del inputs[name]
        case 4:
            field = rng.choice(["mask", "weights", "nonsense", "clip_high_threshold",
                                "sequence_ratio_mask", "returns"])  # fmt: skip
            inputs[field] = [rng.choice(ODD)] * len(tokens)
        case 5:
            inputs[name] = np.stack([inputs[name]] * rng.randrange(1, 4), axis=rng.randrange(2))
        case 6:
            tokens = [*tokens]
            tokens[rng.randrange(len(tokens))] = odd
            return Datum(ModelInput((EncodedTextChunk(tokens),)), inputs)
        case 7:
            whole = rng.choice([[], [3] * (CONTEXT + 1), odd, None])
            chunks = rng.choice([(EncodedTextChunk(whole),), (ImageChunk(b"x", "png"),), (), whole])
            return Datum(rng.choice([ModelInput(chunks), ModelInput.empty(), whole]), inputs)
        case 8:
            return Datum(datum.model_input, inputs, temperature=odd)
    return Datum(datum.model_input, inputs)


def finite_output(output) -> None:
    assert all(math.isfinite(value) for value in output.metrics.values()), output.metrics
    assert all(
        np.isfinite(data.array).all() for item in output.loss_fn_outputs for data in item.values()
    )


def ask_datums(target, rng):
    loss = rng.choice([name for name in LOSSES if LOSSES[name].group == 1])
    backward = rng.random() < 0.5

    def call():
        datums = [fields_for(loss, rng), mutate_datum(fields_for(loss, rng), rng)]
        verb = target.client.forward_backward if backward else target.client.forward
        try:
            return verb(datums, loss).result(60)
        except FloatingPointError:
            # finite inputs with a ratio or square that overflows: named, gradients dropped
            arrays = [data.array for d in datums for data in d.loss_fn_inputs.values()]
            assert max(np.abs(array.astype(float)).max(initial=0) for array in arrays) > 80
            raise ValueError("overflow") from None

    return target.attempt(loss, call, finite_output, neighbor=True)


@pytest.mark.parametrize("part", range(2))
def test_datums(target, part):
    rng = random.Random(part)
    for _ in range(90):
        ask_datums(target, rng)
    target.settle()


def ask_loss_config(target, rng):
    loss = rng.choice([name for name in LOSSES if LOSSES[name].group == 1])
    keys = [*LOSSES[loss].known_config, "nonsense", 3]
    config = {key: rng.choice(ODD) for key in rng.sample(keys, rng.randrange(1, 3))}
    data = [fields_for(loss, rng)]
    return target.attempt(
        f"{loss} {format_value(config)}",
        lambda: target.client.forward(data, loss, config).result(60),
        finite_output,
    )


def test_loss_configs(target):
    rng, client = random.Random(10), target.client
    for _ in range(100):
        ask_loss_config(target, rng)
    for odd in ODD:  # the name, the data and the divisor
        for what, ask in {
            "loss": lambda odd=odd: client.forward(target.good, odd),
            "data": lambda odd=odd: client.forward(odd, "ppo"),
            "by": lambda odd=odd: client.forward_backward([], "ppo", divisor=odd),
        }.items():
            call = lambda ask=ask: ask().result(60)  # noqa: E731
            target.attempt(f"{what} {format_value(odd)}", call, finite_output)
    target.still_works()


def ask_adam(target, rng):
    names = ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]
    arguments = {name: rng.choice(ODD) for name in rng.sample(names, rng.randrange(1, 3))}
    return target.attempt(
        format_value(arguments), lambda: AdamParams(**arguments), lambda params: None
    )


FOUND = {
    "value_clip": ("loss config", 1877140219), "kl_coef": ("loss config", 2823364487),
    "cql_coef": ("loss config", 2343524781), "include_prompt_logprobs": ("sample", 2827720954),
    "clip_high_threshold": ("loss config", 1632372924), "kl_coef 2**70": ("loss config", 1404628833),
    "value_clip 2**70": ("loss config", 322497943), "tau 1e-320": ("loss config", 4143031038),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found_by_many_more(target, name):
    """Check requests that failed in a run of a hundred thousand inputs."""
    verb, seed = FOUND[name]
    assert VERBS[verb](target, random.Random(seed)) == REFUSED


def test_optimizer_parameters(target):
    rng = random.Random(20)
    for _ in range(60):
        ask_adam(target, rng)
    for odd in ODD:
        step = functools.partial(target.client.optim_step, odd)
        target.attempt(f"optim_step({format_value(odd)})", step, lambda answer: None)
    target.still_works()


def finite_sample(response) -> None:
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs)
        assert np.isfinite(sequence.logprobs).all()


def ask_sample(target, rng):
    settings, request = {"max_tokens": 3}, {"prompt": PROMPT, "num_samples": 1}
    for _ in range(rng.randrange(1, 3)):
        odd = rng.choice(ODD)
        match rng.randrange(4):
            case 0 | 1:
                names = ["max_tokens", "seed", "stop", "temperature", "top_k", "top_p"]
                settings[rng.choice(names)] = odd
            case 2:
                names = ["num_samples", "include_prompt_logprobs", "topk_prompt_logprobs",
                         "prompt_logprobs_last_n"]  # fmt: skip
                request[rng.choice(names)] = odd
            case 3:
                tokens = [3, odd] if rng.random() < 0.5 else odd
                # a function, since the chunk itself may be refused
                chunk = functools.partial(EncodedTextChunk, tokens)
                full = ModelInput.from_ints([3] * CONTEXT)
                request["prompt"] = rng.choice([odd, chunk, full, ModelInput.empty()])

    def call():
        prompt = request["prompt"]
        if isinstance(prompt, functools.partial):
            prompt = ModelInput((prompt(),))
        params = SamplingParams(**settings)
        return target.sampler.sample(
            **{**request, "prompt": prompt}, sampling_params=params
        ).result(60)

    return target.attempt(
        f"{format_value(settings)} {format_value(request)}", call, finite_sample, neighbor=True
    )


def test_samples(target):
    rng = random.Random(30)
    for _ in range(80):
        ask_sample(target, rng)
    for odd in ODD:
        score = functools.partial(target.sampler.compute_logprobs, odd)
        what = f"scores of {format_value(odd)}"
        target.attempt(what, lambda score=score: score().result(60), lambda actual: None)
    target.still_works()


def test_a_request_that_the_engine_refuses_fails_alone(target, monkeypatch):
    """Only the engine knows its memory; only that request receives the error."""
    add = Engine.add

    def refuse_sevens(engine, request):
        if request.num_samples == 7:
            raise ValueError("seven samples do not fit")
        return add(engine, request)

    monkeypatch.setattr(Engine, "add", refuse_sevens)
    before = target.ask()
    refused = target.sampler.sample(PROMPT, 7, SamplingParams(max_tokens=2))
    after = target.ask()
    with pytest.raises(ValueError, match="seven samples do not fit"):
        refused.result(60)
    for item in (before, after):
        assert [s.tokens for s in item.result(60).sequences] == target.tokens


def test_names_and_custom_losses(target):
    client, save = target.client, target.client._make_save_path

    def attempt(what, call):
        target.attempt(what, call, lambda answer: None)

    def custom(loss):
        return lambda: client.forward_backward_custom(target.good, loss)

    for odd in ODD:
        attempt(f"saved as {format_value(odd)}", lambda odd=odd: save("checkpoints", odd, None))
        attempt(f"for {format_value(odd)} s", lambda odd=odd: save("checkpoints", "a", odd))
        attempt(f"loss {format_value(odd)}", custom(lambda *_, odd=odd: odd))
        metric = lambda data, lps, odd=odd: (sum(lp.sum() for lp in lps), {"m": odd})  # noqa: E731
        attempt(f"metric {format_value(odd)}", custom(metric))
    attempt("nan", custom(lambda data, lps: (lps[0].sum() * math.nan, {})))
    target.settle()


def ask_tensor(target, rng):
    data, dtype = rng.choice(ODD), rng.choice([None, "int64", "float32", "float64"])
    shape = rng.choice([None, [2], [1, -1], rng.choice([[0], [2, 2], [-3], ["x"], 5, [None]])])
    arguments = {"data": data, "dtype": dtype, "shape": shape}
    return target.attempt(
        format_value(arguments), lambda: TensorData(**arguments), lambda made: made.tolist()
    )


def test_tensors(target):
    rng = random.Random(40)
    for _ in range(60):
        ask_tensor(target, rng)


# ---------------------------------------------------------------------- as a family (test_fuzzing.py)

VERBS = {
    "datums": ask_datums, "loss config": ask_loss_config, "sample": ask_sample, "adam": ask_adam,
    "tensor": ask_tensor,
}  # fmt: skip


def inputs(seed, count):
    """Yield (verb, seed of the request)."""
    rng = random.Random(f"requests {seed}")
    for _ in range(count):
        yield (
            rng.choice(["datums", "datums", "loss config", "sample", "sample", "adam", "tensor"]),
            rng.randrange(2**32),
        )


SHARE = 0.5  # of the other families' inputs: each request costs a forward and a concurrent sample


def check(item):
    """Send a request to a model that lives as long as the process."""
    ground = make_fuzz_target()
    ground.requests_seen += 1
    if ground.requests_seen % 100 == 0:
        ground.settle()
    verb, seed = item
    return VERBS[verb](ground, random.Random(seed))


@functools.cache
def make_fuzz_target():
    folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    atexit.register(folder.cleanup)
    service = ServiceClient(output_dir=folder.name)
    atexit.register(service.close)
    return FuzzTarget(service)
