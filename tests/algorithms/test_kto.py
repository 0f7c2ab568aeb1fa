"""KTO's z: the mean gap to the reference on the answer to the next prompt, at least 0."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from algorithm_helpers import target_logprobs
from helpers import ADAM

from rl import ServiceClient
from rl.algorithms import KTO, Models, Progress
from rl.algorithms.kto import KtoSettings
from rl.algorithms.update import add_loss_inputs
from rl.config import LoopSettings, OptimSettings
from rl.renderers import get_renderer
from rl.rollout import supervised_datum
from rl.types import Datum, Problem

ANSWERS = ["3", "11", "7", "105"]


def rows_of(pairs: bool) -> list[Problem]:
    rows = []
    for i, answer in enumerate(ANSWERS):
        label = {"meta": {"label": i % 2 == 0}} if not pairs else {"rejected": str(i) * (1 + i % 3)}
        rows.append(
            Problem([{"role": "user", "content": f"{i}+{i}="}], response=answer, index=i, **label)
        )
    return rows


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_z_is_of_other_prompts_answers_and_never_below_zero(sign, pairs, tmp_path):
    """`sign`: the policy was trained towards these answers before, or away from them."""
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        policy = service.create_full_training_client("tiny:addition", seed=1)
        frozen = service.create_full_training_client("tiny:addition", seed=1)
        renderer = get_renderer("plain", policy.get_tokenizer())
        rows = rows_of(pairs)

        def datum(row: Problem, answer: str) -> Datum:
            return supervised_datum(
                *renderer.build_supervised_example(
                    [*row.messages, {"role": "assistant", "content": answer}]
                )
            )

        texts = [[row.response, row.rejected] if pairs else [row.response] for row in rows]
        own = [datum(row, text) for row, told in zip(rows, texts, strict=True) for text in told]
        turned = [
            datum(row, text)
            for row, told in zip(rows, [*texts[1:], texts[0]], strict=True)
            for text in told
        ]
        weights = [
            sign * (1 + 5 * (i % 2)) * d.loss_fn_inputs["weights"].array for i, d in enumerate(own)
        ]
        policy.forward_backward(
            [add_loss_inputs(d, weights=w) for d, w in zip(own, weights, strict=True)],
            "cross_entropy",
            divisor=len(own),
        )
        policy.optim_step(ADAM).result()

        def mean_gap(datums) -> float:
            gaps = zip(
                datums,
                target_logprobs(policy, datums),
                target_logprobs(frozen, datums),
                strict=True,
            )
            return float(
                np.mean(
                    [
                        (lp - ref)[d.loss_fn_inputs["weights"].array != 0].sum()
                        for d, lp, ref in gaps
                    ]
                )
            )

        expected, of_own = mean_gap(turned), mean_gap(own)
        assert expected * sign > 0.05 and abs(expected - of_own) > 0.05
        settings = KtoSettings(
            loop=LoopSettings(batch_size=len(rows), steps=1),
            optim=OptimSettings(learning_rate=1e-3),
        )
        models = Models(
            policy,
            {"reference": SimpleNamespace(logprobs=lambda datums: target_logprobs(frozen, datums))},
        )
        method = KTO(settings)
        metrics = method.update(models, method.datums(rows, renderer, models, 0), Progress(0, 1))
        assert metrics["optim/kl_ref_k1"] == pytest.approx(max(0.0, expected), abs=1e-5)
