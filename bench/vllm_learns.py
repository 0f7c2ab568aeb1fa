"""Train with the sampler in the process and with vLLM from the same weights, and compare what is
learned and how far each sampler's logprobs are from the learner's.

    # writes bench/results/vllm_learns.csv, a row as soon as it is measured; keeps existing rows
    python bench/vllm_learns.py --server http://localhost:8000

docs/vllm.md has the command that starts a server, here of a model of the shape of tiny:ascii
(--model FOLDER writes one).

The task has the form of GSM8K: questions about the sum of two one-digit numbers, answers that end
in `#### N`. SFT trains tiny:ascii on answers of which a share `NOISE` has a wrong sum, once per
seed. From that checkpoint GRPO runs for STEPS steps in fp32. `vllm, off-policy` is the asynchronous
schedule. The training set is as long as the stage, so that every problem is trained exactly once:
`missing` counts samples that were not trained, `repeated` those that were trained again.

`difference` is the largest difference in nats between the sampler's logprob of a token and the
learner's, over all steps after 20 updates; it is empty for an asynchronous run, whose tokens are of
older weights. `tokens_per_s` is sampled tokens by the seconds of sampling, loads of weights included.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench import harness  # noqa: E402
from rl.reporting import list_update_files, read_update_file  # noqa: E402

BASE = "tiny:ascii"
NOISE, SFT_ROWS = 0.3, 32_000
STEPS, BATCH, GROUP, UPDATES = 50, 32, 8, 20  # UPDATES: before `difference` is measured
TEXTS = ("Tom has {a}, buys {b}.", "{a} cows, {b} hens.")
TEXTS += ("Ann read {a}, then {b}.", "{b} more than {a}?")
SFT = (
    f"sft --base-model {BASE} --data-format columns --response-column response --steps 1500 "
    "--batch-size 64 --learning-rate 3e-3 --schedule cosine --warmup-steps 20 --beta2 0.99 "
    "--eval-every 0 --save-every 0"
)
GRPO = (
    f"grpo --data-format columns --reward gsm8k --steps {STEPS} --batch-size {BATCH} "
    f"--group-size {GROUP} --max-tokens 12 --temperature 1.0 --eval-every {STEPS} --eval-limit 256 "
    "--save-every 0 --rollouts-every 1 --precision fp32"
)
KINDS = {"full": "--learning-rate 3e-4", "lora": "--lora-rank 16 --learning-rate 3e-3"}
SAMPLERS = {
    "in process": "",
    "vllm": "--sampler vllm --sampler-url {server}",
    "vllm, off-policy": "--sampler vllm --sampler-url {server} --max-steps-off-policy 2",
}
ORDER = [(kind, sampler) for kind in KINDS for sampler in SAMPLERS]


def write_problems(path: Path, count: int, noise: float, seed: int) -> Path:
    """Write rows in the format of GSM8K. A share `noise` of the answers has a wrong sum."""
    generator = random.Random(f"{path.stem} {seed}")
    with path.open("w") as file:
        for _ in range(count):
            a, b = generator.randint(1, 9), generator.randint(1, 9)
            total = a + b
            if generator.random() < noise:
                total = generator.choice([n for n in range(2, 19) if n != total])
            question = generator.choice(TEXTS).format(a=a, b=b)
            row = {"prompt": question, "response": f"#### {total}", "answer": total}
            file.write(json.dumps(row) + "\n")
    return path


def train_base(seed: int, parent: Path) -> Path:
    """Return the folder of the SFT run of a seed, from which all its GRPO runs start. A finished
    run is used again.
    """
    folder = parent / f"sft-{seed}"
    if (folder / "checkpoints" / "sft-final").is_dir():
        return folder
    data = write_problems(parent / f"sft-{seed}.jsonl", SFT_ROWS, NOISE, seed)
    harness.train([*SFT.split(), "--dataset", str(data), "--seed", str(seed)], folder)
    return folder


def count_samples(folder: Path) -> tuple[int, int]:
    """Return how many samples of the stage are missing among those that were trained, and how many
    were trained again. A sample is the index of an answer in the group of a problem.
    """
    trained: collections.Counter[tuple[Any, int]] = collections.Counter()
    for path in sorted((folder / "rollouts").glob("step_*.jsonl")):
        rows = map(json.loads, path.read_text().splitlines())
        trained.update((row["problem"], row["index"]) for row in rows)
    return STEPS * BATCH * GROUP - len(trained), sum(trained.values()) - len(trained)


def measure_difference(folder: Path) -> float:
    """Return the largest difference between the sampler's and the learner's logprobs in nats, over
    the steps after `UPDATES` updates.
    """
    largest = 0.0
    for step, path in list_update_files(folder / "rollouts").items():
        if step > UPDATES:
            arrays = read_update_file(path).arrays
            ends, members = np.cumsum(arrays["datums"][:, 3]), arrays["call/0/datums"]
            sampled = np.split(arrays["sampled"], ends[:-1])
            sampled_T = np.concatenate([sampled[number] for number in members])
            largest = max(largest, float(np.abs(arrays["call/0/logprobs"] - sampled_T).max()))
    return largest


def run_grpo(key: tuple[int, str, str], server: str, parent: Path) -> dict[str, Any]:
    """Return the row of a GRPO run from the checkpoint of its seed."""
    seed, kind, sampler = key
    words = [*GRPO.split(), "--base-model", str(train_base(seed, parent)), "--seed", str(seed)]
    data = write_problems(parent / f"grpo-{seed}.jsonl", STEPS * BATCH, 0, seed)
    held_out = write_problems(parent / f"test-{seed}.jsonl", 256, 0, seed)
    words += ["--dataset", str(data), "--eval-dataset", str(held_out), *KINDS[kind].split()]
    words += SAMPLERS[sampler].format(server=server).split()
    folder = parent / f"{seed}-{kind}-{list(SAMPLERS).index(sampler)}"
    run, is_async = harness.train(words, folder), "off-policy" in sampler
    accuracy = run.values(harness.HELD_OUT)
    tokens, seconds = run.values("sampler/emitted_tokens"), run.values("time/sample")
    missing, repeated = count_samples(folder)
    return {
        "seed": seed,
        "weights": kind,
        "sampler": sampler,
        "before": round(accuracy[0], 4),
        "after": round(accuracy[-1], 4),
        "missing": missing,
        "repeated": repeated,
        "age": round(max(run.values("async/age/max"))) if is_async else 0,
        "difference": "" if is_async else f"{measure_difference(folder):.1e}",
        "kl": f"{max(map(abs, run.values('optim/kl_sample_train_v2'))):.1e}",
        "tokens_per_s": round(sum(tokens) / sum(seconds)),
        "seconds": round(run.seconds, 1),
        "machine": harness.describe_machine(),
    }


def order_row(row: Any) -> tuple[int, int]:
    return int(row["seed"]), ORDER.index((row["weights"], row["sampler"]))


def write_model(folder: Path) -> None:
    """Write an untrained model and its tokenizer, with which a server can start."""
    from rl.models import load_model

    loaded = load_model(BASE)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def main() -> None:
    parser = harness.make_parser(__doc__, True, harness.RESULTS / "vllm_learns.csv")
    parser.add_argument("--server", help="address of a vLLM server")
    parser.add_argument("--model", type=Path, help="write a model for the server, and end")
    args = parser.parse_args()
    if args.model is not None:
        return write_model(args.model)
    if args.server is None:
        parser.error("--server is required")
    measured = {order_row(row) for row in harness.read_table(args.output)}
    with tempfile.TemporaryDirectory(prefix="vllm-learns-") as parent:
        for seed, (number, pair) in itertools.product(args.seeds, enumerate(ORDER)):
            if (seed, number) not in measured:
                row = run_grpo((seed, *pair), args.server, Path(parent))
                harness.show(row)
                harness.replace_rows(args.output, [row], ("seed", "weights", "sampler"), order_row)


if __name__ == "__main__":
    main()
