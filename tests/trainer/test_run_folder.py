"""Test a run's folder: it loses nothing, belongs to this run, and has one process at a time."""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from rank_server import run_script
from safetensors.torch import load_file, save_file
from whole_runs import train

from rl.algorithms import METHODS
from rl.config import RunSettings, load_resolved_config
from rl.distributed import checkpoint_folder
from rl.errors import RunFolderError, UserError
from rl.reporting import CHECKPOINTS, Console
from rl.trainer import execute as run
from rl.trainer import preflight, stage_data
from rl.trainer.batch_log import BatchLog
from rl.trainer.checkpoint_manager import complete_checkpoint_list, read_stage_steps
from rl.trainer.resume import find_resume_point, remove_damaged_checkpoints

REPO = Path(__file__).resolve().parents[2]
RECIPE = """
stages:
  - method: sft
    base_model: tiny:addition-small
    dataset: addition:noise=0.5
    steps: 3
    batch_size: 4
    save_every: 2
    eval_every: 0
  - method: grpo
    steps: 4
    batch_size: 2
    group_size: 2
    save_every: 2
    eval_every: 2
    {extra}
dataset: addition
max_tokens: 3
eval_limit: 4
"""


SMALL = (
    "sft --base-model tiny:addition-small --dataset addition:noise=0.5 --steps 2 --batch-size 2 "
    "--eval-every 0"
)


def write_recipe(folder: Path, extra: str = "keep_last: 2", text: str = RECIPE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(text.format(extra=extra))
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """Return a finished run of two stages, to be copied."""
    folder = tmp_path_factory.mktemp("done")
    train(str(write_recipe(folder)), folder / "run")
    return folder


def copy_run(done: Path, to: Path) -> Path:
    shutil.copytree(done, to / "copy", symlinks=True)
    return to / "copy" / "run"


def resume_run(folder: Path, *words: str) -> list[dict]:
    return train(" ".join([str(folder.parent / "recipe.yaml"), "--resume", *words]), folder)


def list_valid_checkpoints(folder: Path) -> list[str]:
    results = []
    for manifest in sorted(folder.rglob("manifest.json")):
        with contextlib.suppress(UserError):
            checkpoint_folder.verify_checkpoint(manifest.parent)
            results.append(str(manifest.parent.relative_to(folder)))
    return results


class RecordingConsole(Console):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.texts: list[str] = []

    def _print_message(self, kind: str, text: str, colour: str) -> None:
        self.texts.append(text)


def load_run_config(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    return load_resolved_config(config, METHODS, options=RunSettings)


@pytest.mark.parametrize("change", ["", "another context"])
def test_rows_are_looked_through_once_for_each_model(tmp_path, monkeypatch, change):
    seen, good_rows, outline = [], stage_data.select_good_rows, preflight._load_outline

    def select(rows, *options):
        seen.append(rows.name)
        return good_rows(rows, *options)

    monkeypatch.setattr(stage_data, "select_good_rows", select)
    if change:
        other = lambda *model: (outline(*model)[0], 99, outline(*model)[2])  # noqa: E731
        monkeypatch.setattr(preflight, "_load_outline", other)
    text = RECIPE.replace("steps: 3", "steps: 1").replace("steps: 4", "steps: 1")
    train(str(write_recipe(tmp_path, text=text)), tmp_path / "run")
    # the rows of the first stage; the rows of the later stage, and those held out for it
    assert len(seen) == (5 if change else 3), seen


# -------------------------------------------------------------------------- the list of checkpoints


def generate_damages(text: str, count: int, seed: int = 0):
    """Yield damaged lists: missing, cut off, changed in bits, lines and fields, or forged."""
    rng, data, lines = random.Random(seed), text.encode(), text.splitlines(keepends=True)
    values = [
        None, True, -1, 10**30, 0.5, "", "x", "../../outside", "/etc", "sft-final", [], {},
        "grpo-000009", ".",
    ]  # fmt: skip
    yield from (None, b"", b"\n", b"{}\n", b"[]\n", b"\xff\xfe", data[:-1], data * 2)
    for i in range(count):
        kind = i % 5
        if kind == 0:
            yield data[: rng.randrange(len(data))]
        elif kind == 1:
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 3))):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            yield bytes(flipped)
        elif kind == 2:
            yield "".join(rng.choices(lines, k=rng.randrange(1, len(lines) + 2))).encode()
        else:
            rows = [json.loads(line) for line in lines]
            row = rng.choice(rows)
            key = rng.choice(list(row))
            if kind == 3:
                row[key] = rng.choice(values)
            else:
                del row[key]
            rng.shuffle(rows) if rng.random() < 0.3 else None
            yield "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("count", "noticed_at_least"), [(60, 20), pytest.param(300, 110, marks=pytest.mark.slow)]
)
def test_a_damaged_list_of_checkpoints_costs_nothing(done, tmp_path, count, noticed_at_least):
    """Resume from each damaged list, up to training."""
    to, folder = tmp_path, copy_run(done, tmp_path)
    outside = to / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    for name in ("my copy", "sft-final-backup"):  # copies that the user made
        shutil.copytree(folder / "checkpoints" / "sft-final", folder / "checkpoints" / name)
    os.symlink(outside, folder / "checkpoints" / "linked")
    os.symlink(outside, folder / "sampler_weights" / "grpo-best-linked")
    text = (folder / CHECKPOINTS).read_text()
    before, plan = list_valid_checkpoints(to), load_run_config(folder)
    right = find_resume_point(plan, folder, RecordingConsole())
    assert len(before) >= 7 and right.step == 8
    noticed = 0
    for damaged in generate_damages(text, count, seed=count):
        if damaged is None:
            (folder / CHECKPOINTS).unlink()
        else:
            (folder / CHECKPOINTS).write_bytes(damaged)
        console = RecordingConsole()
        position = find_resume_point(plan, folder, console)
        assert position == right, damaged
        remove_damaged_checkpoints(folder, position)
        noticed += len(console.texts) > 0
    assert list_valid_checkpoints(to) == before
    assert (outside / "thesis.txt").read_text() == "years of work"
    assert noticed > noticed_at_least


@pytest.mark.slow
def test_a_lost_list_is_made_again_as_it_was(done, tmp_path):
    folder = copy_run(done, tmp_path)
    text = (folder / CHECKPOINTS).read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    (folder / CHECKPOINTS).unlink()
    assert resume_run(folder)
    made = [json.loads(line) for line in (folder / CHECKPOINTS).read_text().splitlines()]
    for row in rows + made:
        row["state_path"] = bool(row["state_path"])
        row["sampler_path"] = Path(row["sampler_path"]).parts[-2:]
    assert made == rows and {row["kind"] for row in made} == {"last", "final", "best"}
    # The list also holds the best value, which otherwise only the metrics contain.
    steps = read_stage_steps(json.loads((folder / "config.json").read_text())["stages"])
    (folder / "metrics.jsonl").unlink()
    best = next(row for row in complete_checkpoint_list(folder, steps)[0] if row["kind"] == "best")
    # the value in the list
    assert best["value"] == next(row["value"] for row in rows if row["kind"] == "best")


@pytest.mark.slow
def test_a_link_in_the_way_is_left_alone_and_named(done, tmp_path):
    folder = copy_run(done, tmp_path)
    final, elsewhere = folder / "checkpoints" / "grpo-final", tmp_path / "elsewhere"
    shutil.rmtree(final)
    elsewhere.mkdir()
    os.symlink(elsewhere, final)
    with pytest.raises(RunFolderError, match="grpo-final is in the way.*it is a link"):
        resume_run(folder)
    assert final.is_symlink() and elsewhere.is_dir()
    final.unlink()
    shutil.copytree(folder / "checkpoints" / "sft-final", final)  # complete, but not from this run
    with pytest.raises(RunFolderError, match="grpo-final is in the way.*not from this run"):
        resume_run(folder)
    checkpoint_folder.verify_checkpoint(final)


def test_what_lies_at_the_step_gone_on_from_is_in_the_way_where_it_is_none_of_its_own(
    done, tmp_path
):
    """All steps are done, but the stage's final checkpoint is not yet written under its name."""
    folder = copy_run(done, tmp_path)
    final, plan = folder / "checkpoints" / "grpo-final", load_run_config(folder)
    os.rename(final, folder / "checkpoints" / "grpo-000008")
    assert find_resume_point(plan, folder, RecordingConsole()).step == 8
    shutil.copytree(folder / "checkpoints" / "sft-final", final)
    message = "grpo-final is in the way.*its step 8.*not from this run"
    with pytest.raises(RunFolderError, match=message):
        find_resume_point(plan, folder, RecordingConsole())
    checkpoint_folder.verify_checkpoint(final)


def test_a_checkpoint_is_never_looked_for_outside_of_the_folder(tmp_path):
    for name in ("../x", "/etc", "..", ".", "", "a/b", "a" * 300, "x.partial-1", "x y", 3, None):
        with pytest.raises(checkpoint_folder.DamagedCheckpoint):
            checkpoint_folder.checkpoint_path(tmp_path, name)
    (tmp_path / "outside.txt").write_text("x")
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    for name in ("../outside.txt", "/etc/hostname", "a/../../outside.txt", ""):
        checksum = checkpoint_folder._file_checksum(tmp_path / "outside.txt")
        table = {"files": {name: {"bytes": 1, "sha256": checksum}}, "expires_at": None}
        (folder / "manifest.json").write_text(json.dumps(table))
        with pytest.raises(checkpoint_folder.DamagedCheckpoint, match="not a file of this folder"):
            checkpoint_folder.verify_checkpoint(folder)


# ------------------------------------------------------------------------ checkpoints of other runs


def edit_checkpoint_state(folder: Path, name: str, change) -> None:
    """Change a checkpoint's state.json and update its manifest."""
    place = folder / "checkpoints" / name
    state = json.loads((place / "state.json").read_text())
    change(state)
    (place / "state.json").write_text(json.dumps(state))
    renew_manifest(place)
    checkpoint_folder.verify_checkpoint(place)


def renew_manifest(place: Path) -> None:
    """Update the entry of state.json in a checkpoint's manifest."""
    manifest, file = json.loads((place / "manifest.json").read_text()), place / "state.json"
    checksum = checkpoint_folder._file_checksum(file)
    manifest["files"]["state.json"] = {"bytes": file.stat().st_size, "sha256": checksum}
    manifest.pop("sha256", None)
    (place / "manifest.json").write_text(json.dumps(manifest))


def set_field(key: str, value, *path: str):
    def change(state):
        for part in path:
            state = state[part]
        state[key] = value

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("id", "another", "metadata", "run"), "its run is 'another'"),
        (set_field("seed", 7, "metadata", "run"), "its seed is 7, this run's is 0"),
        (set_field("stage", "polish", "metadata", "run"), "its stage is 'polish'"),
        (set_field("seed", 5, "spec"), "seed of its model is 5"),
        (set_field("lora", {"rank": 4}, "spec"), "lora of its model"),
        (set_field("value_head", True, "spec"), "value_head of its model is True"),
        (set_field("base_model", "tiny:chat", "spec"), "it was made from tiny:chat"),
        (set_field("data", "0" * 32, "metadata", "run"), "the data of stage grpo"),
        (set_field("next_batch", 1, "metadata"), "grpo-000006 is in the way"),
        (set_field("stage", 9, "metadata"), "grpo-000006 is in the way"),
        (set_field("stage", 0, "metadata"), "grpo-000006 is in the way"),
        (set_field("stage", "x", "metadata"), "grpo-000006 is in the way"),
        (set_field("next_batch", 2.0, "metadata"), "its next_batch is 2.0"),
        (set_field("first_step", 3, "metadata"), "which is outside of the run's stage"),
        (set_field("metadata", []), "no 'metadata' as save_state writes it"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(done, tmp_path, change, message):
    folder = copy_run(done, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "grpo-final")
    edit_checkpoint_state(folder, "grpo-000006", change)
    if message.startswith("no 'metadata'"):  # no run wrote this: treated as damaged
        assert resume_run(folder)
        return
    with pytest.raises(UserError, match=message) as error:
        resume_run(folder)
    remedies = ("--base-model", "Move it out", "Move it elsewhere")
    assert any(remedy in str(error.value) for remedy in remedies)
    checkpoint_folder.verify_checkpoint(folder / "checkpoints" / "grpo-000006")


@pytest.mark.slow
def test_checkpoints_of_before_runs_had_names_go_on(done, tmp_path):
    whole_rows = (done / "run" / "metrics.jsonl").read_text().count("\n")
    folder = copy_run(done, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "grpo-final")
    for place in (folder / "checkpoints").iterdir():
        edit_checkpoint_state(folder, place.name, lambda state: state["metadata"].pop("run"))
    config = json.loads((folder / "config.json").read_text())
    del config["id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert len(resume_run(folder)) == whole_rows
    assert final_weights_equal(folder, done / "run")
    assert json.loads((folder / "config.json").read_text())["id"]


def final_weights_equal(first: Path, other: Path) -> bool:
    file = Path("checkpoints/grpo-final/model/model.safetensors")
    a, b = (load_file(str(folder / file)) for folder in (first, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_metrics_with_holes_are_refused(done, tmp_path):
    folder = copy_run(done, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "grpo-final")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    for change, message in (
        (lines[:1] + lines[2:], "lacks step 2,"),
        (lines[:2], "lacks steps 3, 5, 6,"),
        (lines[:1] + lines[:1] + lines[1:], "has step 1 more than once"),
        ([], "lacks steps 1, 2, 3, 5, 6"),
        (lines[::-1], "line 2: its step is"),
        ([lines[0].replace('"step": 1', '"step": "1"'), *lines[1:]], "line 1: its step is '1'"),
        (["[1]\n", *lines[1:]], "line 1 is a list, expected a JSON object"),
    ):
        (folder / "metrics.jsonl").write_text("".join(change))
        with pytest.raises(UserError, match=message) as error:
            resume_run(folder)
        assert "metrics.jsonl" in str(error.value)
    # This row is later than the checkpoint, so it is removed anyway.
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    resume_run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [False, True])
def test_data_that_were_changed_are_refused(left_out, tmp_path):
    """`left_out`: a row is too long for the model and is skipped. The data are unchanged when the
    run resumes.
    """
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
    rows += [{"prompt": "1+" * 3000 + "1=", "response": "3001"}] * left_out
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"{SMALL} --dataset {data} --response-column response --steps 3 --save-every 2"
    words += " --on-bad-row skip" * left_out
    train(words, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "sft-final")
    text = data.read_text()
    for changed in (text.replace('"3"', '"4"'), "".join(text.splitlines(keepends=True)[1:])):
        data.write_text(changed)
        with pytest.raises(UserError, match="the data of stage sft.*restore the file"):
            train(f"{words} --resume", tmp_path / "run")
    data.write_text(text)
    train(f"{words} --resume", tmp_path / "run")


# ------------------------------------------------------------------------------------- later stages

LATER = """
stages:
  - method: sft
    base_model: tiny:addition-small
    dataset: addition:noise=0.5
    steps: 2
    batch_size: 4
    eval_every: 0
    {first}
  - method: {method}
    steps: 2
    batch_size: 2
    eval_every: 0
    {second}
dataset: addition
max_tokens: 3
"""


@pytest.mark.parametrize(("method", "second", "first", "message"), [
    ("grpo", "base_model: ./no/such", "", "no model folder"),
    ("grpo", "base_model: owner/unheard-of", "", "owner/unheard-of"),
    ("grpo", "base_model: tiny:adition", "", "tiny:addition"),
    ("grpo", "tokenizer: ./nowhere", "", "tokenizer"),
    ("grpo", "renderer: chatml", "", "chat_template"),
    ("grpo", "renderer: chat_template", "", "chat template|chat_template"),
    ("grpo", "max_tokens: 5000", "", "5000"),
    ("grpo", "{lora_rank: 8, lora_start: continue}", "lora_rank: 4", "rank"),
    ("grpo", "{lora_rank: 4, train_attn: false, train_mlp: false, train_unembed: false}", "",
     "trains nothing"),
    ("ppo", "critic_model: tiny:ascii", "", "vocabulary"),
    ("ppo", "critic_model: ./gone", "", "no model folder"),
    ("grpo", "{kl_coef: 0.1, reference_model: tiny:ascii}", "", "vocabulary"),
    ("distill", "teacher: tiny:ascii", "", "vocabulary"),
    ("rlhf", "reward_model: sft", "", "is no reward model"),
    ("grpo", "base_model: ./EMPTY", "", "contains neither a run nor weights"),
    ("grpo", "{base_model: ./HALF, tokenizer: 'tiny:addition'}", "", "lacks"),
    ("grpo", "reward: exact_matsch", "", "exact_match"),
    ("grpo", "dataset: ./rows.jsonl", "", "rows.jsonl"),
])  # fmt: skip
def test_what_is_wrong_with_a_later_stage_is_known_before_the_first_step(
    method, second, first, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if "EMPTY" in second:
        (tmp_path / "EMPTY").mkdir()
    if "HALF" in second:
        half_a_model(tmp_path / "HALF")
    second = "\n    ".join(second.strip("{}").split(", "))
    (tmp_path / "recipe.yaml").write_text(LATER.format(method=method, second=second, first=first))
    with pytest.raises(UserError, match=message) as error:
        train("recipe.yaml", tmp_path / "run")
    assert not (tmp_path / "run").exists(), error.value


def half_a_model(folder: Path) -> None:
    small = {
        "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32,
    }  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).save_pretrained(folder)
    file = folder / "model.safetensors"
    half = dict(sorted(load_file(str(file)).items())[::2])
    save_file(half, str(file), metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["my stage", "a/b", "../x", "", "x" * 101, "-x", ".x", "a.partial-1", "naïve", "a\tb"]
)
def test_a_stage_has_a_name_that_its_checkpoints_can_have(name, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(
        LATER.format(method="grpo", second=f"name: {json.dumps(name)}", first="")
    )
    with pytest.raises(SystemExit) as end:
        train(str(tmp_path / "recipe.yaml"), tmp_path / "run")
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert end.value.code == 2 and "line 14" in text and not (tmp_path / "run").exists(), text
    assert "letters, digits" in text or "takes one word" in text


@pytest.mark.slow
def test_a_mended_recipe_keeps_the_stages_that_are_done(done, tmp_path):
    folder = copy_run(done, tmp_path)
    for name in ("grpo-final", "grpo-000006"):
        shutil.rmtree(folder / "checkpoints" / name)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    manifest = folder / "checkpoints" / "sft-final" / "manifest.json"
    kept = manifest.stat().st_mtime_ns
    write_recipe(folder.parent, "learning_rate: 1e-5\n    keep_last: 1")
    rows = resume_run(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:3] == lines[:3]
    assert manifest.stat().st_mtime_ns == kept
    stages = json.loads((folder / "config.json").read_text())["stages"]
    assert stages[1]["settings"]["learning_rate"] == 1e-5
    write_recipe(folder.parent, "learning_rate: 1e-4")  # now the stage is done
    with pytest.raises(RunFolderError, match="these differ: stage grpo: learning_rate"):
        resume_run(folder)


@pytest.mark.slow
def test_a_damaged_end_of_a_stage_is_made_again_from_the_checkpoint_before(done, tmp_path):
    folder = copy_run(done, tmp_path)
    for name in ("grpo-final", "grpo-000006"):
        shutil.rmtree(folder / "checkpoints" / name)
    file = folder / "checkpoints" / "sft-final" / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    resume_run(folder)
    checkpoint_folder.verify_checkpoint(folder / "checkpoints" / "sft-final")
    assert final_weights_equal(folder, done / "run")


@pytest.mark.slow
def test_the_lost_end_of_a_stage_that_a_later_one_begins_from_is_known_at_the_start(tmp_path):
    """The last of three stages starts from the first. The run is resumed in the second."""
    text = RECIPE.replace(
        "dataset: addition\n",
        "  - method: grpo\n    name: last\n    base_model: sft\n    steps: 1\n    batch_size: 2\n"
        "    group_size: 2\n    eval_every: 0\ndataset: addition\n",
    )
    folder = tmp_path / "run"
    train(str(write_recipe(tmp_path, text=text)), folder)
    for name in ("grpo-final", "last-final"):
        shutil.rmtree(folder / "checkpoints" / name)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "checkpoints" / "sft-final" / "manifest.json").unlink()
    message = "begins from the end of stage sft, but that checkpoint is damaged"
    with pytest.raises(UserError, match=message):
        resume_run(folder)
    assert (folder / "metrics.jsonl").read_text() == lines


# --------------------------------------------------------------------------------------- the folder


@pytest.mark.slow
def test_two_runs_are_kept_apart(done, tmp_path, monkeypatch):
    """During a live run, --resume, --overwrite, --auto-resume and a first start are refused before
    any file changes.
    """
    folder, held = copy_run(done, tmp_path), []
    log = BatchLog.write_row

    def neighbor(self, done, metrics):
        if not held:
            held.append((folder / "run.lock").read_text())
            for flag in ("--resume", "--overwrite", "--auto-resume", ""):
                words = (folder.parent / "recipe.yaml", "--output-dir", folder, *flag.split())
                second = run_script("train.py", *words, cwd=tmp_path)
                output = " ".join(second.stderr.replace("│", " ").split())
                assert second.returncode == 2 and "nothing was started" in output, output
                assert f"in use by process {os.getpid()} on" in output
                assert (folder / "run.lock").read_text() == held[0]
        log(self, done, metrics)

    monkeypatch.setattr(BatchLog, "write_row", neighbor)
    train(f"{folder.parent / 'recipe.yaml'} --overwrite", folder)
    assert held and not (folder / "run.lock").exists()
    assert (folder / "checkpoints" / "grpo-final").is_dir()


@pytest.mark.slow
def test_the_lock_is_given_back_at_every_way_to_end(tmp_path, monkeypatch):
    train(SMALL, tmp_path / "run")
    assert not list((tmp_path / "run").glob("run.lock*"))
    for raised in (RuntimeError, KeyboardInterrupt, SystemExit, UserError):

        def fail(self, done, metrics, raised=raised):
            assert (tmp_path / "run" / "run.lock").is_file()
            raise raised("of the test")

        with monkeypatch.context() as patch, pytest.raises(raised, match="of the test"):
            patch.setattr(BatchLog, "write_row", fail)
            train(f"{SMALL} --overwrite", tmp_path / "run")
        assert not list((tmp_path / "run").glob("run.lock*")), raised
    with pytest.raises(UserError):
        train(f"{SMALL} --overwrite --base-model ./gone", tmp_path / "run")
    assert not list((tmp_path / "run").glob("run.lock*"))


@pytest.mark.slow
def test_a_run_that_never_took_a_step_does_not_block_the_next(tmp_path, monkeypatch):
    def end_before_the_first_step() -> None:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(run.Trainer, "start", lambda self: 1 / 0)
            train(SMALL, tmp_path / "run")

    end_before_the_first_step()
    assert (tmp_path / "run" / "config.json").is_file()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for more in ("", " --learning-rate 1e-4 --overwrite", " --auto-resume", " --resume"):
        if more == " --auto-resume":
            shutil.rmtree(tmp_path / "run")
            end_before_the_first_step()
        assert len(train(SMALL + more, tmp_path / "run")) == 2
        assert more or (tmp_path / "run" / "notes.txt").read_text() == "mine"
    with pytest.raises(RunFolderError, match="holds a run"):
        train(SMALL, tmp_path / "run")


@pytest.mark.parametrize("folder", [
    "file", "file/below", "a\0b", "x" * 300, "/proc/whetstone/run", "~nobody-of-that-name/run",
    "sealed/r",
])  # fmt: skip
def test_a_folder_that_cannot_be_is_known_before_work(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "sealed").mkdir()
    if folder.startswith("sealed"):
        if os.geteuid() == 0:
            pytest.skip("nothing is sealed to root")
        (tmp_path / "sealed").chmod(0o500)

    def never(*args, **kwargs):
        raise AssertionError("work before the folder was looked at")

    monkeypatch.setattr(run, "prepare_stages", never)
    before = sorted(tmp_path.iterdir())
    # on the command line, or when the folder is checked
    with pytest.raises((UserError, SystemExit)) as result:
        train(SMALL, Path(folder))
    assert "output-dir" in f"{result.value} {capsys.readouterr().err}"
    assert sorted(tmp_path.iterdir()) == before
