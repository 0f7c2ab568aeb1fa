"""Test a frozen base in bf16 or 4 bit: logprobs and gradients equal those of the same numbers at
full precision.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import call, gather_targets, random_datums
from sampler_population import VOCAB, build

from rl.distributed import Sharding, ZeroSharding
from rl.distributed.checkpoint_folder import DiskFull
from rl.errors import UserError
from rl.learner import choose_base_dtype
from rl.models import unwrap_model
from rl.runtime import WorkerSettings
from rl.runtime.training_worker import ModelSpec, TrainingWorker
from rl.types import LoraConfig

TIED = dict(tie_word_embeddings=True)
UNTIED = dict(tie_word_embeddings=False)
KINDS = [(kind, TIED) for kind in ("qwen3", "gpt2", "gemma3_text", "mixtral", "opt")]
KINDS += [(kind, UNTIED) for kind in ("llama", "qwen3_moe", "gpt_neox")]
# With a base in fp32 their products are fp32 on a CPU, even under autocast.
EXPERTS = ("qwen3_moe", "mixtral")
LORA = LoraConfig(rank=3, seed=5)


@pytest.fixture(autouse=True)
def any_precision():
    """Reset accelerate's state, which allows a single precision per process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def save_rounded_model(kind: str, changes: dict, folder) -> str:
    """Save a model in fp32 with matrices that are exact in bf16, and return its folder."""
    model = build(kind, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(str(folder))
    return str(folder)


def learner_of(
    base: str,
    held_in: str,
    *,
    dtype: str = "bf16",
    lora: LoraConfig | None = LORA,
    value_head: bool = False,
) -> TrainingWorker:
    AcceleratorState._reset_state()
    worker = TrainingWorker(WorkerSettings(dtype=dtype))
    spec = ModelSpec(base, lora=lora, seed=1, value_head=value_head, base_dtype=held_in)
    worker.create_model(0, spec, None, False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in worker.learners[0].trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return worker


def compute_adapter_gradients(
    worker: TrainingWorker, vocabulary: int = VOCAB
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and all gradients of the adapters for the sum of some logprobs."""
    datums = random_datums(4, vocabulary=vocabulary)
    outputs, _ = call(worker, "forward_backward", 0, datums, "importance_sampling", {}, 1.0, True)
    logprobs = torch.cat([torch.from_numpy(result["logprobs"]) for result in outputs])
    return logprobs, torch.cat([p.grad.reshape(-1) for p in worker.learners[0].trainable.values()])


def reference(worker: TrainingWorker, vocabulary: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in float64, in plain torch, from the numbers that the learner holds."""
    learner = worker.learners[0]
    with learner.full_model(adapter_only=False) as result:
        model = copy.deepcopy(result).double()
    for module in model.modules():
        vars(module).pop("forward", None)  # embeddings that return float32
    model.config._attn_implementation = "eager"
    # The other implementations have no products in float64.
    unwrap_model(model).set_experts_implementation("eager")
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in random_datums(4, vocabulary=vocabulary):
        fields = {name: data.to_torch().double() for name, data in datum.loss_fn_inputs.items()}
        ids = torch.tensor([datum.model_input.to_ints()])
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
        logp = gather_targets(logits.log_softmax(-1), datum)
        logprobs.append(logp.detach())
        ratio = (logp - fields["logprobs"]).exp()
        total = total - (ratio * fields["advantages"] * fields["mask"]).sum()
    names = dict(model.named_parameters())
    grads = torch.autograd.grad(total, [names[name] for name in learner.trainable])
    return torch.cat(logprobs), torch.cat([grad.reshape(-1) for grad in grads])


@pytest.mark.parametrize(
    ("kind", "changes"),
    KINDS,
    ids=[f"{kind} {'tied' if c is TIED else 'untied'}" for kind, c in KINDS],
)
def test_a_base_in_bf16_is_one_in_fp32_of_its_numbers(kind, changes, tmp_path):
    base = save_rounded_model(kind, changes, tmp_path / "base")
    low, high = learner_of(base, "bf16"), learner_of(base, "fp32")
    assert list(low.learners[0].trainable) == list(high.learners[0].trainable)
    model = low.learners[0].model
    matrices, kept = [], []
    for parameter in model.parameters():
        is_matrix = not parameter.requires_grad and parameter.dim() >= 2
        (matrices if is_matrix else kept).append(parameter)
    assert matrices and {p.dtype for p in matrices} <= {torch.bfloat16, torch.float32}
    share = sum(p.numel() for p in matrices if p.dtype == torch.bfloat16)
    assert share > 0.95 * sum(p.numel() for p in matrices)
    assert {p.dtype for p in kept} == {torch.float32}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} <= {torch.float32}
    logp, grad = compute_adapter_gradients(low)
    expected_logp, expected_grad = compute_adapter_gradients(high)
    if kind not in EXPERTS:
        assert torch.equal(logp, expected_logp) and torch.equal(grad, expected_grad)
    true_logp, true_grad = reference(low)
    assert float((logp - true_logp).abs().median()) < 0.05
    assert float((grad.double() - true_grad).norm() / true_grad.norm()) < 0.1


def test_merged_weights_need_the_disk_space_of_fp32(tmp_path, monkeypatch):
    base = save_rounded_model("llama", UNTIED, tmp_path / "base")
    worker = learner_of(base, "bf16")
    needed = sum(file.stat().st_size for file in (tmp_path / "base").glob("*.safetensors"))
    usage = SimpleNamespace(free=2**20 + 0.9 * needed)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DiskFull, match="the disk has"):
        worker.save_for_sampler(0, str(tmp_path / "merged"), True, None)


def test_a_second_service_needs_the_precision_of_the_first():
    TrainingWorker(WorkerSettings(dtype="bf16"))
    with pytest.raises(UserError, match="an earlier service of this script computes in bf16"):
        TrainingWorker(WorkerSettings(dtype="fp32"))


def test_what_auto_is():
    def choose(request, lora=True, bf16=True, sharding=Sharding()):  # noqa: B008
        return choose_base_dtype(request, lora=lora, bf16=bf16, sharding=sharding)

    assert choose("auto") == "bf16"
    assert choose("auto", bf16=False) == choose("auto", lora=False) == "fp32"
    for request, where, words in [
        ("bf16", {"bf16": False}, "set precision to bf16"),
        ("bf16", {"lora": False}, "trains all weights"),
        ("fp32", {"sharding": ZeroSharding(stage=2)}, "DeepSpeed in bf16"),
        ("4bit", {"sharding": ZeroSharding(stage=2)}, "cannot be sharded"),
        ("int8", {}, "auto, fp32, bf16 or 4bit"),
    ]:
        with pytest.raises(UserError, match=words):
            choose(request, **where)
