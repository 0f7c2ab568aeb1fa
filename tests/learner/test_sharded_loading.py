"""Test that each rank of a sharded launch reads its part of the weights: the names in files against
transformers' loading, memory, results.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_worker
from rank_server import make_launch_command
from sampler_population import build
from test_distributed import run_launch
from transformers import AutoModelForCausalLM, Qwen3Config

from rl.distributed import FSDPSharding
from rl.errors import UserError
from rl.learner import LogprobHead, ModelSpec, learner_checkpoint
from rl.learner.backend import load_first_layers
from rl.learner.layout_probe import find_layout_faults
from rl.learner.learner_checkpoint import SaveMetadata
from rl.models import (
    LazyTensors,
    add_lora,
    get_tensor_shape,
    load_model,
    load_model_lazily,
    open_lazy_tensors,
)
from rl.types import LoraConfig

REPO = Path(__file__).resolve().parents[2]
LAYOUTS = ["padded", "packed", "shared"]
KINDS = (
    "gpt2 llama gemma3_text qwen3_moe mixtral deepseek_v3 falcon_h1 opt bloom gpt_oss lfm2 mamba"
).split()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_read_one_by_one_are_those_of_a_whole_load(kind, tmp_path):
    build(kind).save_pretrained(str(tmp_path), max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    loaded = load_model_lazily(str(tmp_path))
    assert loaded is not None and loaded.lazy_weights is not None
    unread = loaded.lazy_weights.for_wrapped_model(loaded.model)
    expected, reference = dict(whole.named_parameters()), dict(loaded.model.named_parameters())
    assert expected.keys() == reference.keys()
    for name, parameter in expected.items():
        assert torch.equal(unread.read(name).float(), parameter), name
        assert torch.equal(unread.read_rows(name, 1, 3).float(), parameter[1:3]), name
        assert reference[name].shape == parameter.shape
    theirs, ours = dict(whole.named_buffers()), dict(loaded.model.named_buffers())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_that_sees_stays_in_its_files_too(tmp_path):
    load_model("tiny:vision", seed=3).model.save_pretrained(str(tmp_path))
    whole, loaded = load_model(str(tmp_path)), load_model_lazily(str(tmp_path))
    assert loaded is not None
    assert loaded.lazy_weights is not None
    assert type(loaded.model) is type(whole.model)
    unread = loaded.lazy_weights.for_wrapped_model(loaded.model)
    assert all(torch.equal(unread.read(name), p) for name, p in whole.model.named_parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe", "mamba", "gpt_neo"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_first_layers_tell_what_the_whole_model_does(kind, lora, tmp_path):
    """The trial of a sharded model selects the same layouts and the same output head as when all
    weights are read.
    """
    build(kind).save_pretrained(str(tmp_path))
    whole, loaded = load_model(str(tmp_path)), load_model_lazily(str(tmp_path))
    if lora and kind != "mamba":
        whole, loaded = (add_lora(item, LoraConfig(rank=2, seed=1)) for item in (whole, loaded))
    trial = load_first_layers(loaded.model, loaded.lazy_weights.for_wrapped_model(loaded.model))
    assert find_layout_faults(trial, LAYOUTS) == find_layout_faults(whole.model, LAYOUTS)
    assert LogprobHead(trial).fused == LogprobHead(whole.model).fused
    assert all(p.dtype == torch.float32 for p in loaded.model.parameters())


def test_a_hub_name_is_brought_to_the_cache_and_read_from_there(tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit, at = "0" * 40, tmp_path / "models--owner--small"
    model = build("llama")
    model.save_pretrained(str(at / "snapshots" / commit), max_shard_size="20KB")
    (at / "refs").mkdir()
    (at / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = load_model_lazily("owner/small")
    assert loaded is not None and loaded.lazy_weights is not None
    unread = loaded.lazy_weights.for_wrapped_model(loaded.model)
    assert all(torch.equal(unread.read(name), p) for name, p in model.named_parameters())
    (at / "snapshots" / commit / "model.safetensors.index.json").unlink()
    assert load_model_lazily("owner/small") is None  # load_model reports what is missing


def test_what_cannot_be_read_so_is_read_whole_or_refused(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_model_lazily("tiny:addition") is None and load_model_lazily("owner/model") is None
    model = build("llama", tie_word_embeddings=False)
    model.save_pretrained(str(tmp_path / "bare"))
    weights = {name: p for name, p in model.state_dict().items() if "lm_head" not in name}
    model.save_pretrained(str(tmp_path / "lacks"), state_dict=weights)
    assert load_model_lazily(str(tmp_path / "lacks")) is None  # load_model reports what is missing
    (file,) = (tmp_path / "bare").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="damaged or truncated"):
        load_model_lazily(str(tmp_path / "bare"))


def test_lazy_tensors(tmp_path):
    model = build("llama")
    model.save_pretrained(str(tmp_path))
    names = [name for name, _ in model.named_parameters()]
    find_results = open_lazy_tensors(tmp_path, names)
    assert find_results is not None and open_lazy_tensors(tmp_path, [*names, "other"]) is None
    together = find_results.with_tensors({"head": torch.ones(2)})
    assert set(together) == {*names, "head"} and len(together) == len(names) + 1
    assert get_tensor_shape(together, "head") == (2,)
    assert get_tensor_shape(together, names[0]) == tuple(model.get_parameter(names[0]).shape)
    assert all(torch.equal(find_results[name], p) for name, p in model.named_parameters())
    assert isinstance(find_results, LazyTensors)


def test_a_saved_mixture_of_experts_is_read_tensor_by_tensor(tmp_path, monkeypatch):
    build("qwen3_moe").save_pretrained(str(tmp_path / "base"))
    worker = make_worker(str(tmp_path / "base"))
    learner, spec = worker.learners[0], ModelSpec(str(tmp_path / "base"))
    before = {name: p.detach().clone() for name, p in learner.trainable.items()}
    learner_checkpoint.save_learner_state(
        learner, spec, tmp_path / "saved", [torch.get_rng_state()], SaveMetadata({}), None
    )
    with torch.no_grad():
        for parameter in learner.trainable.values():
            parameter.zero_()
    # as under FSDP2, where no rank may hold the whole model
    monkeypatch.setattr(learner_checkpoint, "get_launch_sharding", FSDPSharding)
    monkeypatch.delattr(learner_checkpoint, "load_model")
    learner_checkpoint.load_learner_state(learner, tmp_path / "saved", True, 0)
    assert all(torch.equal(p, before[name]) for name, p in learner.trainable.items())


# ---------------------------------------------------------------------------------------- two ranks


def save_model(folder: Path, **sizes: int) -> tuple[str, int, int]:
    """Save a model. Return its folder, its bytes in fp32, and the bytes of its largest tensor."""
    config = Qwen3Config(
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(str(folder))
    sizes_of = [4 * p.numel() for p in made.parameters()]
    return str(folder), sum(sizes_of), max(sizes_of)


def find_results(config: str | None, model: str, kind: str, out: Path) -> dict:
    """Return the results of rank 0."""
    out.mkdir()
    run_launch(config, out, model, out, kind, script="tests/sharded_loading_case.py")
    return json.loads((out / "found.json").read_text())


def peaks_of(config: str, model: str, out: Path) -> list[int]:
    """Return each rank's peak, measured in new processes: malloc reads its settings at process
    start.
    """
    out.mkdir()
    script = REPO / "tests" / "sharded_loading_case.py"
    command = make_launch_command(config, script, model, out, "made")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(f.read_text())["peak"] for f in sorted(out.glob("rank-*.json"))]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[str, dict[str, dict]]:
    """Return a model folder, and the results of a single process for each kind."""
    home = tmp_path_factory.mktemp("small")
    folder, _, _ = save_model(
        home / "model",
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        head_dim=8,
        intermediate_size=96,
    )
    return folder, {
        kind: find_results(None, folder, kind, home / kind) for kind in ("lora", "full")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("config", ["zero3", "fsdp2"])
def test_two_ranks_that_read_their_parts_find_what_one_process_does(small, config, kind, tmp_path):
    folder, single = small
    together = find_results(config, folder, kind, tmp_path / "two")
    assert together["norm"] == pytest.approx(single[kind]["norm"], rel=2e-6)
    for key in ("first", "then", "resumed"):
        for a, b in zip(together[key], single[kind][key], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "neighbor"), [("zero3", 0.15), ("fsdp2", 0.0)])
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the peak of a process from /proc"
)
def test_no_rank_holds_more_than_its_share(config, neighbor, tmp_path):
    """Of 590 MB a rank holds half, two copies of the largest tensor, and what a process takes in
    addition.

    DeepSpeed keeps some 0.14 of the model and 50 MB in addition to its part: 183 MB for a model of
    207 MB, 431 MB for 590 MB.
    """
    folder, size, largest = save_model(
        tmp_path / "model",
        vocab_size=6000,
        hidden_size=640,
        num_hidden_layers=27,
        head_dim=80,
        intermediate_size=1920,
    )
    peaks = peaks_of(config, folder, tmp_path / config)
    shutil.rmtree(folder)
    bound = (0.5 + neighbor) * size + 2 * largest + 50e6
    assert len(peaks) == 2 and max(peaks) < bound < 0.9 * size, (size, largest, peaks)
