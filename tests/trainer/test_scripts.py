"""Test sample.py and evaluate.py against transformers, plain counting and the run's evaluation."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from rank_server import run_script

from rl.algorithms import METHODS
from rl.config import RunSettings, cli, read_run, resolve_config
from rl.errors import UserError
from rl.jsonl import read_jsonl
from rl.trainer import check_trusted, main, open_weights, run_guarded
from rl.trainer.evaluator import compute_pass_at_k, pass_at_k

REPO = Path(__file__).resolve().parents[2]
RECIPE = """
stages:
  - method: sft
    base_model: tiny:addition
    response_column: answer
    learning_rate: 3e-3
    steps: 40
    batch_size: 24
    eval_every: 0
    save_every: 0
  - method: grpo
    learning_rate: 3e-4
    lora_rank: 4
    steps: 2
    batch_size: 12
    group_size: 4
    eval_every: 1
    keep_best: env/all/reward/total
dataset: {data}
reward: exact_match
max_tokens: 4
temperature: 1.0
eval_temperature: 0.8
"""
ANSWER = re.compile(r"^(.*)  \[mean logprob (-?[\d.]+), (\d+) tokens(, cut off)?\]$", re.M)


def script(name: str, *words: object, cwd: Path, **options) -> subprocess.CompletedProcess:
    if not options:
        return run_script(name, *words, cwd=cwd, COLUMNS="200")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, str(REPO / name), *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, **options
    )


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two stages: all weights learn 24 sums in part, then a LoRA on top of them."""
    folder = tmp_path_factory.mktemp("scripts")
    sums = itertools.product(range(10, 16), range(20, 24))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        write_rows(folder / "data" / f"{split}.jsonl", rows)
    (folder / "recipe.yaml").write_text(RECIPE.format(data=folder / "data"))
    done = script("train.py", "recipe.yaml", "--output-dir", folder / "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets), abs=1e-12
            )
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(n, c, k)


def test_pass_figures_leave_out_problems_whose_rewards_failed_in_part():
    figures = compute_pass_at_k([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0]], 3)
    means = {"pass@1": 1 / 6, "pass@2": (2 / 3) / 2, "pass@3": 0.5}
    # The standard error of the mean of two values is half of their difference.
    errors = {f"standard error of pass@{k}": e for k, e in ((1, 1 / 6), (2, 1 / 3), (3, 1 / 2))}
    assert figures == pytest.approx({**means, **errors})
    # A single problem gives no standard error.
    assert compute_pass_at_k([[1.0, 0.0]], 2) == {"pass@1": 0.5, "pass@2": 1.0}
    assert compute_pass_at_k([[1.0]], 2) == {}


@pytest.mark.parametrize("name", ["sample.py", "evaluate.py"])
def test_help_imports_nothing_heavy(name: str, tmp_path: Path):
    code = (
        "import runpy, sys; sys.argv[1:] = ['--help']\n"
        f"try: runpy.run_path({str(REPO / name)!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'transformers', "
        "'rl.models') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "WEIGHTS" in out and out.strip().endswith("0 []")


def unsaved_run(folder: Path) -> Path:
    request = cli.read_run(["sft"], METHODS, folder / "none.yaml", RunSettings)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(resolve_config(request)))
    return folder


def test_what_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run = unsaved_run(tmp_path / "runs" / "mine")
    (tmp_path / "owner" / "other").mkdir(parents=True)
    assert open_weights("owner/model").name == "owner/model"  # hidden by no folder of that name
    cases = [
        (("runs/mine",), "has saved no weights yet"),
        (("mine",), "did you mean runs/mine?"),
        (("runs/min",), "runs has runs/mine"),
        (("runs",), "neither a run nor weights (it has mine)"),
        (("./gone",), "no folder ./gone"),
        (("tinker://abc/sampler_weights/x",), "is a path of a Tinker server"),
        (("tiny:addition", "best"), "no folder of a run"),
    ]
    for words, message in cases:
        with pytest.raises(UserError) as error:
            open_weights(*words)
        assert message in str(error.value)
    row = {
        "name": "sft-000020", "kind": "last", "stage": "sft", "batch": 20,
        "state_path": "anywhere/sft-000020",
    }  # fmt: skip
    write_rows(run / "checkpoints.jsonl", [row])
    # paths are relative to the folder, wherever it was
    assert open_weights("runs/mine").path == Path("runs/mine/checkpoints/sft-000020")
    with pytest.raises(UserError, match="no checkpoint 'best'; it has sft-000020"):
        open_weights("runs/mine", "best")


def test_a_full_disk_is_answered_with_resume_only_after_a_run_has_begun(monkeypatch, capsys):
    def fill(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def begin(run, on_begin, **_):
        on_begin()
        fill()

    def execute_with(function):
        monkeypatch.setattr("rl.trainer.entry_point.execute", function)
        main(read_run(["grpo"], METHODS, REPO / "recipes" / "addition.yaml", RunSettings))

    def export():
        run_guarded(fill, see="python export.py --help", outcome="nothing was exported")

    works = {export: False, lambda: execute_with(fill): False, lambda: execute_with(begin): True}
    for work, resumes in works.items():
        with pytest.raises(SystemExit):
            work()
        text = capsys.readouterr().err
        assert "free some space" in text and ("--resume" in text) is resumes


def test_the_newest_checkpoint_is_taken_and_the_best_on_demand(tmp_path: Path):
    run = unsaved_run(tmp_path / "run")
    rows = [
        {"name": "sft-000020", "kind": "last", "stage": "sft", "batch": 20, "state_path": "x"},
        {"name": "sft-final", "kind": "final", "stage": "sft", "batch": 40, "state_path": "x"},
        {"name": "sft-best-000010", "kind": "best", "stage": "sft", "batch": 10, "state_path": None,
         "sampler_path": "x"},
    ]  # fmt: skip
    write_rows(run / "checkpoints.jsonl", rows)
    assert open_weights(str(run)).path == run / "checkpoints" / "sft-final"
    assert open_weights(str(run), "best").path == run / "sampler_weights" / "sft-best-000010"
    assert open_weights(str(run), "sft-000020").path == run / "checkpoints" / "sft-000020"
    assert open_weights("tiny:addition").path is None


def test_a_runs_own_reward_is_imported_from_the_current_folder_or_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, present = tmp_path / "here", tmp_path / "there"
    for folder in (here, present, here / "package"):
        folder.mkdir()
        (folder / "mine.py").write_text("raise SystemExit('imported')\n")
    (here / "package" / "__init__.py").write_text("raise SystemExit('imported')\n")
    os.symlink(present / "mine.py", here / "linked.py")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    local = ("mine.py:f", "./mine.py:f", "mine:f", "package.mine:f", "package:f")
    for address in (*local, f"{here}/mine.py:f"):
        text = check_trusted([address], "the config of run", False)
        assert address in text[0] and "mine.py" in text[0] or "__init__.py" in text[0]
    others = ("../there/mine.py:f", f"{present}/mine.py:f", "linked.py:f", "json:loads")
    for address in (*others, "subprocess:getoutput"):
        with pytest.raises(UserError, match="--trust-run"):
            check_trusted([address], "the config of run", False)
        assert address in check_trusted([address], "the config of run", True)[0]
    for address in ("nowhere:f", "posix:system"):  # a missing module, and a module without a file
        with pytest.raises(UserError, match="--reward"):
            check_trusted([address], "the config of run", True)


@pytest.mark.slow
def test_evaluate_asks_before_it_imports_what_a_folder_of_somebody_else_names(
    run: Path, tmp_path: Path
):
    stolen, work = tmp_path / "stolen", tmp_path / "work"
    shutil.copytree(run, stolen)
    work.mkdir()
    code = "import pathlib; pathlib.Path('touched').touch()\n"
    code += "def f(prompt, response, meta):\n    return 1.0\n"
    (tmp_path / "evil.py").write_text(code)
    config = json.loads((stolen / "config.json").read_text())
    for stage in config["stages"]:
        stage["settings"]["reward"] = f"{tmp_path / 'evil.py'}:f"
    (stolen / "config.json").write_text(json.dumps(config))
    words = ("evaluate.py", stolen, "--limit", 2)
    done = script(*words, cwd=work)
    assert done.returncode == 2 and "--trust-run" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and list(work.iterdir()) == []
    assert script(*words, "--reward", "exact_match", cwd=work).returncode == 0
    assert list(work.iterdir()) == []
    done = script(*words, "--trust-run", cwd=work)
    assert done.returncode == 0 and f"importing {(tmp_path / 'evil.py').resolve()}" in done.stdout
    # Without --output, each of the two evaluations that ran writes its files to the run's folder.
    written = sorted(path.suffix for path in (stolen / "evaluations").iterdir())
    assert written == [".json", ".json", ".md", ".md"]
    assert f"written to {stolen / 'evaluations' / 'grpo-final-'}" in done.stdout
    assert (work / "touched").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), [
    ("sample.py ./gone --prompt 1+1=", "no folder ./gone"),
    ("sample.py tiny:addition --tempratur 1", "1 problem: nothing was sampled"),
    ("evaluate.py tiny:addition", "pass --dataset"),
])  # fmt: skip
def test_mistakes_end_in_one_box(words, message, tmp_path: Path):
    done = script(*words.split(), cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------- on a run


@pytest.mark.slow
def test_evaluate_gives_the_figures_of_the_runs_own_evaluation(run: Path):
    last = read_jsonl(run / "metrics.jsonl")[-1]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = script("evaluate.py", run, "--output", run.parent / "one.json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads((run.parent / "one.json").read_text())
    assert 0 < result["correct"] < 1  # neither figure could come about by chance
    assert result["correct"] == last["test/env/all/correct"]
    assert result["mean reward"] == last["test/env/all/reward/total"]
    assert result["temperature"] == 0.8 and result["problems"] == result["answers"] == 24
    assert f"correct                     │ {result['correct']:.4f}" in done.stdout
    # it writes nothing into the run
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.slow
def test_evaluate_counts_what_it_wrote(run: Path):
    words = "--samples 5 --limit 20 --temperature 1 --seed 3 --output several.json".split()
    done = script("evaluate.py", run, *words, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads((run.parent / "several.json").read_text())
    problems = read_jsonl(run.parent / "data" / "test.jsonl")[:20]
    right_P: dict[int, list[bool]] = {i: [] for i in range(20)}
    for row in result["rows"]:
        problem = problems[row["problem"]]
        assert row["prompt"] == problem["prompt"] and row["expected"] == problem["answer"]
        right_P[row["problem"]].append(row["response"] == problem["answer"])
    assert all(len(right) == 5 for right in right_P.values()) and result["answers"] == 100
    shares = [sum(right) / 5 for right in right_P.values()]
    assert 0 < sum(shares) < 20
    assert result["correct"] == result["mean reward"] == pytest.approx(sum(shares) / 20)
    average = sum(shares) / 20
    error = (sum((s - average) ** 2 for s in shares) / 19 / 20) ** 0.5
    assert result["standard error of correct"] == pytest.approx(error)
    for k in (1, 2, 4, 5):
        each = [
            np.mean([any(subset) for subset in itertools.combinations(right, k)])
            for right in right_P.values()
        ]
        passed, error = result[f"pass@{k}"], result[f"standard error of pass@{k}"]
        assert passed == pytest.approx(sum(each) / 20)
        assert error == pytest.approx(np.std(each, ddof=1) / 20**0.5)
        assert f"{passed:.4f} \u00b1 {error:.4f}" in done.stdout


def reference(folder: Path):
    """Return the model of a LoRA checkpoint as PEFT loads it, and its tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    taught, trained = (folder / f"checkpoints/{stage}-final/model" for stage in ("sft", "grpo"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(taught), str(trained))
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(str(taught))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_samples_have_the_logprobs_of_the_saved_weights(run: Path):
    import torch

    words = ["--prompt", "12+21=", "14+23=", "-n", 8, "--temperature", 2.5]
    done = script("sample.py", run, *words, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    # seed 0 in both runs
    words[3] = "--samples"
    assert done.stdout == script("sample.py", run, *words, cwd=run.parent).stdout
    assert done.stdout != script("sample.py", run, *words, "--seed", 1, cwd=run.parent).stdout
    model, tokenizer = reference(run)
    blocks = re.split(r"\n(?=\d\d\+\d\d=\n)", done.stdout)[1:]
    assert [block.splitlines()[0] for block in blocks] == ["12+21=", "14+23="]
    for block in blocks:
        prompt = tokenizer.encode(block.splitlines()[0])
        answers = ANSWER.findall(block)
        assert len(answers) == 8 and len({text for text, *_ in answers}) > 2
        for text, logprob, count, cut in answers:
            tokens = tokenizer.encode(text) + ([] if cut else [tokenizer.eos_token_id])
            assert len(tokens) == int(count)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0]
            logp = (logits / 2.5).log_softmax(-1)[
                range(len(prompt) - 1, len(prompt) + len(tokens) - 1), tokens
            ]
            assert float(logp.mean()) == pytest.approx(float(logprob), abs=2e-4)


@pytest.mark.slow
def test_the_rows_of_a_file_are_asked_with_the_flags_of_data(run: Path, tmp_path: Path):
    rows = [{"q": "12+34", "a": "46"}, {"q": "20+30", "a": "50"}, {"q": "11+11", "a": "22"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    columns = ["--prompt-column", "q", "--answer-column", "a", "--prompt-suffix", "="]
    words = ["--dataset", tmp_path / "rows.jsonl", *columns, "--temperature", 0]
    done = script("sample.py", run, *words, "--limit", 2, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    request = script(
        "sample.py", run, "--prompt", "12+34=", "20+30=", "--temperature", 0, cwd=run.parent
    )
    assert done.stdout == request.stdout and "12+34=" in done.stdout
    wrong = script("sample.py", run, *words, "--prompt-colum", "q", cwd=run.parent)
    assert wrong.returncode == 2 and "--prompt-column" in wrong.stderr


@pytest.mark.slow
def test_one_candidate_token_is_greedy(run: Path):
    """top_k 1, and a top_p that covers only the most probable token, leave nothing to sample."""
    greedy, single = ["--temperature", 0], ["--temperature", 2.5, "--top-k", 1]
    answers = []
    for words in (greedy, single, ["--temperature", 2.5, "--top-p", 1e-6]):
        done = script("sample.py", run, "--prompt", "12+21=", "14+23=", *words, cwd=run.parent)
        assert done.returncode == 0, done.stderr
        answers.append([text for text, *_ in ANSWER.findall(done.stdout)])
    assert len(answers[0]) == 2 and answers[0] == answers[1] == answers[2]
    figures = []
    for words in (greedy, single):
        words = [*words, "--limit", 8, "--output", "greedy.json"]
        done = script("evaluate.py", run, *words, cwd=run.parent)
        assert done.returncode == 0, done.stderr
        figures.append(json.loads((run.parent / "greedy.json").read_text()))
    responses = [[row["response"] for row in result["rows"]] for result in figures]
    assert responses[0] == responses[1]
    assert figures[1]["top_k"] == 1 and "top_k" not in figures[0]


@pytest.mark.slow
def test_prompts_from_a_pipe_are_answered_greedily_as_transformers_does(run: Path):
    import torch

    single = run.parent / "alone"  # a folder of weights, copied out of the run
    shutil.copytree(run / "checkpoints" / "sft-final" / "model", single)
    words, text = ("--temperature", 0, "--max-tokens", 4), "10+20=\n\n13+22=\n"
    done = script("sample.py", single, *words, cwd=run.parent, input=text)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(single).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(single))
    greedy, expected = {"do_sample": False, "max_new_tokens": 4}, []
    for prompt in ("10+20=", "13+22="):
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert [text for text, *_ in ANSWER.findall(done.stdout)] == expected
    assert "10+20=" in done.stdout and "13+22=" in done.stdout


@pytest.mark.slow
def test_a_chat_begins_as_a_prompt_is_sampled(run: Path):
    """The chat uses the settings of the run; a second model answers the same messages."""
    words = ("--temperature", 0, "--prompt-suffix", "=")
    single = script("sample.py", run, "--prompt", "12+22", *words, cwd=run.parent)
    (expected, *_), *_ = ANSWER.findall(single.stdout)
    chat = script(
        "sample.py", run, "tiny:addition", "--chat", *words, cwd=run.parent, input="12+22\nhello\n"
    )
    assert chat.returncode == 0, chat.stderr
    mine, other = chat.stdout.split("tiny:addition:\n")
    assert ANSWER.findall(mine)[-1][0] == expected and len(ANSWER.findall(other)) == 1
    assert f"{run}: grpo-final:\n" in mine and "no tokens for some of the text 'hello" in other


@pytest.mark.slow
def test_a_terminal_is_asked_until_its_input_ends(run: Path):
    ours, theirs = pty.openpty()
    os.write(ours, b"10+20=\n\x04")
    try:
        done = script(
            "sample.py", run / "checkpoints" / "grpo-final" / "model", cwd=run.parent, stdin=theirs
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, done.stderr
    # a folder inside a run is recognized, with the run's settings
    assert f"{run}: grpo-final" in done.stdout
    assert done.stdout.count("> ") == 2 and len(ANSWER.findall(done.stdout)) == 1


def test_images_of_the_command_line_are_added_to_those_of_a_row(monkeypatch):
    import sample

    own = [{"type": "image", "image": "row.png"}, {"type": "text", "text": "how many?"}]
    prompts = [[{"role": "user", "content": content}] for content in (own, "how many?")]
    monkeypatch.setattr("rl.trainer.iterate_prompts", lambda *_: prompts)
    model, console = MagicMock(), MagicMock(encoding="utf-8")
    args = argparse.Namespace(prompt=[], dataset="rows", limit=None, image=["more.png"], n=1)
    sample.sample_prompts(model, args, console)
    contents = [
        call.args[0][-1]["content"]
        for call in model.renderer.build_generation_prompt.call_args_list
    ]
    more = {"type": "image", "image": "more.png"}
    assert contents == [[more, *own], [more, own[1]]]
