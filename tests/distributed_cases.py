"""Compute the cases of test_distributed.py through the clients, in a launch of any number of
processes. Not a test itself.

    accelerate launch --config_file accelerate_configs/X.yaml tests/distributed_cases.py STARTS OUT [--also DS_CONFIG] [--few]

STARTS: saved models to begin from, made by the test. OUT: folder for results.pt and the saved
sampler weights. --also: a second DeepSpeed config, under which a few cases run again in the same
processes. --few: only the gradients of a few cases.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers import random_datums  # noqa: E402
from torch.distributed.distributed_c10d import _world  # noqa: E402

from rl import ServiceClient, types  # noqa: E402
from rl.client import TrainingClient  # noqa: E402
from rl.distributed import make_accelerator  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.runtime.training_worker import TrainingWorker  # noqa: E402
from rl.runtime.verb_table import verb  # noqa: E402
from rl.types import AdamParams, Datum, ModelInput  # noqa: E402

DIVISOR = 7.0
# With lr 0, beta1 0 and no clipping, AdamW changes no weight, and its first moment is the gradient
# of the step before clipping.
LOOK = AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0, eps=1.0)
PROMPTS = [[3, 4, 12, 5, 6, 13], [3, 4, 12]]
SMALL = {"token_budget": 20}  # a few sequences per micro-batch
STEPS = 5  # updates
LONGEST = 20  # tokens of a sample


@dataclass(frozen=True)
class Case:
    """One gradient of eight datums. `settings`: learner settings; `calls`: the number of datums in
    each forward_backward.
    """

    start: str
    loss: str
    settings: dict[str, Any] = field(default_factory=dict)
    calls: tuple[int, ...] = (8,)


GRADIENTS = {
    "tied, ppo, one micro-batch of all": Case("tied", "ppo"),
    "tied, ppo, one sequence a micro-batch": Case("tied", "ppo", {"token_budget": 1}),
    "tied, ppo, some a micro-batch, calls of 3 and 5": Case("tied", "ppo", SMALL, (3, 5)),
    "tied, cross_entropy, packed, checkpointing": Case(
        "tied", "cross_entropy", {"layout": "packed", "gradient_checkpointing": True}, (1, 7)
    ),
    "tied, cross_entropy, plain head": Case("tied", "cross_entropy", {**SMALL, "fused": False}),
    "untied, ppo, plain head, calls of 3 and 5": Case(
        "untied", "ppo", {"token_budget": 1, "fused": False}, (3, 5)
    ),
    "untied, custom over sequences, inputs of layers offloaded": Case(
        "untied",
        "custom",
        {**SMALL, "gradient_checkpointing": True, "offload_activations": True},
        (3, 5),
    ),
    "value head, values alone": Case("value", "value", SMALL, (3, 5)),
    "lora tied, cross_entropy, plain head": Case("lora_tied", "cross_entropy", {"fused": False}),
    "lora untied, gspo, checkpointing": Case(
        "lora_untied", "gspo", {"token_budget": 1, "gradient_checkpointing": True}
    ),
    "lora untied, cross_entropy, padded": Case(
        "lora_untied", "cross_entropy", {**SMALL, "layout": "padded"}
    ),
    # the clients of these two are updated afterwards
    "lora tied, ppo, calls of 3 and 5": Case("lora_tied", "ppo", SMALL, (3, 5)),
    "untied, gspo": Case("untied", "gspo", SMALL),
}
FEW = [
    "tied, ppo, some a micro-batch, calls of 3 and 5",
    "untied, gspo",
    "lora tied, ppo, calls of 3 and 5",
]


def make_eight_datums() -> list[Datum]:
    return random_datums(8)


def masked_on_one_rank() -> list[Datum]:
    """Return the datums longest first, the order in which they are dealt out, a single datum per
    micro-batch. Every second datum, all of rank 1's, is fully masked.
    """
    ordered = sorted(make_eight_datums(), key=lambda d: -d.model_input.length)
    for datum in ordered[1::2]:
        for name in ("mask", "advantages"):
            datum.loss_fn_inputs[name].array[:] = 0.0
    return ordered


def for_loss(datums: Sequence[Datum], loss: str) -> list[Datum]:
    """Return the datums with the fields of the loss; the advantages serve as returns."""
    if loss not in ("cross_entropy", "value"):
        return list(datums)
    reference = (
        {"weights": "mask"}
        if loss == "cross_entropy"
        else {"mask": "mask", "returns": "advantages"}
    )
    fields = {"target_tokens": "target_tokens", **reference}
    return [
        Datum(d.model_input, {k: d.loss_fn_inputs[v] for k, v in fields.items()}) for d in datums
    ]


def over_sequences(
    data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return a loss that is not a sum over tokens: a clipped ratio per sequence, the exponential of
    its mean log ratio.
    """
    total = torch.zeros(())
    for datum, logp_T in zip(data, logprobs, strict=True):
        old_T, advantages_T = (
            datum.loss_fn_inputs[name].to_torch().to(logp_T.dtype)
            for name in ("logprobs", "advantages")
        )
        ratio = (logp_T - old_T).mean().exp()
        advantage = advantages_T.sum()
        total = (
            total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / DIVISOR
        )
    return total, {}


def update_params(step: int) -> AdamParams:
    """Return AdamParams in which every setting changes per step; the norm always exceeds
    grad_clip_norm.
    """
    return AdamParams(
        1e-3 * (step + 1),
        0.8 + 0.02 * step,
        0.9,
        1e-3,
        0.1 * step,
        grad_clip_norm=0.05 * (5 - step),
    )


def update_datums(step: int) -> list[Datum]:
    return random_datums(3 + step, seed=20 + step)


class CaseWorker(TrainingWorker):
    """A worker with extra verbs that inspect it and change what a launch fixes."""

    @verb()
    def configure(self, settings: dict[str, Any]) -> None:
        self.settings = replace(self.settings, learner=LearnerSettings(**settings))

    @verb()
    def relaunch(self, bf16: bool, ds_config: str | None) -> None:
        """Recreate the accelerator as if launched with another precision or DeepSpeed config."""
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        if ds_config is not None:
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = ds_config
        self.accelerator = make_accelerator(bf16=bf16)
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32

    @verb()
    def describe(self, model_id: int) -> dict[str, Any]:
        """Return facts about the launch. `own`: the number of parameters that this rank holds while
        nothing runs; `second`: of ZeRO-3's second copy inside a machine (hpz); `bound`: the longest
        collective timeout in seconds.
        """
        backend = self.learners[model_id].backend
        reference = [
            p.to_local() if type(p).__name__ == "DTensor" else p
            for p in self.learners[model_id].model.parameters()
        ]
        return {
            "processes": self.accelerator.num_processes,
            "own": sum(p.numel() for p in reference),
            "second": sum(
                p.ds_secondary_tensor.numel()
                for p in reference
                if getattr(p, "ds_secondary_tensor", None) is not None
            ),
            "bound": max(
                (
                    pg._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                    for pg in _world.pg_map
                ),
                default=0,
            ),
            "stage": getattr(backend, "stage", None),
            "optimizer_device": str(
                next((p.device for p in backend.optimizer.fp32_partitioned_groups_flat), None)
            )
            if getattr(backend, "stage", 0) == 3
            else None,
        }

    @verb()
    def attends_by_lengths(self, model_id: int) -> bool:
        """Return whether attention takes the lengths of sequences instead of masks."""
        return self.learners[model_id].varlen is not None

    @verb()
    def gradient(self, model_id: int) -> tuple[dict[str, torch.Tensor], float]:
        """Return the accumulated gradient by parameter name (on rank 0) and its norm as a step
        reports it.
        """
        learner = self.learners[model_id]
        norm = learner.step(LOOK)["grad_norm"]
        tensors = learner.backend.optimizer_tensors()
        results = {
            name: tensors[f"{name}/exp_avg"].clone()
            for name in learner.parameter_shapes
            if f"{name}/exp_avg" in tensors
        }
        learner.backend.load_optimizer_tensors({})
        return results, norm

    @verb()
    def micro_batches(self, model_id: int, datums: Sequence[Datum]) -> int:
        return self.learners[model_id].split_batch(datums)[0].num_micro_batches


class Launch:
    """The script's side: it opens clients in sequence and collects their results."""

    def __init__(self, starts: Path, out: Path):
        self.starts, self.out = starts, out
        self.service = ServiceClient(
            output_dir=out, settings=WorkerSettings(timeout_seconds=60, dtype="fp32")
        )
        self.results: dict[str, Any] = {}
        self.client: TrainingClient | None = None
        self.made: tuple[str, str] | None = None

    def verb(self, name: str, *arguments: Any) -> Any:
        return self.service._driver.submit(name, *arguments).result()

    def begin(self, start: str, **settings: Any) -> TrainingClient:
        """Return a client at `start`. The current client is reused if it has the same start and
        settings, because only `updates` changes weights.
        """
        if self.client is None or self.made != (start, str(settings)):
            self.end()
            self.verb("configure", settings)
            self.client = self.service.create_training_client_from_state(str(self.starts / start))
            self.made = start, str(settings)
        return self.client

    def end(self) -> None:
        if self.client is not None:
            self.client.release()
        self.client = self.made = None

    def call(self, datums: Sequence[Datum], loss: str = "ppo", divisor: float = DIVISOR) -> Any:
        assert self.client is not None
        if loss == "custom":
            return self.client.forward_backward_custom(datums, over_sequences).result()
        return self.client.forward_backward(for_loss(datums, loss), loss, divisor=divisor).result()

    def look(self) -> tuple[dict[str, torch.Tensor], float]:
        assert self.client is not None
        return self.verb("gradient", self.client.model_id)

    # ---------------------------------------------------------------------------------------- cases

    def gradients(self, names: Sequence[str], label: str = "") -> None:
        """Compute the gradients. The number of micro-batches on a rank is recorded, to check that
        each case is what its name says.
        """
        for name in names:
            case = GRADIENTS[name]
            client, datums, loss, cuts = (
                self.begin(case.start, **case.settings),
                make_eight_datums(),
                0.0,
                0,
            )
            for size in case.calls:
                part, datums = datums[:size], datums[size:]
                cuts += self.verb("micro_batches", client.model_id, for_loss(part, case.loss))
                got = self.call(part, case.loss)
                loss += got.metrics["loss:sum"]
            launch = self.launch()  # before the update, which drops ZeRO-3's second copy
            gradient, norm = self.look()
            self.results[label + name] = {
                "gradient": gradient,
                "norm": norm,
                "loss": loss,
                "cuts": cuts,
                "launch": launch,
            }

    def launch(self) -> dict[str, Any]:
        assert self.client is not None
        info = {
            key: self.client.info[key]
            for key in ("distributed_type", "wrapped", "world", "parameters", "dtype")
        }
        return {**info, **self.verb("describe", self.client.model_id)}

    def unequal_shares(self) -> None:
        """Run cases in which a rank has nothing to learn, all ranks share a datum, no datum exists,
        or gradients were dropped.
        """
        client = self.begin("untied", token_budget=1)
        ordered = masked_on_one_rank()
        self.call(ordered)
        self.results["one rank all masked"] = self.look()
        self.call(ordered[:1])
        self.results["one datum"] = self.look()
        self.call([])
        self.results["no datum"] = client.optim_step(LOOK).result().metrics
        client.forward([], "ppo").result()
        self.call(ordered[:3])
        client.forward(ordered[3:], "ppo").result()
        self.call(ordered[3:])
        self.results["a forward in between"] = self.look()
        self.call(ordered[1:5])
        self.verb("drop_gradients", client.model_id)
        self.call(ordered)
        self.results["what was dropped is gone"] = self.look()

    def forward_without_adapter(self) -> None:
        """Compute a gradient after a forward of the base model."""
        client = self.begin("lora_tied", **SMALL)
        client.forward(make_eight_datums(), "ppo", adapters=False).result()
        self.call(make_eight_datums())
        self.results["a forward without the adapter before"] = self.look()

    def two_models(self) -> None:
        """Train a policy and a critic as two models at once, with alternating calls and updates. A
        third model only scores in between.
        """
        self.end()
        self.verb("configure", SMALL)
        policy, critic, frozen = (
            self.service.create_training_client_from_state(str(self.starts / s))
            for s in ("tied", "value", "untied")
        )
        actual: dict[str, Any] = {
            "scores": frozen.forward(make_eight_datums(), "ppo").result().metrics["loss:sum"]
        }
        for part in (make_eight_datums()[:3], make_eight_datums()[3:]):
            policy.forward_backward(part, "ppo", divisor=DIVISOR).result()
            frozen.forward(part, "ppo").result()
            critic.forward_backward(for_loss(part, "value"), "value", divisor=DIVISOR).result()
        actual["policy"] = self.verb("gradient", policy.model_id)
        actual["critic"] = self.verb("gradient", critic.model_id)
        for step in range(2):
            datums = update_datums(step)
            policy.forward_backward(datums, "ppo", divisor=DIVISOR)
            critic.forward_backward(for_loss(datums, "value"), "value", divisor=DIVISOR)
            norms = [
                client.optim_step(update_params(step)).result().metrics["grad_norm"]
                for client in (policy, critic)
            ]
            actual[f"norms {step}"] = norms
        actual["scores after"] = (
            frozen.forward(make_eight_datums(), "ppo").result().metrics["loss:sum"]
        )
        self.results["two models"] = actual
        for client in (policy, critic, frozen):
            client.release()

    def updates(self, start: str) -> None:
        """Run the updates, every second one as a `train_step`, then sample on all ranks and save
        the weights.
        """
        client, norms = self.begin(start, **SMALL), []
        for step in range(STEPS):
            datums = update_datums(step)
            params = update_params(step)
            if step % 2:
                self.fail_in_a_step(client, datums)
                calls = [(part, "ppo", {}, DIVISOR) for part in (datums[:2], datums[2:])]
                update = client.train_step(calls, params)[1]
            else:
                self.call(datums[:2])
                self.call(datums[2:])
                update = client.optim_step(params)
            norms.append(update.result().metrics["grad_norm"])
        self.results[f"updates, {start}"] = {"norms": norms, **self.sampled(client)}
        client.save_weights_for_sampler(start).result()
        client.save_weights_for_sampler(f"{start}_merged", merged=True).result()
        path = client.save_state(start).result().path
        self.one_more(client, f"{start}_went_on")
        self.end()
        self.client = self.service.create_training_client_from_state_with_optimizer(path)
        self.one_more(self.client, f"{start}_resumed")
        self.end()

    def fail_in_a_step(self, client: TrainingClient, datums: list[Datum]) -> None:
        """Take a step whose second call has an infinite loss on the rank of its datum: it must not
        change the updates after it.
        """
        fields = datums[0].loss_fn_inputs
        infinite = datums[0].with_inputs(
            {**fields, "logprobs": np.full_like(fields["logprobs"].array, -1e30)}
        )
        calls = [(datums, "ppo", {}, 1.0), ([infinite], "importance_sampling", {}, 1.0)]
        outputs, update = client.train_step(calls, update_params(0))
        for future in (*outputs, update):
            try:
                future.result()
            except FloatingPointError:
                continue
            raise AssertionError("the loss was finite")

    def one_more(self, client: TrainingClient, name: str) -> None:
        self.call(update_datums(5))
        client.optim_step(update_params(4)).result()
        client.save_weights_for_sampler(name).result()

    def sampled(self, client: TrainingClient) -> dict[str, Any]:
        """Draw samples that end at their first token on one rank and run to the limit on the other;
        then leave a rank without requests.
        """
        sampler = client.save_weights_and_get_sampling_client()
        endless = types.SamplingParams(max_tokens=LONGEST, stop=[], seed=1)
        at_once = types.SamplingParams(max_tokens=LONGEST, stop=list(range(14)), seed=1)
        prompts = [ModelInput.from_ints(prompt) for prompt in PROMPTS]
        both = [sampler.sample(prompts[0], 2, endless), sampler.sample(prompts[1], 2, at_once)]
        sequences = [[(s.tokens, s.logprobs) for s in future.result().sequences] for future in both]
        single = sampler.sample(prompts[1], 2, at_once).result()
        scored = sampler.compute_logprobs(prompts[0]).result()
        probe = [Datum(prompts[0], {"target_tokens": [*PROMPTS[0][1:], 1]})]
        learner = (
            client.forward(probe, "cross_entropy")
            .result()
            .loss_fn_outputs[0]["logprobs"]
            .to_numpy()
        )
        return {
            "both": sequences,
            "alone": [(s.tokens, s.logprobs) for s in single.sequences],
            "scored": scored,
            "learner": learner,
        }

    def in_bf16(self) -> None:
        """Repeat the gradients in bf16, then make equal calls in a row: their sum shows the
        precision in which gradients are accumulated.
        """
        for name in FEW:
            self.gradients([name], "bf16: ")
            start = GRADIENTS[name].start
            if start == "untied":
                continue
            self.call(make_eight_datums())
            once, _ = self.look()
            for _ in range(5):
                self.call(make_eight_datums())
            self.results[f"bf16 repeated, {start}"] = once, self.look()[0]


def main(starts: Path, out: Path, also: str | None, few: bool) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = CaseWorker  # for the driver and the serving ranks
    launch = Launch(starts, out)
    if few:
        launch.gradients(FEW)
    else:
        run_all(launch, also)
    launch.end()
    torch.save(launch.results, out / "results.pt")
    launch.service.close()


def run_all(launch: Launch, also: str | None) -> None:
    *others, of_adapters, of_weights = GRADIENTS
    launch.gradients([*others, of_adapters])
    launch.forward_without_adapter()
    launch.updates("lora_tied")
    launch.gradients([of_weights])
    launch.updates("untied")
    launch.unequal_shares()
    launch.two_models()
    launched_with = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if also is not None:
        launch.verb("relaunch", False, also)
        launch.gradients(FEW, "also: ")
        launch.end()
    launch.verb("relaunch", True, launched_with)
    launch.in_bf16()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("starts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--also")
    parser.add_argument("--few", action="store_true")
    arguments = parser.parse_args()
    main(arguments.starts, arguments.out, arguments.also, arguments.few)
