"""Test bitsandbytes: a base in 4 bit against the matrices that it represents, and AdamW in 8 bit
against float64 and after a resume.
"""

import pytest
import torch
from helpers import call, compute_relative_difference, random_datums
from test_base_dtype import (
    any_precision,
    compute_adapter_gradients,
    learner_of,
    reference,
    save_rounded_model,
)
from transformers import AutoModelForCausalLM

from rl.distributed import Sharding, ZeroSharding
from rl.errors import UserError
from rl.learner import LearnerSettings, adamw, check_optimizer
from rl.learner.adamw import make_adamw, set_adam_params
from rl.runtime import WorkerSettings
from rl.runtime.training_worker import ModelSpec, TrainingWorker
from rl.types import AdamParams

__all__ = ["any_precision"]  # a fixture
CPU = torch.device("cpu")


def test_what_cannot_be_had_is_said(monkeypatch):
    monkeypatch.setattr(adamw.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bitsandbytes: pip install -e \"\.\[quantized\]\""):
        check_optimizer("adamw_8bit", CPU, Sharding())
    with pytest.raises(UserError, match=r"bitsandbytes: pip install -e \"\.\[quantized\]\""):
        learner_of("tiny:addition", "4bit")
    monkeypatch.undo()
    with pytest.raises(UserError, match="ZeRO and FSDP2"):
        check_optimizer("adamw_8bit", CPU, ZeroSharding(stage=2))
    with pytest.raises(UserError, match="adamw, adamw_8bit, paged_adamw_8bit"):
        check_optimizer("adam", CPU, Sharding())
    check_optimizer("adamw", CPU, ZeroSharding(stage=2))


def test_pages_need_a_gpu():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match="use adamw_8bit"):
        check_optimizer("paged_adamw_8bit", CPU, Sharding())


# -------------------------------------------------------------------------------------------- 4 bit


def unpacked_copy(worker: TrainingWorker, folder) -> str:
    """Save the base model with the numbers that the learner's 4-bit weights represent, and return
    its folder.
    """
    with worker.learners[0].full_model(adapter_only=False) as model:
        weights = {
            name.replace("base_model.model.", "").replace(".base_layer.", "."): p.detach().clone()
            for name, p in model.named_parameters()
            if "lora_" not in name
        }
        config = model.get_base_model().config
    bare = AutoModelForCausalLM.from_config(config)
    missing, unexpected = bare.load_state_dict(weights, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing)
    bare.tie_weights()
    bare.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False)])
def test_a_base_in_4_bit_is_the_matrices_it_stands_for(kind, tied, tmp_path):
    pytest.importorskip("bitsandbytes")
    base = save_rounded_model(kind, {"tie_word_embeddings": tied}, tmp_path / "base")
    packed = learner_of(base, "4bit")
    local = dict(packed.learners[0].model.named_parameters())
    assert sum(p.dtype == torch.uint8 for p in local.values()) == 4 * 7
    assert local["base_model.model.model.embed_tokens.weight"].dtype == torch.bfloat16
    logp, grad = compute_adapter_gradients(packed)
    same = learner_of(unpacked_copy(packed, tmp_path / "same"), "bf16")
    expected_logp, expected_grad = compute_adapter_gradients(same)
    assert torch.equal(logp, expected_logp) and torch.equal(grad, expected_grad)
    true_logp, true_grad = reference(packed)
    assert float((logp - true_logp).abs().median()) < 0.05
    assert float((grad.double() - true_grad).norm() / true_grad.norm()) < 0.1
    plain, _ = compute_adapter_gradients(learner_of(base, "bf16"))
    assert float((plain - logp).abs().max()) > 1e-3  # 4 bit differs from bf16


def test_4_bit_are_sampled_scored_and_merged_as_they_are_trained(tmp_path):
    pytest.importorskip("bitsandbytes")
    base = save_rounded_model("llama", {"tie_word_embeddings": False}, tmp_path / "base")
    worker = learner_of(base, "4bit")
    tokens = [3, 4, 12, 5, 6, 13]
    worker.snapshot(0, 1)
    (result,) = call(worker, "compute_logprobs", 1, [tokens])
    worker.save_for_sampler(0, str(tmp_path / "merged"), True, None)
    merged = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    with torch.no_grad():
        logp = merged(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert float((torch.tensor(result[1:]) - expected).abs().max()) < 0.1
    worker.snapshot_base(0, 2)
    (bare,) = call(worker, "compute_logprobs", 2, [tokens])
    assert bare != result


# -------------------------------------------------------------------------------------------- 8 bit

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def test_adamw_in_8_bit_follows_adamw():
    """Compare with AdamW in float64. The direction agrees after ten steps, though each moment has 8
    bits; small tensors, with moments in fp32, agree to rounding.
    """
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    start = {"large": torch.randn(64, 128), "small": torch.randn(32)}
    trained = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    exact = {name: torch.nn.Parameter(value.double()) for name, value in start.items()}
    packed, plain = (
        make_adamw(trained, "adamw_8bit"),
        torch.optim.AdamW(list(exact.values()), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    )
    for _ in range(10):
        for name, parameter in trained.items():
            gradient = torch.randn(parameter.shape) + 0.5
            parameter.grad, exact[name].grad = gradient, gradient.double()
        set_adam_params(packed, ADAM)
        packed.step()
        plain.step()
    assert packed.state[trained["large"]]["state1"].dtype == torch.uint8
    ours, theirs = (
        {name: (p.double() - start[name]).flatten() for name, p in weights.items()}
        for weights in (trained, exact)
    )
    assert compute_relative_difference(ours["small"], theirs["small"]) < 1e-5
    a, b = ours["large"], theirs["large"]
    assert float(torch.cosine_similarity(a, b, 0)) > 0.99
    assert 0.95 < float(a.norm() / b.norm()) < 1.05


def trainer(kind: str, state: str | None = None) -> TrainingWorker:
    worker = TrainingWorker(WorkerSettings(learner=LearnerSettings(optimizer=kind)))
    worker.create_model(0, ModelSpec("tiny:addition", seed=1), state, state is not None)
    return worker


def step(worker: TrainingWorker, seed: int) -> None:
    datums = random_datums(6, seed=seed)
    call(worker, "forward_backward", 0, datums, "importance_sampling", {}, 6.0, True)
    call(worker, "optim_step", 0, ADAM)


def test_adamw_in_8_bit_resumes_to_the_bit(tmp_path):
    pytest.importorskip("bitsandbytes")
    whole = trainer("adamw_8bit")
    for seed in range(4):
        step(whole, seed)
        if seed == 1:
            whole.save_state(0, str(tmp_path / "two"), {}, None)
    resumed = trainer("adamw_8bit", str(tmp_path / "two"))
    for seed in (2, 3):
        step(resumed, seed)
    learners = whole.learners[0], resumed.learners[0]
    for a, b in (
        [learner.trainable for learner in learners],
        [learner.backend.optimizer_tensors() for learner in learners],
    ):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    with pytest.raises(UserError, match="saved by adamw_8bit and cannot be loaded into adamw"):
        trainer("adamw", str(tmp_path / "two"))
    plain = trainer("adamw")
    step(plain, 0)
    plain.save_state(0, str(tmp_path / "plain"), {}, None)
    with pytest.raises(UserError, match="saved by adamw and cannot be loaded into adamw_8bit"):
        trainer("adamw_8bit", str(tmp_path / "plain"))
