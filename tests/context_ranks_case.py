"""Compute gradients, logprobs and an update on groups of ranks that split each micro-batch by
positions. Not a test by itself.

    accelerate launch --config_file accelerate_configs/X.yaml tests/context_ranks_case.py STARTS OUT SIZE

STARTS: saved models. OUT: folder of the result, found.pt. SIZE: ranks of a group.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import numpy as np  # noqa: E402
import torch  # noqa: E402
from distributed_cases import CaseWorker, for_loss, over_sequences, update_params  # noqa: E402

from rl import ServiceClient  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.types import Datum, ModelInput  # noqa: E402

# Two key heads with two and with three query heads each; three heads; windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "uneven": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 48},
    ),
    "three": ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}),
    "window": ("gemma3_text", {"sliding_window": 6}),
    "eager": ("gemma2", {"sliding_window": 6}),
    "experts": ("qwen3_moe", {}),
    "gptj": ("gptj", {}),
}
REFUSED = "gptj"


@dataclass(frozen=True)
class Case:
    """A gradient to compute. `settings`: the learner's."""

    model: str
    loss: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False


PACKED = {"layout": "packed", "token_budget": 60}
SHARED = {"layout": "shared", "token_budget": 90}
BY_LENGTHS = ", by lengths"  # attention takes the lengths of sequences, and no mask
CASES = {
    "packed, ppo": Case("qwen3", "ppo", PACKED),
    "packed, gspo, lora": Case("qwen3", "gspo", PACKED, lora=True),
    "packed, cross_entropy, checkpointing": Case(
        "uneven", "cross_entropy", {**PACKED, "gradient_checkpointing": True}
    ),
    "padded, custom over sequences, lora, inputs of layers offloaded": Case(
        "qwen3",
        "custom",
        {
            "layout": "padded",
            "token_budget": 60,
            "gradient_checkpointing": True,
            "offload_activations": True,
        },
        lora=True,
    ),
    "shared, dpo": Case("qwen3", "dpo", SHARED),
    "padded, ppo, plain head": Case(
        "three", "ppo", {"layout": "padded", "token_budget": 1, "fused": False}
    ),
    "padded, ppo, windows": Case("window", "ppo", {"layout": "padded", "token_budget": 60}),
    "packed, ppo, eager attention": Case("eager", "ppo", PACKED),
    "packed, ppo, experts": Case("experts", "ppo", PACKED),
    "packed, values": Case("qwen3", "value", PACKED),
}
# the last falls back to masks
for name in (
    "packed, ppo",
    "packed, gspo, lora",
    "packed, cross_entropy, checkpointing",
    "shared, dpo",
    "packed, ppo, eager attention",
):
    case = CASES[name]
    CASES[name + BY_LENGTHS] = replace(case, settings={**case.settings, "varlen": True})
CASES |= {
    "shared, ppo, windows, by lengths": Case("window", "ppo", {**SHARED, "varlen": True}),
    "auto, ppo, three heads, by lengths": Case(
        "three", "ppo", {"token_budget": 60, "varlen": True, "gradient_checkpointing": True}
    ),
}


def make_datums() -> list[Datum]:
    """Return four pairs of answers of unequal lengths to a prompt; the first pair is short."""
    rng, made = np.random.default_rng(3), []
    for prompt, *answers in ((2, 1, 1), (9, 14, 5), (5, 21, 8), (12, 3, 17)):
        request = rng.integers(3, 40, prompt).tolist()
        for answer in answers:
            tokens = request + rng.integers(3, 40, answer).tolist()
            mask = np.array([0.0] * (prompt - 1) + [1.0] * answer, np.float32)
            fields = {
                "target_tokens": tokens[1:],
                "mask": mask,
                "logprobs": mask * (-3.5 + 0.3 * rng.standard_normal(len(mask))),
                "advantages": mask * rng.standard_normal(len(mask)),
                "ref_logprobs": -3.5 * mask,
            }
            made.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
    return made


def with_fields(loss: str) -> list[Datum]:
    """Return the datums with the fields that the loss reads."""
    if loss in ("cross_entropy", "value"):
        return for_loss(make_datums(), loss)
    names = {"target_tokens", "mask"}
    names |= {"ref_logprobs"} if loss == "dpo" else {"logprobs", "advantages"}
    return [
        Datum(d.model_input, {k: v for k, v in d.loss_fn_inputs.items() if k in names})
        for d in make_datums()
    ]


def results(service: ServiceClient, starts: Path, case: Case, size: int) -> dict[str, Any]:
    """Return the gradient with its norm, all outputs, the loss, and the norm after an update.

    A single rank, the reference of the others, has padded rows where a group has lengths.
    """

    def verb(name: str, *arguments: Any) -> Any:
        return service._driver.submit(name, *arguments).result()

    settings = {**case.settings, "context_parallel_size": size}
    if size == 1:
        if settings.pop("varlen", False):
            settings["layout"] = "padded"
    verb("configure", settings)
    start = str(starts / case.model)
    made = (
        service.create_lora_training_client(start, seed=5, rank=3)
        if case.lora
        else service.create_full_training_client(start, value_head=case.loss == "value")
    )
    made.forward_backward(with_fields("ppo"), "ppo", divisor=3.0).result()
    made.optim_step(update_params(1)).result()
    data = with_fields(case.loss)
    if case.loss == "custom":
        got = made.forward_backward_custom(data, over_sequences).result()
    else:
        got = made.forward_backward(data, case.loss, divisor=3.0).result()
    by_lengths = verb("attends_by_lengths", made.model_id)
    gradient = verb("gradient", made.model_id)
    scored = made.forward(with_fields("ppo"), "ppo").result()
    made.release()
    return {
        "gradient": gradient,
        "by lengths": by_lengths,
        "loss": got.metrics["loss:sum"],
        "logprobs": [out["logprobs"].to_numpy() for out in scored.loss_fn_outputs],
    }


def get_refusal(service: ServiceClient, starts: Path) -> str:
    """Return the error for a model that does not look up its attention by name."""
    try:
        service.create_full_training_client(str(starts / REFUSED)).get_info()
    except UserError as error:
        return str(error)
    return ""


def main(starts: Path, out: Path, size: int) -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = CaseWorker
    service = ServiceClient(
        output_dir=out, settings=WorkerSettings(timeout_seconds=90, dtype="fp32")
    )
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        if size < 4 or case.model != "three":  # has three heads
            result[name] = results(service, starts, case, size)
        print(name, flush=True)  # shows the last case of a launch that hangs
    result[REFUSED] = get_refusal(service, starts)
    torch.save(result, out / "found.pt")
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
