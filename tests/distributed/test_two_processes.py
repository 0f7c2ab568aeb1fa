"""Test that a plain script computes the same losses, norms, samples and weights on a single
process, on two under DDP, and on two under ZeRO-3 (gloo).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import two_processes
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]
LAUNCHES = {
    "ddp": ["MULTI_CPU", "Qwen3ForCausalLM", 2],
    "zero3": ["DEEPSPEED", "DeepSpeedEngine", 2],
}


def run(out: Path, config: str) -> dict:
    script = [str(REPO / "tests" / "two_processes.py"), str(out)]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    launch += ["--config_file", str(REPO / f"accelerate_configs/{config}.yaml")]
    command = [*launch, "--main_process_port", "0", *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=out.parent, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_result(out)


def read_result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """This covers full fine-tuning. test_distributed.py covers the updates, samples and saved
    weights of an adapter.
    """
    two_processes.main(tmp_path / "alone")
    single = read_result(tmp_path / "alone")
    assert single["launch"][2] == 1
    weights = load_file(
        str(tmp_path / "alone" / "checkpoints" / "end" / "model" / "model.safetensors")
    )
    for config, launch in LAUNCHES.items():
        got = run(tmp_path / config, config)
        assert got["launch"] == launch  # rules out that it silently ran as a single process
        for ours, theirs in zip(got["steps"], single["steps"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert got["tokens"] == single["tokens"]
        for ours, theirs in zip(got["logprobs"], single["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        saved = load_file(
            str(tmp_path / config / "checkpoints" / "end" / "model" / "model.safetensors")
        )
        assert saved.keys() == weights.keys()
        for key, value in weights.items():
            assert (saved[key] - value).abs().max() < 1e-5, key
