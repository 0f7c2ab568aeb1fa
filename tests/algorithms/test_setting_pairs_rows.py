"""Test pairs of settings of methods that learn from preferences: method x substeps x lengths around
a longrope model's original length.

The first update is compared with float64, with a separate forward for each text. Several substeps
are compared with as many updates of one substep, each on the rows of that substep.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from algorithm_helpers import make_method, score_sequences
from test_architectures import make_longrope_model
from test_dpo import by_hand
from tiny_models import VOCAB

from rl import ServiceClient
from rl.algorithms import Models, Progress
from rl.types import Datum, ModelInput, Problem, TensorData

ROWS, ORIGINAL = 6, 32
METHOD_SETTINGS = {
    "dpo": ("dpo", {"loss": "dpo", "beta": 0.3}),
    "ipo": ("dpo", {"loss": "ipo", "beta": 0.3}),
    "orpo": ("orpo", {}),
    "simpo": ("simpo", {}),
    "kto": ("kto", {"data_format": "preferences", "beta": 0.3}),
    "reward_model": ("reward_model", {}),
    "reward_model-comparison": ("reward_model", {"form": "comparison"}),
}
LENGTHS = {"short": (4, 20), "long": (34, 50), "either": (4, 50), "across": (4, 50)}
TABLE = list(itertools.product(METHOD_SETTINGS, (1, 2, 3), LENGTHS))


class LetterRenderer:
    """A renderer that maps each letter of a text to a token."""

    def build_supervised_example(self, messages):
        prompt = [5 + ord(c) % (VOCAB - 5) for message in messages[:-1] for c in message["content"]]
        answer = [*(5 + ord(c) % (VOCAB - 5) for c in messages[-1]["content"]), 2]
        weights = np.array([0.0] * len(prompt) + [1.0] * len(answer))
        return ModelInput.from_ints([*prompt, *answer]), weights

    def reward_model_input(self, prompt, answer):
        return ModelInput.from_ints([*prompt, *answer])


def rows_of(lengths: str, seed: int) -> list[Problem]:
    """Return pairs with texts on one side of the original length, or on both."""
    rng, (low, high) = np.random.default_rng(seed), LENGTHS[lengths]
    rows = []
    for i in range(ROWS):
        odd = bool(i % 2)
        beyond = {
            "short": (False, False), "long": (True, True), "either": (odd, odd),
            "across": (odd, not odd),
        }[lengths]  # fmt: skip
        sides = [
            (max(low, ORIGINAL + 2), high) if far else (max(low, 6), min(high, ORIGINAL - 2))
            for far in beyond
        ]
        texts = [int(rng.integers(*side)) for side in sides]
        prompt = int(rng.integers(2, 4))
        sizes = (prompt, *(n - prompt for n in texts))
        ask, good, bad = ("".join(map(chr, rng.integers(97, 123, n).tolist())) for n in sizes)
        requests = [{"role": "user", "content": ask}]
        rows.append(Problem(requests, response=good, rejected=bad, index=i))
    return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Yield a service with two identical clients of each kind."""
    folder = tmp_path_factory.mktemp("longrope")
    make_longrope_model().save_pretrained(folder / "model")
    with ServiceClient(output_dir=folder / "out", seed=1) as service:
        made = {}
        for head in (False, True):
            twins = [
                service.create_full_training_client(str(folder / "model"), seed=1, value_head=head)
                for _ in range(2)
            ]
            made[head] = twins, twins[0].save_state(f"beginning-{head}").result().path
        yield made


def method_of(name: str, substeps: int, batch: int):
    kind, flat = METHOD_SETTINGS[name]
    often = {"steps": 1, "learning_rate": 1e-3, "adam_eps": 1e-3}
    return make_method(kind, **flat, **often, batch_size=batch, num_substeps=substeps)


class Reference:
    """Logprobs of every target under the initial weights, with eight nats added per datum."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def logprobs(self, datums: list[Datum]) -> list[np.ndarray]:
        logprobs = logprobs64(self.model, datums)
        return [lp.numpy() + 8.0 / max(1, len(lp)) for lp in logprobs]


def logprobs64(model, datums):
    results = []
    for datum in datums:
        read = torch.tensor([datum.model_input.to_ints()])
        logits = model(input_ids=read, use_cache=False).logits[0].log_softmax(-1)
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].array)[:, None]
        results.append(logits.gather(1, targets)[:, 0])
    return results


def reset_twin(place, which: int, head: bool):
    twins, path = place[head]
    twins[which].load_state_with_optimizer(path).result()
    return twins[which]


def probe(client, rows) -> np.ndarray:
    examples = [[*row.messages, {"content": row.response}] for row in rows]
    inputs = [LetterRenderer().build_supervised_example(item)[0].to_ints() for item in examples]
    return np.concatenate(score_sequences(client, inputs))


@pytest.fixture(scope="module")
def model64():
    return make_longrope_model().double()


FORMULAS = {
    "dpo": {"beta": 0.3}, "ipo": {"beta": 0.3, "mean": True}, "orpo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0}, "kto": {"beta": 0.3},
}  # fmt: skip


def first_update(name: str, model, rows) -> tuple[float, float]:
    """Return mean loss and gradient norm of the first update, from the papers' formulas."""
    datums = []
    for row in rows:
        for answer in (row.response, row.rejected):
            conversation = [*row.messages, {"content": answer}]
            read, weights = LetterRenderer().build_supervised_example(conversation)
            tokens = read.to_ints()
            fields = {"target_tokens": tokens[1:], "mask": weights[1:]}
            datums.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
    if name not in ("orpo", "simpo"):
        for datum, lp in zip(datums, Reference(model).logprobs(datums), strict=True):
            datum.loss_fn_inputs["ref_logprobs"] = TensorData(lp, "float32")
    total, _ = by_hand(name, datums, logprobs64(model, datums), **FORMULAS[name])
    loss = total / (len(datums) if name == "kto" else len(rows))
    model.zero_grad()
    loss.backward()
    squares = sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)
    return float(loss.detach()), float(torch.sqrt(squares))


def two_ways(place, model, name: str, substeps: int, lengths: str) -> None:
    head = name == "reward_model"
    first, other = reset_twin(place, 0, head), reset_twin(place, 1, head)
    whole, part = method_of(name, substeps, ROWS), method_of(name, 1, ROWS // substeps)
    reference = {"reference": Reference(model)}

    def update(method, client, rows):
        models = Models(client, reference)
        datums = method.build_datums(rows, LetterRenderer(), models, 0)
        return method.update(models, datums, Progress(0, 1))

    for batch in range(2):
        rows = rows_of(lengths, 10 * batch + substeps)
        metrics = update(whole, first, rows)
        parts = [rows[i::substeps] for i in range(substeps)]
        plain = [update(part, other, local) for local in parts]
        norm = max(each["optim/grad_norm"] for each in plain)
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
        if name != "reward_model-comparison":  # its mean is over tokens
            losses = [each["optim/loss"] for each in plain]
            mean = np.average(losses, weights=[len(local) for local in parts])
            assert metrics["optim/loss"] == pytest.approx(mean, rel=1e-4)
        np.testing.assert_allclose(probe(first, rows), probe(other, rows), atol=1e-4)
        if batch == 0 and not name.startswith("reward_model"):
            loss, norm = first_update(name, model, parts[0])
            assert plain[0]["optim/loss"] == pytest.approx(loss, rel=2e-4)
            assert plain[0]["optim/grad_norm"] == pytest.approx(norm, rel=1e-3)


def each_pair() -> list[tuple[str, int, str]]:
    """Return every method with two numbers of substeps and rotating lengths, and vice versa."""
    names = list(LENGTHS)
    return [
        (method, substeps, names[(i + substeps) % 4])
        for i, method in enumerate(METHOD_SETTINGS)
        for substeps in (2, 3)
    ]


@pytest.mark.parametrize(("name", "substeps", "lengths"), each_pair())
def test_substeps_are_updates_on_their_rows(place, model64, name, substeps, lengths):
    two_ways(place, model64, name, substeps, lengths)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "substeps", "lengths"), TABLE)
def test_substeps_are_updates_on_their_rows_in_the_whole_table(
    place, model64, name, substeps, lengths
):
    two_ways(place, model64, name, substeps, lengths)
