"""Check every causal LM of transformers at a tiny size: the learner scores and trains it exactly as
the plain model does, in each layout, or refuses it by name.

    # all architectures, half an hour on two cores,
    # into results/architectures.csv and docs/architectures.md
    python bench/architectures.py
    # some architectures; their rows replace the existing rows
    python bench/architectures.py --only llama gpt_neo

The script writes a row after each architecture. Each architecture runs in a separate process with a
time limit. docs/architectures.md explains the columns. A verdict is "exact", "refused: why" or
"WRONG: ...". Layouts are compared with the plain model on a single unpadded sequence at a time, in
float32: exact is 1e-4 nats for logprobs, 1e-3 for the gradient, 1e-3 nats for samples, and 1e-5 of
the largest logit (1 at least) for weights that plain transformers or PEFT reads again. If layers
choose the positions they read by scores, rounding may change the choice; the cell `sampler` then
counts the tokens that differ, at most a fifth. "refused" under `reload` and `adapter` may mean that
transformers changes the values it reads: the cell names the tensors.
Sequences are 12 to 70 tokens long and windows are 40. The exit code is 1 if a row contains WRONG.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
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

from bench.harness import RESULTS, make_parser, read_table, write_table  # noqa: E402
from rl.distributed import make_accelerator  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.layers import describe_layers  # noqa: E402
from rl.learner import Learner, LearnerSettings, ModelSpec, learner_checkpoint  # noqa: E402
from rl.losses import get_loss  # noqa: E402
from rl.models import add_lora, load_model  # noqa: E402
from rl.models import model_loading as models  # noqa: E402
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.sampler.decoder_hf import HFDecoder  # noqa: E402
from rl.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams  # noqa: E402
from tools.architectures_page import main as write_page  # noqa: E402

TABLE = RESULTS / "architectures.csv"
COLUMNS = (
    "architecture class parameters padded packed shared checkpointing sampler resume "
    "reload adapter rows layers lora_left_out seconds"
).split()
LOGPROBS, GRADIENT, SAMPLED, NEAR = 1e-4, 1e-3, 1e-3, 1e-5
LIMIT = 120.0  # seconds for one architecture
# Share of the tokens that may differ if a layer chooses the positions it reads by scores: with a
# tiny vocabulary, some scores are nearly equal.
CHOSEN_OTHERWISE = 0.2
LAYOUTS = ("padded", "packed", "shared")
SAVED = ("resume", "reload", "adapter")
_ADAM = AdamParams(learning_rate=2e-3, eps=1e-8)  # moves every weight by some 2e-3 a step
_SPEC = ModelSpec("tiny")
_IDS = torch.arange(3, 40)[None] % VOCAB  # [1, 37]: within every window


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
        answer = rng.uniform(0.2, 1.0, len(tokens) - prompt)
        weights = np.concatenate([np.zeros(prompt - 1), answer]).astype(np.float32)
        fields = {"target_tokens": tokens[1:], "weights": weights}
        results.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
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
        inputs = {k: torch.from_numpy(v.array) for k, v in datum.loss_fn_inputs.items()}
        logp = score_tokens(model, datum.model_input.to_ints(), inputs["target_tokens"])
        (-(logp * inputs["weights"]).sum()).backward()
        logprobs.append(logp.detach().numpy())
    gradients = ((name, p.grad) for name, p in model.named_parameters())
    return logprobs, {name: grad.clone() for name, grad in gradients if grad is not None}


def score_tokens(model: Any, ids: list[int], targets: torch.Tensor) -> torch.Tensor:
    """Return the logprobs in float64 of the tokens that follow the last positions of `ids`."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -len(targets) :]
    return logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def loaded_copy(model: Any, name: str) -> models.LoadedModel:
    plain = models._disable_randomness(copy.deepcopy(model))
    return models.LoadedModel(plain, None, f"tiny {name}", ())


def judge_architecture(
    model: Any, name: str, datums: list[Datum], truth: Any, accelerator: Any,
    settings: LearnerSettings,
) -> str:  # fmt: skip
    """Return a verdict in words on a learner's outputs and gradient, compared with `truth`."""
    try:
        learner = Learner(loaded_copy(model, name), accelerator, settings)
        outputs, _ = learner.run(
            datums, get_loss("cross_entropy"), {}, temperature=1.0, divisor=1.0, backward=True
        )
    except (UserError, ValueError) as error:
        return f"refused: {error}"
    logprobs, gradient = truth
    pairs = ((outputs[i]["logprobs"], expected) for i, expected in enumerate(logprobs))
    worst = max(float(np.abs(mine - expected).max()) for mine, expected in pairs)
    mine = {name: p.grad for name, p in learner.trainable.items()}
    missing = [n for n, g in gradient.items() if mine[n] is None and g.abs().max() > 0]
    gaps = (mine[n] - g for n, g in gradient.items() if mine[n] is not None)
    square = sum(float(gap.square().sum()) for gap in gaps)
    off = (square / sum(float(g.square().sum()) for g in gradient.values())) ** 0.5
    if off <= GRADIENT and not missing and worst <= LOGPROBS:
        return "exact"
    none = f", none for {missing[:2]}" if missing else ""
    return f"WRONG: {worst:.2g} nats, gradient {off:.2g}{none}"


@torch.no_grad()
def sampled(model: Any) -> str:
    """Sample from three prompts and return a verdict on the logprobs, compared with the plain
    model's scores.
    """
    rng = np.random.default_rng(9)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (5, 50, 31)]
    decoder = make_decoder(models._disable_randomness(copy.deepcopy(model)))
    engine = Engine(decoder, (), max_context=200)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=0)
    for i, prompt in enumerate(prompts):
        request = SamplingRequest(prompt=prompt, num_samples=2, params=params, seed=3, problem=i)
        engine.add(request)
    gaps = []
    for prompt, response in zip(prompts, engine.run(), strict=True):
        for sequence in response.sequences:
            ids, targets = [*prompt, *sequence.tokens[:-1]], torch.tensor(sequence.tokens)
            expected = score_tokens(model, ids, targets)
            gaps.append((torch.tensor(sequence.logprobs).double() - expected).abs())
    apart = torch.cat(gaps)
    worst, off = float(apart.max()), int((apart > SAMPLED).sum())
    if worst <= SAMPLED:
        return "exact"
    if describe_layers(model).selected_positions and off <= CHOSEN_OTHERWISE * len(apart):
        return f"exact but for {off} of {len(apart)} tokens, whose layers chose other positions to read"
    return f"WRONG: {worst:.2g} nats"


def attempt(work: Callable[[], Any]) -> str:
    """Return the result of `work` as text, or the exception as a "refused: ..." cell. The table
    covers third-party models of every kind, so any exception is a valid cell.
    """
    try:
        return str(work())
    except Exception as error:  # noqa: BLE001
        return f"refused: {_shorten(error)}"


def _shorten(error: Exception) -> str:
    first = (str(error).strip() or "no text").splitlines()[0]
    return f"{type(error).__name__}: {first[:160]}"


def left_out(model: Any, name: str) -> str:
    result = add_lora(loaded_copy(model, name), LoraConfig(rank=2, seed=0))
    return f"{result.unadapted_share:.3f}"


# ------------------------------------------------------------------ weights that are written and read


def _loaded(folder: str, model: Any) -> models.LoadedModel:
    return replace(load_model(folder), name=f"tiny {model.config.model_type}")


def _learner(loaded: models.LoadedModel, accelerator: Any) -> Learner:
    return Learner(loaded, accelerator, LearnerSettings(token_budget=400))


def _steps(learner: Learner, datums: list[Datum], count: int) -> None:
    for _ in range(count):
        options = {"temperature": 1.0, "divisor": 10.0, "backward": True}
        learner.run(datums, get_loss("cross_entropy"), {}, **options)
        learner.step(_ADAM)


def _state(learner: Learner) -> dict[str, torch.Tensor]:
    """Return copies of the weights and of AdamW's state."""
    results = dict(learner.trainable) | learner.backend.optimizer_tensors()
    return {name: tensor.detach().clone() for name, tensor in results.items()}


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=_IDS, use_cache=False).logits.double()


def _apart(result: torch.Tensor, expected: torch.Tensor, plain: Any, folder: Path) -> str:
    """Return a verdict on the logits of transformers' model, compared with `expected`. `plain`: the
    model as transformers read it from `folder`.
    """
    off = float((result - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if off > NEAR and (other := _read_otherwise(plain, folder)):
        return f"refused: transformers does not read what the file says of {', '.join(other)}"
    return "exact" if off <= NEAR else f"WRONG: logits {off:.2g} of the largest apart"


def saved_columns(
    model: Any, datums: list[Datum], accelerator: Any, folder: Path
) -> dict[str, Any]:
    """Return `resume` and `reload`, from a single training run of all weights. `model`: as
    transformers builds it; `folder`: for the written files.
    """
    learner_checkpoint.write_model(model, None, folder / "base")
    first = _learner(_loaded(str(folder / "base"), model), accelerator)
    begun = _state(first)
    _steps(first, datums, 2)
    random, metadata = [torch.get_rng_state()], learner_checkpoint.SaveMetadata({})
    learner_checkpoint.save_learner_state(first, _SPEC, folder / "at2", random, metadata, None)
    _steps(first, datums, 2)
    base, _ = learner_checkpoint.resolve_base_model(_SPEC, str(folder / "at2"))
    second = _learner(_loaded(base, model), accelerator)
    learner_checkpoint.load_learner_state(second, folder / "at2", True, 0)
    _steps(second, datums, 2)
    whole, resumed = _state(first), _state(second)
    unlike = sorted(whole.keys() ^ resumed.keys())
    unlike += [n for n in whole if n in resumed and not torch.equal(whole[n], resumed[n])]
    still = all(torch.equal(tensor, whole[name]) for name, tensor in begun.items())
    resume = "exact"
    if unlike:
        resume = f"WRONG: {len(unlike)} of {len(whole)} tensors differ, {unlike[0]} first"
    learner_checkpoint.write_model(first.model, None, folder / "last")
    plain = _plain(folder / "last")
    reload = _apart(_logits(plain), _logits(first.model), plain, folder / "last")
    return {"resume": "WRONG: nothing moved" if still else resume, "reload": reload}


def adapter_column(model: Any, datums: list[Datum], accelerator: Any, folder: Path) -> str:
    """Return the cell `adapter`. `folder`: for the written files."""
    from peft import PeftModel

    learner_checkpoint.write_model(model, None, folder / "bare")
    loaded = add_lora(_loaded(str(folder / "bare"), model), LoraConfig(rank=2, seed=0))
    before = _logits(loaded.model)
    learner = _learner(loaded, accelerator)
    _steps(learner, datums, 2)
    after = _logits(learner.model)
    learner_checkpoint.write_model(learner.model, None, folder / "adapter")
    bare = _plain(folder / "bare")
    plain = PeftModel.from_pretrained(copy.deepcopy(bare), str(folder / "adapter"))
    if torch.equal(before, after):
        return "WRONG: nothing moved"
    return _apart(_logits(plain), after, bare, folder / "bare")


def _read_otherwise(plain: Any, folder: Path) -> list[str]:
    """Return the names of tensors that differ between a file and the model that transformers made
    from it (example: Youtu's padding row: zeros).
    """
    from safetensors.torch import load_file

    reference, written = dict(plain.named_parameters()), load_file(folder / "model.safetensors")
    shared = (name for name in written if name in reference)
    return [name for name in shared if not torch.equal(reference[name], written[name])]


def _plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def measure_saved_columns(model: Any) -> dict[str, str]:
    """Return the columns SAVED of an architecture that the learner accepts in some layout."""
    inputs, result = (model, sequences()[:3], make_accelerator(bf16=False)), {}
    with tempfile.TemporaryDirectory() as folder:
        text = attempt(lambda: result.update(saved_columns(*inputs, Path(folder))) or "")
        adapter = attempt(lambda: adapter_column(*inputs, Path(folder)))
    return {"resume": text, "reload": text, **result, "adapter": adapter}


# ------------------------------------------------------------------------------------------- table


def row(name: str) -> dict[str, Any]:
    """Return the row of an architecture. Raises any exception that building the model raises."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    model = tiny_model(name)
    result: dict[str, Any] = {
        "architecture": name,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    datums, accelerator = sequences(), make_accelerator(bf16=False)
    plain = models._disable_randomness(copy.deepcopy(model))
    truth: Any = None

    def layout(which: str, checkpointing: bool = False) -> str:
        nonlocal truth
        truth = truth or compute_plain(plain, datums)
        options: dict[str, Any] = {"layout": which, "gradient_checkpointing": checkpointing}
        settings = LearnerSettings(token_budget=400, **options)
        return judge_architecture(model, name, datums, truth, accelerator, settings)

    for which in LAYOUTS:
        result[which] = attempt(lambda which=which: layout(which))
    result["checkpointing"] = attempt(lambda: layout("padded", checkpointing=True))
    result["sampler"] = attempt(lambda: sampled(plain))
    result.update(measure_saved_columns(model))
    exact = result["sampler"].startswith("exact")
    decoder = make_decoder(copy.deepcopy(plain)) if exact else None
    result["rows"] = decoder.plan.rows if isinstance(decoder, HFDecoder) else "fast" * exact
    result["layers"] = str(describe_layers(model))
    result["lora_left_out"] = attempt(lambda: left_out(model, name))
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


def in_its_own_process(name: str) -> dict[str, Any]:
    """Return a row from a child process, or a row that describes the end of the process. The
    process is forked, because the imports take seconds and a fork inherits them.
    """
    context = multiprocessing.get_context("fork")
    here, present = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(name, present))
    process.start()
    present.close()
    try:
        if here.poll(LIMIT):
            return here.recv()
        why = f"no row within {LIMIT:g} s"
    except EOFError:
        process.join(10)
        why = f"the process ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return {"architecture": name, "class": f"not tried: {why}"}


def _send_row(name: str, present: Any) -> None:
    try:
        present.send(row(name))
    except Exception as error:  # noqa: BLE001
        present.send({"architecture": name, "class": f"not built: {_shorten(error)}"})


def warm_up() -> None:
    """Import everything that each row needs. Runs no backward, because its threads do not survive a
    fork.
    """
    torch.set_num_threads(1)
    make_accelerator(bf16=False)
    add_lora(loaded_copy(tiny_model("llama"), "llama"), LoraConfig(rank=2))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", help="architectures, by transformers' model_type")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = {row["architecture"]: row for row in read_table(TABLE)}
    warm_up()
    for name in args.only or model_types():
        rows[name] = in_its_own_process(name)
        cells = [{column: rows[key].get(column, "") for column in COLUMNS} for key in sorted(rows)]
        write_table(TABLE, cells)
        print({key: value for key, value in rows[name].items() if key != "class"}, flush=True)
    write_page()
    sys.exit(any(str(cell).startswith("WRONG") for row in rows.values() for cell in row.values()))


if __name__ == "__main__":
    main()
