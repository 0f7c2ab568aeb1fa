"""Test gradients, updates, samples and saved weights of every launch against plain torch in float64
on one process.

A single launch per backend computes everything (distributed_cases.py); the tests check its output.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_cases import (
    DIVISOR,
    FEW,
    GRADIENTS,
    LONGEST,
    PROMPTS,
    STEPS,
    for_loss,
    make_eight_datums,
    masked_on_one_rank,
    over_sequences,
    update_datums,
    update_params,
)
from helpers import GRADIENT_BOUND, float32_bound, make_worker
from peft import PeftModel
from rank_server import Launch, Ranks, make_launch_environment, shared_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.distributed import make_accelerator
from rl.errors import UserError
from rl.models import load_model
from rl.types import Datum, LoraConfig

pytestmark = pytest.mark.slow
REPO = Path(__file__).resolve().parents[2]
# parameters up to this size are not sharded: this covers the norms, but no matrices and adapters
SHARDED = 200
# launch: (accelerate config, or None for one process; (distributed type, class of the wrapper ("*"
# is the model's class), processes); a second DeepSpeed config for the same processes). The last
# two: two machines of two GPUs.
LAUNCHES = {
    "one process": (None, ("NO", "*", 1), None),
    "ddp": ("ddp", ("MULTI_CPU", "*", 2), None),
    "zero1": ("zero1", ("DEEPSPEED", "DeepSpeedEngine", 2), None),
    "zero2": ("zero2", ("DEEPSPEED", "DeepSpeedEngine", 2), None),
    "zero3": ("zero3", ("DEEPSPEED", "DeepSpeedEngine", 2), "zero3_offload"),
    "fsdp2": ("fsdp2", ("MULTI_CPU", "FSDP*", 2), None),
    "hsdp": ("hsdp", ("MULTI_CPU", "FSDP*", 4), None),
    "zero3, hpz": ("zero3", ("DEEPSPEED", "DeepSpeedEngine", 4), None),
}
LAUNCH_WORDS = {"hsdp": ("--num_machines", "1", "--parallelism_config_dp_shard_size", "2")}
DATUMS = {
    "eight": make_eight_datums,
    "masked": masked_on_one_rank,
    "one datum": lambda: masked_on_one_rank()[:1],
}
# "value": untied, with a value head
STARTS = ("tied", "untied", "value", "lora_tied", "lora_untied")


# ---------------------------------------------------------------------------------------- launching


@pytest.fixture(scope="module")
def initial_models(tmp_path_factory) -> Path:
    """Save models without weights at an initial zero or one, so that every gradient counts."""
    folder = tmp_path_factory.mktemp("starts")
    model = load_model("tiny:addition", seed=1).model
    model.config.tie_word_embeddings = False
    # gets different values below
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(str(folder / "untied_base"))
    for name in STARTS:
        base = "tiny:addition" if name in ("tied", "lora_tied") else str(folder / "untied_base")
        worker = make_worker(
            base,
            lora=LoraConfig(rank=3, seed=5) if "lora" in name else None,
            value_head=name == "value",
        )
        worker.save_state(0, str(folder / name), {}, None)
    return folder


def sharded(config: str, folder: Path, **settings: int) -> Path:
    """Write the project's DeepSpeed config with a lower threshold; its default would not shard a
    model this small. `settings`: more ZeRO settings.
    """
    content = json.loads((REPO / "ds_configs" / f"{config}.json").read_text())
    settings["stage3_param_persistence_threshold"] = SHARDED
    content["zero_optimization"] |= settings
    path = folder / f"{config}.json"
    path.write_text(json.dumps(content))
    return path


def start_launch(
    config: str | None,
    out: Path,
    *words: str | Path,
    script: str,
    processes: int = 2,
    options: Sequence[str] = (),
    ranks: Ranks | None = None,
) -> Launch:
    """Start `script` in the folder `out` on the ranks of a launch config, or on a single rank if
    `config` is None.

    The ranks are forks of a process with everything imported, in the environment that accelerate's
    launcher makes of the config and of `options`. The launcher itself is part of
    test_services.py, test_sharded_loading.py and test_crash_safety.py.
    """
    environment = {"TORCH_EXTENSIONS_DIR": str(out / "extensions")}
    if config is not None:
        options = ["--num_processes", str(processes), "--main_process_port", "0", *options]
        if config == "zero3" and "--deepspeed_config_file" not in options:
            options += ["--deepspeed_config_file", str(sharded("zero3", out))]
        file = REPO / f"accelerate_configs/{config}.yaml"
        environment |= make_launch_environment("--config_file", str(file), *options)
    world = 1 if config is None else processes
    launched = config is not None
    return (ranks or shared_ranks()).start(
        *words, cwd=out, world=world, script=str(REPO / script), launched=launched, **environment
    )


def run_launch(
    config: str | None, out: Path, *words: str | Path, seconds: float = 300.0, **options: Any
) -> None:
    """Run `start_launch` to its end: all of its processes have ended afterwards."""
    launch = start_launch(config, out, *words, **options)
    assert set(launch.wait(seconds)) == {0}, launch.output()[-3000:]


def case_on_ranks(script, start, out, config, seconds, processes=2, words=()):
    """Run `script` on two or more processes of a launch config, or on a single process if `config`
    is None; return the content of out/found.pt. `words`: further arguments of the script.
    """
    run_launch(
        config, out, start, out, *words, seconds=seconds, processes=processes, script=f"tests/{script}"
    )  # fmt: skip
    return torch.load(out / "found.pt", weights_only=False)


def assert_same_gradients(single, result, cases):
    """Check that each case ({parameter: gradient}, norm) agrees between one process and two."""
    for case in cases:
        (first, norm), (both, found_norm) = single[case], result[case]
        assert first.keys() == both.keys() and norm > 0
        assert found_norm == pytest.approx(norm, rel=2e-5), case
        for name, expected in first.items():
            assert float((both[name] - expected).norm()) <= 2e-5 * norm, (case, name)


@pytest.fixture(
    scope="module",
    params=[
        # stage 1 is stage 2 with sums at the end, and four processes take five minutes
        pytest.param(name, marks=[pytest.mark.campaign] * (name == "zero1" or launch[1][2] == 4))
        for name, launch in LAUNCHES.items()
    ],
)
def launched(request, initial_models, tmp_path_factory) -> tuple[str, dict, Path]:
    out = tmp_path_factory.mktemp("out")
    also = LAUNCHES[request.param][2]
    words = [] if also is None else ["--also", sharded(also, out)]
    return request.param, launch_cases(request.param, initial_models, out, *words), out


def launch_cases(name: str, starts: Path, out: Path, *words: str | Path) -> dict[str, Any]:
    """Return the results of distributed_cases.py on the processes of a launch."""
    config, (*_, processes), _ = LAUNCHES[name]
    options = list(LAUNCH_WORDS.get(name, ()))
    if name == "zero3, hpz":
        file = sharded("zero3_hpz", out, zero_hpz_partition_size=2)
        options += ["--deepspeed_config_file", str(file)]
    run_launch(
        config, out, starts, out, *words, processes=processes, options=options,
        script="tests/distributed_cases.py",
    )  # fmt: skip
    return torch.load(out / "results.pt", weights_only=False)


def load(
    initial_models: Path, start: str, folder: Path | None = None, dtype: torch.dtype = torch.float64
):
    """Return the start (or the model saved in `folder`), loaded only with transformers and PEFT."""
    folder = folder or initial_models / start / "model"
    if "lora" not in start:
        model = AutoModelForCausalLM.from_pretrained(str(folder))
        if start == "value":
            model.value_head = torch.nn.Linear(model.config.hidden_size, 1)
            model.value_head.load_state_dict(
                load_file(str(initial_models / start / "value_head.safetensors"))
            )
        return model.to(dtype)
    base = load_model(
        str(initial_models / "untied_base") if "untied" in start else "tiny:addition", seed=1
    ).model
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True).to(dtype)


def logprobs_of(model, tokens: list[int], targets: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)[
        torch.arange(len(targets)), targets
    ]


def datum_loss(loss: str, datum: Datum, logp_T: torch.Tensor) -> torch.Tensor:
    """Return the loss of one datum, written from the loss's paper."""
    fields = {name: data.to_torch().to(logp_T.dtype) for name, data in datum.loss_fn_inputs.items()}
    if loss == "cross_entropy":
        return -(fields["weights"] * logp_T).sum()
    if loss == "custom":
        return over_sequences([datum], [logp_T])[0] * DIVISOR
    old_T, advantages_T, mask_T = fields["logprobs"], fields["advantages"], fields["mask"]
    if loss == "ppo":
        ratio_T = (logp_T - old_T).exp()
    else:  # gspo, by tokens
        mean = ((logp_T - old_T) * mask_T).sum() / mask_T.sum()
        ratio_T = mean.exp().detach() * (logp_T - logp_T.detach()).exp()
    return -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)[
        mask_T > 0
    ].sum()


def backward(model, datums: list[Datum], loss: str, divisor: float = DIVISOR) -> float:
    """Add the gradient of the loss's sum, a datum at a time in float64 sums; return the loss."""
    total = 0.0
    for datum in for_loss(datums, loss):
        tokens = datum.model_input.to_ints()
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
        if loss == "value":
            hidden_TD = model(
                input_ids=torch.tensor([tokens]), output_hidden_states=True
            ).hidden_states[-1][0]
            mask_T, returns_T = (
                datum.loss_fn_inputs[name].to_torch().double() for name in ("mask", "returns")
            )
            value = (mask_T * (model.value_head(hidden_TD)[:, 0] - returns_T).square() / 2).sum()
        else:
            value = datum_loss(loss, datum, logprobs_of(model, tokens, targets))
        (value / divisor).backward()
        total += float(value.detach())
    return total


class ReferenceGradients:
    """Gradients and updates in float64, each computed once for all launches."""

    def __init__(self, initial_models: Path):
        self.starts = initial_models

    @cache  # noqa: B019  (as long as the module's fixture)
    def gradient(
        self, start: str, loss: str, datums: str = "eight"
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Return the gradient of all trained parameters and the loss; `datums`: a key of DATUMS."""
        model = load(self.starts, start)
        value = backward(model, DATUMS[datums](), loss)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()
        }, value

    @cache  # noqa: B019
    def updates(
        self, start: str, loss: str = "ppo", steps: int = STEPS
    ) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Update with torch's AdamW and clipping; return the change of each trained weight, and the
        norms before clipping.
        """
        model, norms = load(self.starts, start), []
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        adam = torch.optim.AdamW(parameters.values())
        for step in range(steps):
            adam.zero_grad()
            backward(model, update_datums(step), loss)
            params = update_params(step)
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm)
            norms.append(float(norm))
            assert norms[-1] > params.grad_clip_norm
            adam.param_groups[0].update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
            adam.step()
        return {name: p.detach() - before[name] for name, p in parameters.items()}, norms

    @cache  # noqa: B019
    def bf16_noise(self, start: str, loss: str) -> float:
        """Return the distance of plain torch in bf16 on one process from float64: gradients of
        single datums, added up in float64.
        """
        exact, _ = self.gradient(start, loss)
        total = {name: torch.zeros_like(value) for name, value in exact.items()}
        model = load(self.starts, start, dtype=torch.bfloat16)
        for datum in make_eight_datums():
            model.zero_grad()
            backward(model, [datum], loss)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad.double()
        return compute_difference(total, exact)


@pytest.fixture(scope="module")
def reference_gradients(initial_models) -> ReferenceGradients:
    return ReferenceGradients(initial_models)


def compute_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the relative difference, by the norm over all parameters."""
    assert got.keys() == expected.keys()
    apart = sum(float((got[name].double() - expected[name]).square().sum()) for name in expected)
    whole = sum(float(value.square().sum()) for value in expected.values())
    return (apart / whole) ** 0.5 if whole else apart**0.5


def assert_same(
    result: tuple[dict[str, torch.Tensor], float],
    expected: dict[str, torch.Tensor],
    bound: float = GRADIENT_BOUND,
) -> None:
    """Check the gradient per parameter (the whole norm hides a small wrong parameter), and the
    reported norm.

    The gradient of a parameter may be twenty times smaller than the terms it is the difference of.
    """
    gradient, norm = result
    assert compute_difference(gradient, expected) < bound
    for name in expected:
        assert compute_difference({name: gradient[name]}, {name: expected[name]}) < 20 * bound, name
    whole = sum(float(value.square().sum()) for value in expected.values()) ** 0.5
    assert norm == pytest.approx(whole, rel=2 * bound)


# -------------------------------------------------------------------------------------------- tests


def test_the_launch_is_what_it_says(launched):
    """Each launch really uses its backend, and under ZeRO-3 each rank holds only a part."""
    name, results, _ = launched
    kind, wrapped, processes = LAUNCHES[name][1]
    for case in GRADIENTS:
        launch = results[case]["launch"]
        where = launch["distributed_type"], launch["world"], launch["processes"]
        assert where == (kind, processes, processes)
        bare = "PeftModelForCausalLM" if case.startswith("lora") else "Qwen3ForCausalLM"
        assert launch["wrapped"] == wrapped.replace("*", bare)
        assert launch["stage"] == (int(name[4]) if name.startswith("zero") else None)
        assert launch["dtype"] == "fp32"
        # twice the timeout plus a minute, see ObjectGroup; never a library's default of half an
        # hour
        assert launch["bound"] <= 2 * 60 + 60
        share = launch["own"] / launch["parameters"]
        if name.startswith("zero3"):
            assert share < 0.05  # the norms: DeepSpeed keeps its shares elsewhere
        else:
            assert share == (pytest.approx(0.5, abs=0.01) if name in ("fsdp2", "hsdp") else 1)


def test_nothing_is_compiled_at_start(launched):
    """Torch builds extensions under a lock, and a killed process's lock would block all later
    starts.
    """
    _, _, out = launched
    assert not (out / "extensions").exists()


def test_cuts_are_what_they_say(launched):
    """Checks the micro-batches of rank 0. (Eight unequal sequences do not always split into two
    halves of equal cost, so two ranks may have two each.)
    """
    name, results, _ = launched
    processes = LAUNCHES[name][1][2]
    assert results["tied, ppo, one micro-batch of all"]["cuts"] <= processes
    assert results["tied, ppo, one sequence a micro-batch"]["cuts"] == 8 // processes
    assert 2 <= results["tied, ppo, some a micro-batch, calls of 3 and 5"]["cuts"] <= 6


@pytest.mark.parametrize("name", ["hsdp", "zero3, hpz"])
def test_few_gradients_on_four_processes(name, initial_models, reference_gradients, tmp_path):
    results = launch_cases(name, initial_models, tmp_path, "--few")
    assert results.keys() == set(FEW)
    for case, result in results.items():
        launch = result["launch"]
        assert launch["processes"] == 4
        # each machine of two ranks holds all weights: FSDP2's shards, or ZeRO-3's second copy
        held = launch["own" if name == "hsdp" else "second"] / launch["parameters"]
        assert held == pytest.approx(0.5, abs=0.01), case
        gradient, _ = reference_gradients.gradient(GRADIENTS[case].start, GRADIENTS[case].loss)
        assert_same((result["gradient"], result["norm"]), gradient)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(launched, reference_gradients, case):
    _, results, _ = launched
    result, expected = results[case], GRADIENTS[case]
    gradient, loss = reference_gradients.gradient(expected.start, expected.loss)
    assert_same((result["gradient"], result["norm"]), gradient)
    if expected.loss == "custom":  # the custom loss divides by itself
        loss /= DIVISOR
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "case", ["one rank all masked", "one datum", "a forward in between", "what was dropped is gone"]
)
def test_unequal_shares(launched, reference_gradients, case):
    datums = "one datum" if case == "one datum" else "masked"
    assert_same(launched[1][case], reference_gradients.gradient("untied", "ppo", datums)[0])


def test_a_step_on_no_datum_and_one_after_a_forward_without_the_adapter(
    launched, reference_gradients
):
    _, results, _ = launched
    assert results["no datum"] == {"grad_norm": 0.0, "skipped": 1.0}
    expected, _ = reference_gradients.gradient("lora_tied", "ppo")
    assert_same(results["a forward without the adapter before"], expected)


def test_models_side_by_side_are_each_as_if_alone(launched, reference_gradients):
    """A policy, a critic and a frozen model have separate engines: calls and updates of a model do
    not affect the others.
    """
    result = launched[1]["two models"]
    models = (("policy", "tied", "ppo"), ("critic", "value", "value"))
    for i, (name, start, loss) in enumerate(models):
        assert_same(result[name], reference_gradients.gradient(start, loss)[0])
        _, norms = reference_gradients.updates(start, loss, 2)
        assert [result[f"norms {step}"][i] for step in range(2)] == pytest.approx(norms, rel=1e-5)
    expected = pytest.approx(reference_gradients.gradient("untied", "ppo")[1], rel=1e-5)
    assert result["scores"] == result["scores after"] == expected


@pytest.mark.parametrize("start", ["untied", "lora_tied"])
def test_updates(launched, initial_models, reference_gradients, start):
    """The weights are read back from the folder that transformers or PEFT reads."""
    _, results, out = launched
    expected, norms = reference_gradients.updates(start)
    assert results[f"updates, {start}"]["norms"] == pytest.approx(norms, rel=1e-5)
    saved = dict(load(initial_models, start, out / "sampler_weights" / start).named_parameters())
    before = dict(load(initial_models, start).named_parameters())
    changes = {name: saved[name].detach() - before[name].detach() for name in expected}
    # float32 weights: 1e-7 of weights that are 1,000 times their change
    assert compute_difference(changes, expected) < 1e-4


@pytest.mark.parametrize("start", ["untied", "lora_tied"])
def test_saved_weights_are_those_that_sampled(launched, initial_models, start):
    """Reload with transformers or PEFT: the logprobs equal those of the learner, of the sampler's
    tokens, and of fixed tokens.
    """
    _, results, out = launched
    result = results[f"updates, {start}"]
    model = load(initial_models, start, out / "sampler_weights" / start)
    merged = AutoModelForCausalLM.from_pretrained(str(out / "sampler_weights" / f"{start}_merged"))
    with torch.no_grad():
        targets = [*PROMPTS[0][1:], 1]
        probe = logprobs_of(model, PROMPTS[0], targets)
        np.testing.assert_allclose(result["learner"], probe, atol=1e-5, rtol=0)
        np.testing.assert_allclose(
            logprobs_of(merged, PROMPTS[0], targets), probe, atol=1e-5, rtol=0
        )
        np.testing.assert_allclose(result["scored"][1:], probe[:-1], atol=1e-5, rtol=0)
        for prompt, sequences in zip(PROMPTS, result["both"], strict=True):
            for tokens, logprobs in sequences:
                whole = logprobs_of(model, [*prompt, *tokens[:-1]], [*prompt[1:], *tokens])
                np.testing.assert_allclose(logprobs, whole[len(prompt) - 1 :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("start", ["untied", "lora_tied"])
def test_resumed_is_undisturbed(launched, start):
    """After one more update, the running client and a client made from its checkpoint have the same
    bits, which differ from before.
    """
    _, _, out = launched
    file = "adapter_model.safetensors" if "lora" in start else "model.safetensors"
    before, went_on, resumed = (
        load_file(str(out / "sampler_weights" / (start + end) / file))
        for end in ("", "_went_on", "_resumed")
    )
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)
    assert not any(torch.equal(went_on[name], before[name]) for name in went_on)


@pytest.mark.parametrize("start", ["untied", "lora_tied"])
def test_ranks_sample_unequal_lengths(launched, start):
    """The samples of one rank ended at their first token, and those of the other ran to the limit.
    The first are equal when they are drawn separately.
    """
    _, results, _ = launched
    result = results[f"updates, {start}"]
    lengths = [[len(tokens) for tokens, _ in sequences] for sequences in result["both"]]
    assert lengths == [[LONGEST, LONGEST], [1, 1]]
    assert [tokens for tokens, _ in result["alone"]] == [tokens for tokens, _ in result["both"][1]]


@pytest.mark.parametrize("case", FEW)
def test_offloaded_optimizer(launched, reference_gradients, case):
    name, results, _ = launched
    if LAUNCHES[name][2] is None:
        return
    result, expected = results[f"also: {case}"], GRADIENTS[case]
    assert result["launch"]["optimizer_device"] == "cpu"
    gradient, _ = reference_gradients.gradient(expected.start, expected.loss)
    assert_same((result["gradient"], result["norm"]), gradient)


@pytest.mark.parametrize("case", FEW)
def test_bf16_gradients(launched, reference_gradients, case):
    """At most twice as far from float64 as plain torch in bf16 on one process: the noise of a
    rounding, drawn once more.

    A divisor that is wrong by a factor of two gives 0.5.
    """
    _, results, _ = launched
    result, expected = results[f"bf16: {case}"], GRADIENTS[case]
    assert result["launch"]["dtype"] == "bf16"
    noise = reference_gradients.bf16_noise(expected.start, expected.loss)
    assert noise < 0.05
    gradient, _ = reference_gradients.gradient(expected.start, expected.loss)
    assert compute_difference(result["gradient"], gradient) < 2 * noise


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("FSDP_VERSION", "1", "only 2 is supported"),
        ("FSDP_OFFLOAD_PARAMS", "true", "zero3_offload"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "leave it out"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "every rank reads"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "gradient_checkpointing"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "data-parallel ranks alone"),
        ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "4", "are 4 processes, but 2 were launched"),
    ],
)
def test_fsdp_settings_that_would_be_overruled_are_refused(monkeypatch, name, value, match):
    for key, fits in {
        "ACCELERATE_USE_FSDP": "true",
        "WORLD_SIZE": "2",
        "FSDP_VERSION": "2",
        name: value,
    }.items():
        monkeypatch.setenv(key, fits)
    with pytest.raises(UserError, match=match):
        make_accelerator(bf16=False)


def test_a_mac_computes_on_its_cpu(monkeypatch):
    """The learner's sums and the sampler's tokens are float64, which a Mac's GPU does not have."""
    from accelerate import state

    monkeypatch.setattr(state, "is_mps_available", lambda *_: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in (state.PartialState, state.AcceleratorState):
        monkeypatch.setattr(kind, "_shared_state", {})
    assert make_accelerator(bf16=False).device.type == "cpu"


@pytest.mark.parametrize("start", ["tied", "lora_tied"])
def test_bf16_gradients_add_up_in_fp32(launched, start):
    """Five equal calls give five times the gradient of one call, within float32 addition: bf16 sums
    would differ by 2e-3.
    """
    _, results, _ = launched
    once, repeated = results[f"bf16 repeated, {start}"]
    expected = {name: 5 * value.double() for name, value in once.items()}
    assert compute_difference(repeated, expected) < float32_bound(5 * 8)
