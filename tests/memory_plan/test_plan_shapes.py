"""Test the memory plan for every architecture: a truncated model gives the numbers of the full
model, and mixtures of experts can be planned in every precision.
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


def select_marks(name, quick):
    """Return no marks for a few names, `slow` for every fourth, and `campaign` for the others."""
    if name in quick:
        return []
    return [pytest.mark.slow, *[pytest.mark.campaign] * (NAMES.index(name) % 4 != 0)]


def make_params(names, quick):
    return [pytest.param(name, marks=select_marks(name, quick)) for name in names]


def deep_config(name, depth):
    """Return the config with `depth` layers, unless the config describes each layer separately."""
    config = tiny_config(name)
    if name == "reformer":  # a kind per layer, and an index into the list of kinds
        return config
    keys = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    sizes = config.to_dict()
    try:
        return tiny_config(name, **{key: depth for key in keys if sizes.get(key) == 4})
    except Exception:  # noqa: BLE001  (a config of another length than its lists)
        return config


def make_skeletons(name, folder, lora):
    """Return a skeleton of the first layers, of a model with as few layers as a truncation takes,
    and one of all layers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for depth in (6, 12):  # 12: kinds of layers that repeat every three or four
            deep_config(name, depth).save_pretrained(folder)
            cut = ModelSkeleton(str(folder), None, lora)
            if cut._omitted:
                break
        return cut, ModelSkeleton(str(folder), None, lora, all_layers=True)


@pytest.mark.parametrize(
    "name", make_params(NAMES, ("qwen3", "gpt2", "gemma3_text", "gemma4_text", "mixtral", "zamba2"))
)
def test_a_cut_model_has_the_numbers_of_the_whole(name, tmp_path):
    for lora in (None, LoraConfig(2)):
        try:
            cut, whole = make_skeletons(name, tmp_path, lora)
        except UserError as error:
            assert lora is not None and "LoRA" in str(error)
            continue
        assert cut.shape == whole.shape


# The forward of these models reads the number of tokens routed to each expert. MiniMax's code mixes
# precisions if all weights are in bfloat16.
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


def list_mixtures():
    """Yield every precision for a few quick models, bf16 for every fourth of the rest (slow), and
    the others (campaign).
    """
    quick = ("mixtral", "gpt_oss", "jetmoe")
    for name in MIXTURES:
        for mode in HOW:
            marks = select_marks(name, quick)
            marks += [pytest.mark.campaign] * (mode != "bf16" and name not in quick)
            yield pytest.param(name, mode, marks=marks, id=f"{name}-{mode}")


@pytest.mark.parametrize(("name", "options"), list_mixtures())
def test_a_mixture_of_experts_is_planned_in_every_precision(name, options, tmp_path, monkeypatch):
    """The plan from tensors without memory matches real tensors, grouped matmul kernels included,
    or the error gives the reason.
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
    # inkling2_text's code mixes precisions, so real tensors fail
    if (name, options) == ("inkling2_text", "bf16"):
        with pytest.raises(UserError, match="to have the same dtype"):
            skeleton.measure_micro_batch(BATCH, way)
    else:  # torch splits some operations differently for real and for fake tensors
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
    a_ = torch.zeros(a, dtype=dtype)
    b_ = torch.zeros(b, dtype=dtype).transpose(-2, -1).contiguous().transpose(-2, -1)
    real = torch.nn.functional.grouped_mm(a_, b_, offs=offs)
    ours = activations._empty_grouped_mm(a_, b_, offs)
    assert (ours.shape, ours.dtype) == (real.shape, real.dtype)
