"""Fuzz run folders: a reader of a damaged folder returns the undamaged result, or reports an error
that the user can fix and that names the file.

Two kinds of damage are not detected, and are allowed: another number in a row of metrics (a curve
shows it), and another valid setting in config.json (a resumed run compares it with the requested
settings; sample.py takes it as the run's). All other damage gives an equal result or an error.
"""

import atexit
import contextlib
import functools
import io
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from fuzzing import ACCEPTED, REFUSED
from test_run_folder import (
    RecordingConsole,
    list_valid_checkpoints,
    load_run_config,
    renew_manifest,
    write_recipe,
)
from whole_runs import train

from rl.errors import UserError
from rl.learner import read_learner_state
from rl.learner.learner_checkpoint import read_spec
from rl.models import check_model_folder
from rl.reporting import check_claim_folder, read_curve
from rl.trainer import open_weights
from rl.trainer.resume import find_resume_point, remove_damaged_checkpoints

ODD = [
    None, True, False, -1, 0, 10**400, 1e300, float("inf"), float("nan"), "", "x", "../../outside",
    "/etc/passwd", "\ud800", [], {}, [[]], {"a": {}}, "grpo-final", "nan", "a" * 5000,
]  # fmt: skip


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def list_places(value, path=()):
    """Yield every path in a JSON value, as keys and indices."""
    yield path
    items = dict(enumerate(value)) if isinstance(value, list) else value
    for key, item in items.items() if isinstance(items, dict) else ():
        yield from list_places(item, (*path, key))


def change_field(value, rng: random.Random):
    """Return a copy with a field removed, doubled, renamed, or of another value or type."""
    value = json.loads(json.dumps(value))
    path = rng.choice([path for path in list_places(value) if path])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    kind = rng.randrange(4)
    if kind == 0:
        del holder[path[-1]]
    elif kind == 1 and isinstance(holder, dict):
        holder[f"{path[-1]}x"] = holder.pop(path[-1])
    else:
        holder[path[-1]] = rng.choice(ODD)
    return value


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a copy with bytes flipped, cut off, inserted or removed."""
    kind = rng.randrange(8)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 4, 64))):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        at, more = rng.randrange(len(data)), rng.randbytes(rng.choice((1, 3, 50)))
        return data[:at] + more + data[at + rng.choice((0, 1, 40)) :]
    if kind == 3:
        short = [b"", b"\n", b"null", b"[]", b"{}", b"3", b'"x"', b"\x00" * 64]
        return rng.choice([*short, nested(100_000).encode(), b"9" * 5000, b"\xef\xbb\xbf" + data])
    text = data.decode()
    if text.count("\n{") and kind < 7:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(change_field(json.loads(lines[at]), rng))
        return ("\n".join(lines) + "\n").encode()
    try:
        return json.dumps(change_field(json.loads(text), rng)).encode()
    except ValueError:
        return data[1:]


def stopped_run(folder: Path) -> Path:
    """Return a folder with a run stopped in its second stage, so that it can be resumed."""
    train(str(write_recipe(folder)), folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "grpo-final")
    return folder


def find_valid_resume_point(folder: Path, plan):
    position = find_resume_point(plan, folder, RecordingConsole())
    remove_damaged_checkpoints(folder, position)
    return position


def check_open_weights(folder: Path):
    result = open_weights(str(folder))
    assert result.path is not None and result.path.resolve().is_relative_to(folder.resolve())
    # config.json no longer describes a run: the folder is read as model weights, which it lacks
    if result.stage is None:
        check_model_folder(result.path)
        raise AssertionError("a run's folder holds no weights itself")
    return result.path, result.stage.name, read_spec(result.path)


def check_claim(folder: Path):
    check_claim_folder(folder, resume=True)
    try:
        check_claim_folder(folder)
    except UserError as error:
        assert str(folder) in str(error)


def read_curve_steps(folder: Path):
    return [row["step"] for row in read_curve(folder).rows]


def outcome(read, *args):
    """Return (result, None), or (None, text of the UserError)."""
    try:
        return read(*args), None
    except UserError as error:
        return None, str(error)


class DamagedRun:
    """A copy of a run's folder, damaged in one file at a time."""

    def __init__(self, done: Path, to: Path):
        self.source, self.to, self.folder = done / "run", to, to / "run"
        shutil.copytree(self.source, self.folder)
        (to / "outside").write_text("not ours")
        self.plan = load_run_config(self.folder)
        self.newest = self.folder / "checkpoints" / "grpo-000006"
        self.right = {name: read(*args) for name, read, args in self.readers() if name != "claimed"}
        self.before, self.whole = self.listing(), list_valid_checkpoints(self.folder)
        best = next((self.folder / "sampler_weights").iterdir()).name
        self.files = ["config.json", "metrics.jsonl", "checkpoints.jsonl"]
        names = ("state.json", "manifest.json", "model/config.json")
        self.files += [f"checkpoints/grpo-000006/{name}" for name in names]
        self.files += ["checkpoints/sft-final/state.json", f"sampler_weights/{best}/manifest.json"]

    def readers(self):
        folder = self.folder
        return (
            ("drawn", read_curve_steps, (folder,)),
            ("opened", check_open_weights, (folder,)),
            ("claimed", check_claim, (folder,)),
            ("state", read_learner_state, (self.newest,)),
            ("resumed", find_valid_resume_point, (folder, self.plan)),
        )

    def listing(self) -> dict[str, tuple[int, int]]:
        """Return the size and modification time of every file."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        stats = {str(path.relative_to(self.folder)): path.stat() for path in files}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}

    def restore(self, name: str, data: bytes, manifest: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(data)
        if manifest:
            (self.folder / name).with_name("manifest.json").write_bytes(manifest)
        touched = {name, str(Path(name).parent / "manifest.json")}
        now, before = self.listing(), self.before
        changed = {file for file in now if now[file] != before.get(file)}
        if now.keys() != before.keys() or changed - touched:
            shutil.rmtree(self.folder)
            shutil.copytree(self.source, self.folder)
            self.before = self.listing()

    def check(self, name: str, rng: random.Random) -> list[str]:
        """Damage a file, read the folder in every way, restore the file; return the outcomes."""
        path, data = self.folder / name, (self.folder / name).read_bytes()
        path.write_bytes(damage_bytes(data, rng))
        forged = rng.random() < 0.3 and name.endswith("state.json")
        manifest = path.parent / "manifest.json"
        kept = manifest.read_bytes() if forged else b""
        if forged:  # the checksums match: only the content shows the damage
            renew_manifest(path.parent)
        reference = path.parent.relative_to(self.folder)
        still = [item for item in self.whole if not reference.is_relative_to(item)]
        # A forged state must remain only if a run could resume from it.
        if forged and outcome(read_learner_state, path.parent)[1] is None:
            still.append(str(reference))
        try:
            seen = [self._read(name, forged, *reader) for reader in self.readers()]
            left = list_valid_checkpoints(self.folder)
            assert {*still} <= {*left}, f"{name}: something whole was removed"
            assert (self.to / "outside").read_text() == "not ours"
        finally:
            self.restore(name, data, kept)
        return [item for item in seen if item]

    def _read(self, name: str, forged: bool, label: str, read, args) -> str | None:
        results, error = outcome(read, *args)
        right = self.right.get(label)
        if error is not None:
            assert len(error) < 8000 and "run" in error, (name, error)
            return "refused"
        if label == "resumed":
            assert results.step in (6, 3, 2, -1), (name, results)
            assert results.step == 6 or "checkpoints/" in name, (name, results)
            return "equal" if results.step == right.step else "older"
        if label == "drawn":
            assert results == right or name == "metrics.jsonl", name
        elif label == "opened":  # the newest checkpoint, or the run's stages, may have changed
            may_differ = name.startswith("checkpoints/") or name == "config.json"
            assert results == right or may_differ, (name, results)
        elif label == "state":
            assert results == right or forged, name
        return None


def test_damaged_folders_are_refused_by_name_or_read_as_they_were(tmp_path):
    """Damage a file at a time."""
    (tmp_path / "copy").mkdir()
    run, rng = DamagedRun(stopped_run(tmp_path / "made"), tmp_path / "copy"), random.Random(0)
    seen = Counter(
        outcome for i in range(64) for outcome in run.check(run.files[i % len(run.files)], rng)
    )
    assert seen["refused"] > 50 and seen["equal"] > 10 and seen["older"] > 2, seen


# ------------------------------------------------------------------- as a family (test_fuzzing.py)


def inputs(seed: int, count: int):
    """Yield (number of the file, seed of the damage)."""
    rng = random.Random(f"runs {seed}")
    for number in range(count):
        yield number, rng.randrange(2**32)


def check(item) -> str:
    """Apply a damage to a run that this process trained once; return the outcome."""
    number, seed = item
    run = own_run()
    seen = run.check(run.files[number % len(run.files)], random.Random(seed))
    return REFUSED if "refused" in seen else "an older checkpoint" if "older" in seen else ACCEPTED


# Share of the inputs of other families: an input reads a folder of checkpoints in five ways, which
# takes tenths of a second.
SHARE = 0.1


@functools.cache
def own_run() -> DamagedRun:
    folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "copy").mkdir()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return DamagedRun(stopped_run(Path(folder.name) / "made"), Path(folder.name) / "copy")
