"""Test that a whole optimizer step on fake CUDA tensors contains no wait of the host between its
first and its last launch. A fake tensor has no values, so a read of a number is an error.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "fake_cuda_step.py"
TESTED = "2.13"  # the headers that DEVICE includes are internal to torch
# A CUDA device for torch that is built without CUDA. Fake tensors run nothing on a device, but
# autograd asks for its streams.
DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct FakeGuard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
"""


def build_device(folder):
    """Return the path of the library with the fake device."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a fake CUDA device needs Linux and a C++ compiler")
    source, library, root = folder / "device.cpp", folder / "device.so", Path(torch.__file__).parent
    source.write_text(DEVICE)
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}"]
    command = [compiler, *options, str(source), "-o", str(library), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not torch.__version__.startswith(TESTED):
        pytest.skip(f"the fake CUDA device is written for the headers of torch {TESTED}")
    assert done.returncode == 0, done.stderr
    return str(library)


def run_steps(cases, folder):
    """Run the script, and return its results by name."""
    words = [sys.executable, str(SCRIPT), cases]
    if not torch.backends.cuda.is_built():
        words.append(build_device(folder))
    elif not torch.cuda.is_available():
        pytest.skip("torch for CUDA has no backward of fake tensors without a GPU")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("cases", "count"), [("quick", 8), pytest.param("slow", 40, marks=pytest.mark.slow)]
)
def test_no_step_waits_between_its_first_and_its_last_launch(cases, count, tmp_path):
    """Every layout, LoRA, autocast, checkpointing, and in the slow case every loss: steps of one and
    of two calls. The first read of a number, which ends a step on fake tensors, follows the launch
    of the update.
    """
    steps = run_steps(cases, tmp_path)
    assert len(steps) >= count
    for name, step in steps.items():
        passes = ["collate", "forward", "backward"] * (step["calls"] * step["count"])
        read = "read: aten._local_scalar_dense.default"
        assert step["count"] > 2 and step["events"] == [*passes, "update", read], (name, step)
        assert "DataDependentOutputException" in step["error"], (name, step["error"])
        assert ("torch.bfloat16" in step["dtypes"]) == ("bf16" in name), (name, step["dtypes"])
        assert "During handling" not in step["error"], (name, step["error"])
        assert "in step_if_finite" in step["error"], (name, step["error"])
