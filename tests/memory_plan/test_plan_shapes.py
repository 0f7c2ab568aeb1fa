"""The plan's numbers for every architecture: of a model that is cut those of the whole, of mixtures
of experts in every precision.
"""

import contextlib
import csv
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config

from rl.errors import UserError
from rl.memory_plan import ComputeConfig, MicroBatch, ModelSkeleton, activations, tracing
from rl.types import LoraConfig

REPO = Path(__file__).resolve().parents[2]
with (REPO / "bench" / "results" / "architectures.csv").open() as file:
    TABLE = [row for row in csv.DictReader(file) if not row["class"].startswith("not ")]
NAMES = [row["architecture"] for row in TABLE]
MIXTURES = [row["architecture"] for row in TABLE if " experts" in row["layers"]]
BATCH = MicroBatch(2, 16, 32)


def some(names, quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def deep_config(name):
    """With a dozen layers where the config gives each no kind of its own."""
    config = tiny_config(name)
    if name == "reformer":  # a kind for each of its layers, and an index into them
        return config
    changes = {
        key: 12
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if config.to_dict().get(key) == 4
    }
    try:
        return tiny_config(name, **changes)
    except Exception:  # noqa: BLE001  (a config of another length than its lists)
        return config


def skeletons(folder, lora=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ModelSkeleton(str(folder), None, lora), ModelSkeleton(
            str(folder), None, lora, all_layers=True
        )


@pytest.mark.parametrize(
    "name", some(NAMES, ("qwen3", "gpt2", "gemma3_text", "gemma4_text", "mixtral", "zamba2"))
)
def test_a_cut_model_has_the_numbers_of_the_whole(name, tmp_path):
    deep_config(name).save_pretrained(tmp_path)
    for lora in (None, LoraConfig(2)):
        try:
            cut, whole = skeletons(tmp_path, lora)
        except UserError as error:
            assert lora is not None and "LoRA" in str(error)
            continue
        assert cut.shape == whole.shape


# Their forward asks which tokens go to an expert, before it goes on; MiniMax's own code mixes
# precisions where all weights are in bfloat16.
REFUSED = {
    "dbrx",
    "jetmoe",
    "longcat_flash",
    "qwen4_exp",
    "qwen4_exp_text",
    ("minimax", torch.bfloat16),
}
HOW = {
    "fp32": ComputeConfig(fused=False),
    "bf16": ComputeConfig(dtype=torch.bfloat16, fused=False),
    "autocast": ComputeConfig(autocast=True, fused=False),
}


def mixtures():
    """A few in every precision; the others in bf16, and in the campaign in every precision."""
    for name in MIXTURES:
        for mode in HOW:
            marks = [pytest.mark.slow, *[pytest.mark.campaign] * (mode != "bf16")]
            quick = name in ("mixtral", "gpt_oss", "jetmoe")
            yield pytest.param(name, mode, marks=[] if quick else marks, id=f"{name}-{mode}")


@pytest.mark.parametrize(("name", "options"), mixtures())
def test_a_mixture_of_experts_is_planned_in_every_precision(name, options, tmp_path, monkeypatch):
    """What tensors without memory say is what real ones hold, the kernels of grouped products among
    them; or it is said why not.
    """
    tiny_config(name).save_pretrained(tmp_path)
    skeleton, way = ModelSkeleton(str(tmp_path), None, None), HOW[options]
    if {name, (name, way.dtype)} & REFUSED:
        with pytest.raises(UserError, match="cannot be computed without weights.*--steps 1"):
            skeleton.measure_micro_batch(BATCH, way)
        return
    planned = skeleton.measure_micro_batch(BATCH, way)
    monkeypatch.setattr(tracing, "FakeTensorMode", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(tracing.torch, "empty", torch.zeros)
    # real tensors do not run: its own code mixes precisions
    if (name, options) == ("inkling2_text", "bf16"):
        with pytest.raises(UserError, match="to have the same dtype"):
            skeleton.measure_micro_batch(BATCH, way)
    else:  # torch cuts some operations up on the one and not on the other
        assert planned.total == pytest.approx(
            skeleton.measure_micro_batch(BATCH, way).total, rel=0.07
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "a,b",
    [
        ((24, 16), (3, 16, 32)),
        ((16, 24), (24, 32)),
        ((3, 8, 16), (16, 24)),
        ((3, 8, 16), (3, 16, 32)),
    ],
)
def test_a_grouped_product_has_the_shape_of_the_real_one(a, b, dtype):
    offs = None if len(a) == len(b) == 3 else torch.tensor([8, 16, 24], dtype=torch.int32)
    a_, b_ = (
        torch.zeros(a, dtype=dtype),
        torch.zeros(b, dtype=dtype).transpose(-2, -1).contiguous().transpose(-2, -1),
    )
    real = torch.nn.functional.grouped_mm(a_, b_, offs=offs)
    ours = activations._empty_grouped_mm(a_, b_, offs)
    assert (ours.shape, ours.dtype) == (real.shape, real.dtype)
