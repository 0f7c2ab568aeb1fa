"""Test where the weights for vLLM servers are written, and what remains of killed runs."""

import os
import subprocess
import sys
import tempfile

import pytest

from rl.errors import UserError
from rl.vllm import weight_folder
from rl.vllm.weight_folder import WeightFolder


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return the shared memory and the temporary folder that the package sees."""
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir(), temporary.mkdir()
    monkeypatch.setattr(weight_folder, "SHARED_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return memory, temporary


def test_weights_are_in_shared_memory_if_they_fit(places, tmp_path):
    memory, temporary = places
    small, large = WeightFolder(None, 1e3), WeightFolder(None, 1e18)
    assert small.path.parent == memory and large.path.parent == temporary
    chosen = WeightFolder(tmp_path / "new" / "place", 1e3)
    assert chosen.path.parent == tmp_path / "new" / "place"
    paths = [small.path, large.path, chosen.path]
    assert all(path.is_dir() for path in paths)
    del small, large, chosen
    assert not any(path.exists() for path in paths)


def test_other_users_may_read_a_folder_that_the_user_named(places, tmp_path):
    before = os.umask(0o022)
    try:
        folders = WeightFolder(tmp_path / "named", 1.0), WeightFolder(None, 1.0)
    finally:
        os.umask(before)
    assert [folder.path.stat().st_mode & 0o777 for folder in folders] == [0o755, 0o700]


def test_a_place_that_cannot_be_written_names_the_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to .*file/inner.* set sampler_folder"):
        WeightFolder(tmp_path / "file" / "inner", 1.0)


@pytest.mark.parametrize(("limit", "fits"), [("max", True), ("6000", True), ("2900", False)])
def test_the_memory_of_a_job_limits_what_is_written_to_shared_memory(
    limit, fits, places, tmp_path, monkeypatch
):
    """1,000 bytes are at most half of what the limit leaves above the 1,000 that are in use."""
    if not any(line.startswith("0::") for line in open("/proc/self/cgroup")):
        pytest.skip("no control groups of version 2 on this machine")
    monkeypatch.setattr(weight_folder, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")
    memory, temporary = places
    assert WeightFolder(None, 1e3).path.parent == (memory if fits else temporary)


def test_a_machine_without_shared_memory_uses_the_temporary_folder(places):
    memory, temporary = places
    memory.rmdir()
    assert WeightFolder(None, 1.0).path.parent == temporary


def test_folders_of_killed_runs_are_removed_and_others_kept(places):
    memory, _ = places
    code = (
        "import os, pathlib, signal\nfrom rl.vllm import weight_folder\n"
        f"weight_folder.SHARED_MEMORY = pathlib.Path({str(memory)!r})\n"
        "folder = weight_folder.WeightFolder(None, 1.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120)
    (killed,) = memory.iterdir()
    running = WeightFolder(None, 1.0)
    assert killed.is_dir()  # its owner may not have taken the lock yet
    for folder in (killed, running.path):
        os.utime(folder / "owner.lock", (0, 0))
    WeightFolder(None, 1.0)
    assert not killed.exists() and running.path.is_dir()
