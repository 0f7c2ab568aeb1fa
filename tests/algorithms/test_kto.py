"""Test KTO's z: the mean gap to the reference on the answer to the next prompt, at least 0."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from algorithm_helpers import make_method, target_logprobs
from helpers import ADAM

from rl import ServiceClient
from rl.algorithms import Models, Progress
from rl.algorithms.update import add_loss_inputs
from rl.renderers import get_renderer
from rl.rollout import supervised_datum
from rl.types import Datum, Problem

ANSWERS = ["3", "11", "7", "105"]


def rows_of(pairs: bool) -> list[Problem]:
    rows = []
    for i, answer in enumerate(ANSWERS):
        label = {"rejected": str(i) * (1 + i % 3)} if pairs else {"meta": {"label": i % 2 == 0}}
        ask = [{"role": "user", "content": f"{i}+{i}="}]
        rows.append(Problem(ask, response=answer, index=i, **label))
    return rows


def measure_z(policy, frozen, rows: list[Problem]) -> float:
    """Return the z that an update on these rows reports."""
    renderer = get_renderer("plain", policy.get_tokenizer())
    reference = SimpleNamespace(logprobs=lambda datums: target_logprobs(frozen, datums))
    models = Models(policy, {"reference": reference})
    method = make_method("kto", batch_size=len(rows), steps=1, learning_rate=1e-3)
    datums = method.build_datums(rows, renderer, models, 0)
    return method.update(models, datums, Progress(0, 1))["optim/kl_ref_k1"]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_z_is_of_other_prompts_answers_and_never_below_zero(sign, pairs, tmp_path):
    """`sign`: whether the policy was first trained towards these answers or away from them."""
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        policy, frozen = (
            service.create_full_training_client("tiny:addition", seed=1) for _ in range(2)
        )
        renderer, rows = get_renderer("plain", policy.get_tokenizer()), rows_of(pairs)

        def datum(row: Problem, answer: str) -> Datum:
            output = [*row.messages, {"role": "assistant", "content": answer}]
            return supervised_datum(*renderer.build_supervised_example(output))

        texts = [[row.response, row.rejected] if pairs else [row.response] for row in rows]
        local, turned = (
            [datum(row, text) for row, lines in zip(rows, of, strict=True) for text in lines]
            for of in (texts, [*texts[1:], texts[0]])
        )
        weighted = [
            add_loss_inputs(d, weights=sign * (1 + 5 * (i % 2)) * d.loss_fn_inputs["weights"].array)
            for i, d in enumerate(local)
        ]
        policy.forward_backward(weighted, "cross_entropy", divisor=len(local))
        policy.optim_step(ADAM).result()

        def mean_gap(datums) -> float:
            now, then = (target_logprobs(client, datums) for client in (policy, frozen))
            masks = [d.loss_fn_inputs["weights"].array != 0 for d in datums]
            each = zip(now, then, masks, strict=True)
            return float(np.mean([(lp.astype(np.float64) - ref)[m].sum() for lp, ref, m in each]))

        expected, of_own = mean_gap(turned), mean_gap(local)
        assert expected * sign > 0.05 and abs(expected - of_own) > 0.05
        # a single row has no other prompt
        method = make_method("kto", batch_size=2, steps=1, learning_rate=1e-3)
        reference = SimpleNamespace(logprobs=lambda datums: target_logprobs(frozen, datums))
        models = Models(policy, {"reference": reference})
        gaps = [mean_gap([one]) for one in local[: len(texts[0])]]
        losses = [1 / (1 + math.exp(0.1 * (-1) ** i * gap)) for i, gap in enumerate(gaps)]
        loss = method.evaluate(rows[:1], renderer, models)["test/loss"]
        assert loss == pytest.approx(np.mean(losses), abs=1e-6)
        assert measure_z(policy, frozen, rows) == pytest.approx(max(0.0, expected), abs=1e-5)


def test_a_mismatched_answer_ends_at_the_models_context(tmp_path):
    """Each row fits, but the long prompt with the long answer of the other row does not."""
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        policy = service.create_full_training_client("tiny:addition", seed=1)
        limit = policy.info["max_context"]
        lengths = ((limit - 3, 2), (1, limit - 3))
        rows = [
            Problem([{"role": "user", "content": "1" * prompt}], response="2" * answer, index=i)
            for i, (prompt, answer) in enumerate(lengths)
        ]
        assert measure_z(policy, policy, rows) == 0
