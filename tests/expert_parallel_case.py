"""Compute gradients, updates and checkpoints of models whose experts are divided over groups of
ranks. Not a test by itself.

    accelerate launch --config_file accelerate_configs/X.yaml tests/expert_parallel_case.py STARTS OUT SIZE [SAVED]

STARTS: saved models. OUT: folder of the result, found.pt. SIZE: ranks of a group. SAVED: folder of
checkpoints by model, which each model also continues from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from context_ranks_case import with_fields  # noqa: E402
from distributed_cases import CaseWorker  # noqa: E402

from rl import ServiceClient, types  # noqa: E402
from rl.client import TrainingClient  # noqa: E402
from rl.distributed import collectives  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.runtime.verb_table import verb  # noqa: E402

MODELS = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "dbrx")
REFUSED = "dbrx"
LAYERS = 4  # of qwen3_moe
SAVED = ("qwen3_moe", "mixtral")  # models whose checkpoints are loaded by another launch


@dataclass(frozen=True)
class Case:
    """A gradient and an update to compute. `settings`: the learner's. `datums`: how many of them,
    with fewer of them than ranks some ranks have no tokens of their own.
    """

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    datums: int = 8


SMALL = {"token_budget": 60}
CASES = {
    "qwen3_moe, packed": Case("qwen3_moe", {**SMALL, "layout": "packed"}),
    "qwen3_moe, one datum": Case("qwen3_moe", SMALL, datums=1),
    "qwen3_moe, lora on attention": Case("qwen3_moe", SMALL, lora=True),
    "qwen3_moe, no token reaches the last expert": Case(
        "qwen3_moe", {**SMALL, "router_replay": True}
    ),
    "mixtral, padded, checkpointing": Case(
        "mixtral", {**SMALL, "layout": "padded", "gradient_checkpointing": True}
    ),
    "olmoe, one sequence a micro-batch": Case("olmoe", {"token_budget": 1}),
    "deepseek_v3, shared prompts": Case("deepseek_v3", {**SMALL, "layout": "shared"}),
    "qwen3_moe, context parallelism": Case(
        "qwen3_moe", {**SMALL, "layout": "packed", "context_parallel_size": 2}
    ),
}
# The norm is far above the limit, so the update depends on a norm that counts each expert once.
STEP = types.AdamParams(learning_rate=1e-2, eps=1e-5, weight_decay=0.1, grad_clip_norm=1e-3)


class ExpertWorker(CaseWorker):
    """A worker that also shows its weights, and what it holds of them."""

    @verb()
    def weights(self, model_id: int) -> dict[str, torch.Tensor]:
        return {n: w.clone() for n, w in self.learners[model_id].iter_weights(frozen=True)}

    @verb()
    def held_experts(self, model_id: int) -> tuple[int, int]:
        """Return (numbers of this rank's experts, numbers of all experts)."""
        learner = self.learners[model_id]
        tensors = {n: p for n, p in learner.model.named_parameters() if ".experts." in n}
        local = [getattr(p, "to_local", lambda p=p: p)() for p in tensors.values()]
        whole = [learner.parameter_shapes[name].numel() for name in tensors]
        return sum(p.numel() for p in local), sum(whole)


def submit(client: TrainingClient, name: str) -> Any:
    return client._driver.submit(name, client.model_id).result()


def make_client(service: ServiceClient, start: Path, lora: bool) -> TrainingClient:
    if not lora:
        return service.create_full_training_client(str(start))
    parts = {"train_mlp": False, "train_unembed": False}
    return service.create_lora_training_client(str(start), rank=3, seed=5, **parts)


def update(client: TrainingClient, data: list[Any]) -> float:
    """Take a step, and return the norm of its gradient."""
    client.forward_backward(data, "ppo", divisor=3.0).result()
    return client.optim_step(STEP).result().metrics["grad_norm"]


def results(service: ServiceClient, starts: Path, case: Case, size: int) -> dict[str, Any]:
    """Return the gradient, the weights after two steps, and the logprobs of these."""
    settings = dict(case.settings)
    if size == 1:
        settings.pop("context_parallel_size", None)
    service._driver.submit("configure", {**settings, "expert_parallel_size": size}).result()
    client = make_client(service, starts / case.model, case.lora)
    data = with_fields("ppo")[-case.datums :]
    if "router_replay" in settings:
        for datum in data:
            experts = np.tile(np.array([0, 2], np.int16), datum.model_input.length * LAYERS)
            datum.experts = experts.reshape(datum.model_input.length, -1)
    if case.lora:  # the first update of B from zero
        update(client, data)
    got = client.forward_backward(data, "ppo", divisor=3.0).result()
    found = {"gradient": submit(client, "gradient"), "loss": got.metrics["loss:sum"]}
    found["norms"] = [update(client, data) for _ in range(2)]
    found["weights"] = submit(client, "weights")
    found["held"] = submit(client, "held_experts")
    scored = client.forward(with_fields("ppo"), "ppo").result()
    found["logprobs"] = [out["logprobs"].to_numpy() for out in scored.loss_fn_outputs]
    client.release()
    return found


def save_or_continue(
    service: ServiceClient, starts: Path, name: str, size: int, saved: Path | None
) -> dict[str, Any]:
    """Return the weights after a step and a save, and after a further step; `saved`: the checkpoint
    to continue from instead of the step.
    """
    service._driver.submit("configure", {**SMALL, "expert_parallel_size": size}).result()
    data = with_fields("ppo")
    if saved is None:
        client = make_client(service, starts / name, lora=False)
        update(client, data)
        path = client.save_state(name).result().path
    else:
        path = (saved / name).read_text()
        client = service.create_training_client_from_state_with_optimizer(path)
    before = submit(client, "weights")
    update(client, data)
    after = submit(client, "weights")
    client.release()
    return {"path": path, "before": before, "after": after}


def get_refusals(service: ServiceClient, starts: Path, size: int) -> list[str]:
    """Return the errors for a model whose experts are no stacked weights, and for adapters on
    experts.
    """
    service._driver.submit("configure", {"expert_parallel_size": size}).result()
    errors = []
    for name, lora in ((REFUSED, False), ("qwen3_moe", True)):
        parts = {"train_mlp": False, "train_unembed": False, "train_experts": True}
        try:
            made = (
                service.create_lora_training_client(str(starts / name), rank=2, **parts)
                if lora
                else service.create_full_training_client(str(starts / name))
            )
            made.get_info()
        except UserError as error:
            errors.append(str(error))
    return errors


def main(starts: Path, out: Path, size: int, saved: Path | None = None) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = ExpertWorker
    service = ServiceClient(
        output_dir=out, settings=WorkerSettings(timeout_seconds=90, dtype="fp32")
    )
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        if saved is None:
            result[name] = results(service, starts, case, size)
            print(name, flush=True)  # shows the last case of a launch that hangs
    for name in SAVED:
        result[name] = save_or_continue(service, starts, name, size, saved)
    if size > 1:
        result["refusals"] = get_refusals(service, starts, size)
    if collectives.rank() == 0:
        torch.save(result, out / "found.pt")
    service.close()


if __name__ == "__main__":
    words = sys.argv[1:]
    main(Path(words[0]), Path(words[1]), int(words[2]), Path(words[3]) if words[3:] else None)
