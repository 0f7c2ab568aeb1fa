"""Compare ten DPO steps of Whetstone with TRL's DPOTrainer: the same weights, pairs and settings
give the same numbers.

    .venv-bench/bin/python bench/dpo_vs_trl.py

Both start from the same folder of random weights (tiny:addition) and train on the same pairs in the
same order, in fp32 on a CPU, with AdamW (0.9, 0.95, eps 1e-8), a constant learning rate and
clipping to norm 1. Each uses its native tokenization, reference model, losses and optimizer step.
Whetstone runs `rl.trainer.training_loop.train`; TRL runs `DPOTrainer.train()`. TRL's figures come
from its `compute_loss`, because the logged figures are rounded. The table has a row for each step
and loss. The exit code is 1 if any loss or reward differs by more than 1e-4
(relative, where above 1).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# replaces this folder: its kernels.py would shadow the package `kernels`
sys.path[0] = str(HERE.parent)
from bench.harness import TRL_SETTINGS, command_line, machine, quiet_libraries, show, write_table  # noqa: E402

TOLERANCE = 1e-4
FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}  # Whetstone's name: TRL's name


def dpo_plan(args: argparse.Namespace, loss: str, model: Path) -> Any:
    """Return the same stage plan as Whetstone's command line. The TRL side takes its pairs and
    their order from this plan.
    """
    from rl.algorithms.dpo import DpoSettings, PreferenceSettings
    from rl.config import (
        LoopSettings,
        ModelSettings,
        OptimSettings,
        PreferenceDataSettings,
        StageConfig,
    )

    settings = DpoSettings(
        model=ModelSettings(base_model=str(model)),
        data=PreferenceDataSettings(dataset="addition"),
        preference=PreferenceSettings(loss=loss, beta=args.beta),
        optim=OptimSettings(learning_rate=args.learning_rate),
        loop=LoopSettings(steps=args.steps, batch_size=args.pairs, eval_every=0),
    )
    return StageConfig("dpo", "dpo", settings)


def run_whetstone(
    args: argparse.Namespace, loss: str, model: Path, folder: Path
) -> list[dict[str, float]]:
    """Run the training loop on a real Trainer that keeps its metrics instead of logging them, and
    return the metrics of each step.
    """
    from rl.algorithms import METHODS, Models
    from rl.client import ServiceClient
    from rl.distributed import StopRequest
    from rl.trainer import make_renderer
    from rl.trainer.stage_context import StageContext
    from rl.trainer.stage_data import prepare_stage
    from rl.trainer.stage_models import StageModelFactory, make_policy
    from rl.trainer.trainer import Trainer, TrainingBatch
    from rl.trainer.training_loop import train
    from rl.trainer.worker_settings import collect_worker_settings

    found: list[dict[str, float]] = []

    class KeptTrainer(Trainer):
        def start(self) -> None:
            return None

        def end_batch(self, batch: TrainingBatch, metrics: Any, sampler: Any) -> None:
            found.append({**metrics, "loss": metrics["optim/loss"]})

        def end(self) -> None:
            pass

    plan = dpo_plan(args, loss, model)
    prepared, spec = prepare_stage(plan), METHODS["dpo"]
    with ServiceClient(
        output_dir=folder, seed=args.seed, settings=collect_worker_settings([plan])
    ) as service:
        policy = make_policy(service, plan.settings.model, None, None, args.seed)
        method = spec(plan.settings)
        others = method.make_models(
            StageModelFactory(service, policy, plan.settings.model, None, {}, args.seed)
        )
        unused: dict[str, Any] = dict(logbook=None, console=None, checkpoints=None)
        context = StageContext(
            name="dpo",
            index=0,
            method=method,
            models=Models(policy, others),
            problems=prepared.problems,
            test_problems=None,
            renderer=make_renderer(policy, None),
            scorer=None,
            run_seed=args.seed,
            first_step=0,
            **unused,
        )
        train(KeptTrainer(context, stop_request=StopRequest()))
    return found


def run_trl(
    args: argparse.Namespace, loss: str, model: Path, folder: Path
) -> list[dict[str, float]]:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from rl.seed import derive_seed
    from rl.trainer.stage_data import prepare_stage

    found: list[dict[str, float]] = []

    class KeptTrainer(DPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            value = super().compute_loss(*args, **kwargs)
            kept = {
                name: float(values[-1])
                for name, values in self._metrics["train"].items()
                if name in FIGURES
            }
            found.append({**kept, "loss": float(value.detach())})
            return value

    problems, order = prepare_stage(dpo_plan(args, loss, model)).problems, derive_seed(args.seed, 0)
    pairs = [
        problem for step in range(args.steps) for problem in problems.batch(step, args.pairs, order)
    ]
    rows = [
        {"prompt": str(p.messages[-1]["content"]), "chosen": p.response, "rejected": p.rejected}
        for p in pairs
    ]
    config = DPOConfig(
        **TRL_SETTINGS,
        output_dir=str(folder),
        max_steps=args.steps,
        seed=args.seed,
        beta=args.beta,
        loss_type=[LOSSES[loss]],
        learning_rate=args.learning_rate,
        max_grad_norm=1.0,
        per_device_train_batch_size=args.pairs,
        max_length=None,
    )
    trainer = KeptTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=config,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    return found


def compare(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], loss: str
) -> list[dict[str, Any]]:
    """Return a row for each step. Raises ValueError if the two numbers of steps differ."""
    rows = []
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        row: dict[str, Any] = {"loss_type": loss, "step": step}
        differences = []
        for name in FIGURES:
            # + 0.0 turns -0.0 into 0.0
            row[f"whetstone {name}"], row[f"trl {name}"] = (
                round(mine[name], 7) + 0.0,
                round(other[name], 7) + 0.0,
            )
            differences.append(abs(mine[name] - other[name]) / max(1.0, abs(other[name])))
        rows.append({**row, "largest_difference": f"{max(differences):.1e}"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=32, help="pairs a step")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "dpo_vs_trl_cpu.csv")
    args = parser.parse_args()

    import torch
    import trl

    from rl.models import load_model

    quiet_libraries(threads=1)
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dpo_vs_trl-") as name:
        folder = Path(name)
        loaded = load_model("tiny:addition", seed=args.seed)
        loaded.model.save_pretrained(folder / "model")
        loaded.tokenizer.save_pretrained(folder / "model")
        for loss in LOSSES:
            sides = [
                run(args, loss, folder / "model", folder / loss) for run in (run_whetstone, run_trl)
            ]
            table += compare(*sides, loss)
    about = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "machine": machine(),
        "command": command_line(),
    }
    write_table(args.output, [{**row, **about} for row in table])
    for row in table:
        show(row)
    worst = max(float(row["largest_difference"]) for row in table)
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
