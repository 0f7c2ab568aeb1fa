"""Check every causal LM of transformers at a tiny size: the learner scores and trains it exactly as
the plain model does, in each layout, or refuses it by name.

    # all architectures, half an hour on two cores,
    # into results/architectures.csv and docs/architectures.md
    python bench/architectures.py
    # some architectures; their rows replace the existing rows
    python bench/architectures.py --only llama gpt_neo
    # only resume, reload and adapter, of built rows that have no such cell yet
    python bench/architectures.py --saved

The script writes a row after each architecture. Each architecture runs in a separate process with a
time limit. Columns:
    padded packed shared
                  the learner with that layout, compared with the plain model on a single unpadded
                  sequence at a time, in float32: "exact" (logprobs within 1e-4 nats, gradient
                  within 1e-3), "refused: why", or "WRONG: ..."
    checkpointing the same with gradient checkpointing, padded
    sampler       samples scored again by the plain model: "exact" (1e-3 nats), "refused: why", or
                  "WRONG: ...". If layers choose the positions they read by scores, rounding may
                  change the choice; the cell then counts the tokens that differ, at most a fifth.
    resume reload adapter
                  comparison of weights after they are written and read (see
                  bench/architectures_saved.py)
    rows          layout of the decoder's rows: fast (a hand-written forward), padded, slots, equal,
                  recompute (see rl/sampler/forward_hf.py)
    layers        types of its layers (rl/layers)
    lora_left_out the share of the weights that a LoRA on everything leaves without an adapter
Sequences are 12 to 70 tokens long and windows are 40. The exit code is 1 if a row contains WRONG.
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# replaces this folder: its kernels.py would shadow the package `kernels`
sys.path[0] = str(HERE.parent)
sys.path.append(str(HERE.parent / "tests"))
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tiny_models import VOCAB, model_types, tiny_model  # noqa: E402

from bench.architectures_saved import adapter_column, saved_columns  # noqa: E402
from rl.distributed import make_accelerator  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.layers import describe_layers  # noqa: E402
from rl.learner import Learner, LearnerSettings  # noqa: E402
from rl.losses import get_loss  # noqa: E402
from rl.models import add_lora  # noqa: E402
from rl.models import model_loading as models  # noqa: E402
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.sampler.decoder_hf import HFDecoder  # noqa: E402
from rl.types import Datum, LoraConfig, ModelInput, SamplingParams  # noqa: E402
from tools.architectures_page import main as write_page  # noqa: E402

TABLE = HERE / "results" / "architectures.csv"
COLUMNS = [
    "architecture",
    "class",
    "attention",
    "parameters",
    "padded",
    "packed",
    "shared",
    "checkpointing",
    "sampler",
    "resume",
    "reload",
    "adapter",
    "rows",
    "layers",
    "lora_left_out",
    "seconds",
]
LOGPROBS, GRADIENT, SAMPLED = 1e-4, 1e-3, 1e-3
# Share of the tokens that may differ if a layer chooses the positions it reads by scores: with a
# tiny vocabulary, some scores are nearly equal.
CHOSEN_OTHERWISE = 0.2
LAYOUTS = ("padded", "packed", "shared")
SAVED = ("resume", "reload", "adapter")


def sequences() -> list[Datum]:
    """Return six datums: three answers to a first prompt, two to a second, a single answer to a
    third. Four reach beyond a window.
    """
    rng = np.random.default_rng(5)

    def draw(n: int) -> list[int]:
        return rng.integers(3, VOCAB, n).tolist()

    texts: list[tuple[list[int], int]] = []
    for prompt, answers in ((draw(24), (20, 8, 46)), (draw(6), (6, 48)), (draw(50), (1,))):
        texts += [(prompt + draw(n), len(prompt)) for n in answers]
    results = []
    for tokens, prompt in texts:
        weights = np.concatenate(
            [np.zeros(prompt - 1), rng.uniform(0.2, 1.0, len(tokens) - prompt)]
        ).astype(np.float32)
        results.append(
            Datum(
                ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
            )
        )
    return results


def compute_plain(
    model: Any, datums: list[Datum]
) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Return the logprobs of each datum and the gradient of their weighted sum, from the plain
    model with a separate forward per sequence.
    """
    model.zero_grad()
    logprobs = []
    for datum in datums:
        logits = (
            model(input_ids=torch.tensor([datum.model_input.to_ints()]), use_cache=False)
            .logits[0]
            .double()
        )
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].array)
        logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        (-(logp * torch.from_numpy(datum.loss_fn_inputs["weights"].array)).sum()).backward()
        logprobs.append(logp.detach().numpy())
    return logprobs, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def compute_rounding_error(model: Any, datums: list[Datum], logprobs: list[np.ndarray]) -> float:
    """Return the largest difference, in nats, between the plain model's logprobs in float32 and in
    float64.
    """
    exact, _ = compute_plain(models._disable_randomness(copy.deepcopy(model)).double(), datums)
    return max(float(np.abs(a - b).max()) for a, b in zip(exact, logprobs, strict=True))


def loaded_copy(model: Any, name: str) -> models.LoadedModel:
    return models.LoadedModel(
        models._disable_randomness(copy.deepcopy(model)), None, f"tiny {name}", ()
    )


def judge_architecture(
    model: Any,
    name: str,
    datums: list[Datum],
    truth: Any,
    accelerator: Any,
    settings: LearnerSettings,
) -> str:
    """Return a verdict in words on a learner's outputs and gradient, compared with `truth`."""
    try:
        learner = Learner(loaded_copy(model, name), accelerator, settings)
        outputs, _ = learner.run(
            datums, get_loss("cross_entropy"), {}, temperature=1.0, divisor=1.0, backward=True
        )
    except (UserError, ValueError) as error:
        return f"refused: {error}"
    logprobs, gradient = truth
    worst = max(
        float(np.abs(outputs[i]["logprobs"] - expected).max())
        for i, expected in enumerate(logprobs)
    )
    square = sum(
        float((p.grad - gradient[n]).square().sum())
        for n, p in learner.trainable.items()
        if p.grad is not None and n in gradient
    )
    missing = [
        n for n in gradient if learner.trainable[n].grad is None and gradient[n].abs().max() > 0
    ]
    off = (square / sum(float(g.square().sum()) for g in gradient.values())) ** 0.5
    if (
        off <= GRADIENT
        and not missing
        and (worst <= LOGPROBS or worst <= 4 * compute_rounding_error(model, datums, logprobs))
    ):
        return "exact" + (
            ""
            if worst <= LOGPROBS
            else f" ({worst:.1g} nats, as the plain model is from itself in float64)"
        )
    return f"WRONG: {worst:.2g} nats, gradient {off:.2g}" + (
        f", none for {missing[:2]}" if missing else ""
    )


def sampled(model: Any) -> str:
    """Sample from three prompts and return a verdict on the logprobs, compared with the plain
    model's scores.
    """
    rng = np.random.default_rng(9)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (5, 50, 31)]
    with torch.no_grad():
        engine = Engine(
            make_decoder(models._disable_randomness(copy.deepcopy(model))), (), max_context=200
        )
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=0)
        for i, prompt in enumerate(prompts):
            engine.add(
                SamplingRequest(prompt=prompt, num_samples=2, params=params, seed=3, problem=i)
            )
        worst, off, count = 0.0, 0, 0
        for prompt, response in zip(prompts, engine.run(), strict=True):
            for sequence in response.sequences:
                ids = torch.tensor([prompt + sequence.tokens])
                logits = (
                    model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
                )
                expected = logits.log_softmax(-1).gather(
                    -1, torch.tensor(sequence.tokens)[:, None]
                )[:, 0]
                apart = (torch.tensor(sequence.logprobs).double() - expected).abs()
                worst, off, count = (
                    max(worst, float(apart.max())),
                    off + int((apart > SAMPLED).sum()),
                    count + len(apart),
                )
    if (
        worst > SAMPLED
        and describe_layers(model).selected_positions
        and off <= CHOSEN_OTHERWISE * count
    ):
        return f"exact but for {off} of {count} tokens, whose layers chose other positions to read"
    return "exact" if worst <= SAMPLED else f"WRONG: {worst:.2g} nats"


def rows_of(model: Any) -> str:
    decoder = make_decoder(copy.deepcopy(model))
    return decoder.plan.rows if isinstance(decoder, HFDecoder) else "fast"


def attempt(work: Callable[[], Any]) -> str:
    """Return the result of `work` as text, or the exception as a "refused: ..." cell. The table
    covers third-party models of every kind, so any exception is a valid cell.
    """
    try:
        return str(work())
    except Exception as error:  # noqa: BLE001
        first = (str(error).strip() or "no text").splitlines()[0]
        return f"refused: {type(error).__name__}: {first[:160]}"


def left_out(model: Any, name: str) -> str:
    result = add_lora(loaded_copy(model, name), LoraConfig(rank=2, seed=0))
    return f"{result.unadapted_share:.3f}"


def measure_saved_columns(model: Any) -> dict[str, str]:
    """Return the columns SAVED of an architecture that the learner accepts in some layout."""
    datums, accelerator = sequences()[:3], make_accelerator(bf16=False)
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, str] = {}
        text = attempt(
            lambda: result.update(saved_columns(model, datums, accelerator, Path(folder))) or ""
        )
        adapter = attempt(lambda: adapter_column(model, datums, accelerator, Path(folder)))
    return {"resume": text, "reload": text, **result, "adapter": adapter}


def saved_row(known: dict[str, Any]) -> dict[str, Any]:
    """Return a row measured before, with the columns SAVED added."""
    torch.set_num_threads(1)
    return {**known, **measure_saved_columns(tiny_model(known["architecture"]))}


def row(name: str) -> dict[str, Any]:
    """Return the row of an architecture. Raises any exception that building the model raises."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    model = tiny_model(name)
    result: dict[str, Any] = {
        "architecture": name,
        "class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    datums, accelerator = sequences(), make_accelerator(bf16=False)
    plain = models._disable_randomness(copy.deepcopy(model))
    truth: Any = None

    def layout(which: str, checkpointing: bool = False) -> str:
        nonlocal truth
        truth = truth or compute_plain(plain, datums)
        settings = LearnerSettings(
            token_budget=400, layout=which, gradient_checkpointing=checkpointing
        )
        return judge_architecture(model, name, datums, truth, accelerator, settings)

    for which in LAYOUTS:
        result[which] = attempt(lambda which=which: layout(which))
    result["checkpointing"] = attempt(lambda: layout("padded", checkpointing=True))
    result["sampler"] = attempt(lambda: sampled(plain))
    result.update(measure_saved_columns(model))
    result["rows"] = (
        attempt(lambda: rows_of(plain)) if result["sampler"].startswith("exact") else ""
    )
    result["layers"] = str(describe_layers(model))
    result["lora_left_out"] = attempt(lambda: left_out(model, name))
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


# ------------------------------------------------------------------------------------------- table


def write(rows: dict[str, dict[str, Any]]) -> None:
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def in_its_own_process(
    name: str, limit: float, work: Callable[[Any], dict[str, Any]] = row, inputs: Any = None
) -> dict[str, Any]:
    """Return a row from a child process, or a row that describes the end of the process. The
    process is forked, because the imports take seconds and a fork inherits them.
    """
    here, present = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send_row, args=(name, present, work, name if inputs is None else inputs)
    )
    process.start()
    present.close()
    try:
        if here.poll(limit):
            return here.recv()
        return {"architecture": name, "class": f"not tried: no row within {limit:g} s"}
    except EOFError:
        process.join(10)
        return {
            "architecture": name,
            "class": f"not tried: the process ended with code {process.exitcode}",
        }
    finally:
        process.kill()
        process.join()


def _send_row(name: str, present: Any, work: Callable[[Any], dict[str, Any]], inputs: Any) -> None:
    try:
        present.send(work(inputs))
    except Exception as error:  # noqa: BLE001
        first = (str(error).strip() or "no text").splitlines()[0]
        present.send(
            {"architecture": name, "class": f"not built: {type(error).__name__}: {first[:200]}"}
        )


def warm_up() -> None:
    """Import everything that each row needs. Runs no backward, because its threads do not survive a
    fork.
    """
    torch.set_num_threads(1)
    make_accelerator(bf16=False)
    add_lora(loaded_copy(tiny_model("llama"), "llama"), LoraConfig(rank=2))


def summary(rows: dict[str, dict[str, Any]]) -> str:
    lines = []
    for column in ("padded", "packed", "shared", "checkpointing", "sampler", *SAVED):
        cells = [row.get(column) or "" for row in rows.values()]
        counts = {
            kind: sum(cell.startswith(kind) for cell in cells)
            for kind in ("exact", "refused", "WRONG")
        }
        lines.append(
            f"{column:14}" + "  ".join(f"{kind} {count}" for kind, count in counts.items())
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="architectures, by transformers' model_type")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one architecture")
    parser.add_argument(
        "--saved",
        action="store_true",
        help="resume, reload and adapter alone, of rows that have no such cell",
    )
    request = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows: dict[str, dict[str, Any]] = {}
    if TABLE.is_file():
        with TABLE.open() as file:
            rows = {row["architecture"]: row for row in csv.DictReader(file)}
    warm_up()
    names = (
        [name for name in rows if rows[name]["parameters"] and not rows[name].get("resume")]
        if request.saved
        else model_types()
    )
    for name in request.only or names:
        if request.saved:
            result = in_its_own_process(name, request.limit, saved_row, rows[name])
            rows[name] |= {column: result.get(column) or result["class"] for column in SAVED}
        else:
            rows[name] = in_its_own_process(name, request.limit)
        write(rows)
        print({key: value for key, value in rows[name].items() if key != "class"}, flush=True)
    print(summary(rows))
    write_page()
    sys.exit(any(str(cell).startswith("WRONG") for row in rows.values() for cell in row.values()))


if __name__ == "__main__":
    main()
