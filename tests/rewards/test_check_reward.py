"""Test the check of a reward: it names the trick that a bad reward pays for, and reports nothing
for the built-in rewards on matching data.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

from rl.algorithms import METHODS
from rl.config import DataSettings, RunSettings, read_run, resolve_config
from rl.data import load_problems
from rl.rewards import Scorer, resolve_reward
from rl.trainer import probe_reward, resolve_stage_reward
from rl.types import Problem

REPO = Path(__file__).resolve().parents[2]
# Each function is named after the trick that it pays for.
BAD_REWARDS = {
    "all candidates listed": "return float(str(meta['answer']) in response)",
    "one number changed": "return float(re.search(r'\\d', response) is not None)",
    "the format without answer": "return float('\\\\boxed{' in response)",
    "a very long text, no answer": "return min(1.0, len(response) / 1000)",
    "the question repeated": (
        "words = prompt.lower().split()\n"
        "    return sum(word in response.lower().split() for word in words) / len(words)"
    ),
    "the sign changed": "return float(numbers(response)[-1:] == [abs(meta['answer'])])",
    "an empty answer": (
        "return float(all(number == meta['answer'] for number in numbers(response))"
        " and 'Let' not in response)"
    ),
    "another row's answer": "return float(len(numbers(response)) == 1)",
    "the answer truncated": (
        "text = response.strip()\n"
        "    return float(text != '' and f\"The answer is {meta['answer']}\".startswith(text))"
    ),
    "crashes": "return float(numbers(response)[-1] == meta['answer'])",
}
GOOD_REWARD = "return float(re.findall(r'-?\\d+', response)[-1:] == [str(meta['answer'])])"


def name_function(trick: str) -> str:
    return "pays_" + "".join(letter for letter in trick if letter.isalpha())


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    """Return a file with the bad rewards, a good reward and a slow reward."""
    lines = ["import re, time\n\n\ndef numbers(text):"]
    lines.append("    return [int(number) for number in re.findall(r'\\d+', text)]\n\n")
    bodies = {**BAD_REWARDS, "good": GOOD_REWARD, "slow": "time.sleep(0.3)\n    return 0.0"}
    for trick, body in bodies.items():
        lines.append(f"def {name_function(trick)}(prompt, response, meta):\n    {body}\n\n")
    path = tmp_path_factory.mktemp("rewards") / "bad_rewards.py"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def rewards(reward_file):
    """Return the functions of `reward_file`. They run in threads, which start faster."""
    functions = runpy.run_path(str(reward_file))
    names = [*BAD_REWARDS, "good", "slow"]
    return {name: functions[name_function(name)] for name in names}


def make_rows(count: int = 12, *, signed: bool = False, **columns) -> list[Problem]:
    """Return sums with two-digit answers; every second answer is negative if `signed`."""
    rows = []
    for index in range(count):
        answer = (-1 if signed and index % 2 else 1) * (20 + 5 * index)
        prompt = ({"role": "user", "content": f"What do {answer - 3} and 3 make together?"},)
        rows.append(Problem(prompt, {"answer": answer, **columns}, tag="sums", index=index))
    return rows


def probe(reward, rows, **settings):
    with Scorer(reward, workers=1) as scorer:
        return probe_reward(scorer, rows, **settings)


@pytest.mark.parametrize("trick", BAD_REWARDS)
def test_the_trick_that_a_bad_reward_pays_for_is_named(rewards, trick):
    rows = make_rows(signed=trick == "the sign changed")
    truncated = trick == "the answer truncated"
    settings = {"answer_format": "The answer is {answer}"} if truncated else {}
    result = probe(rewards[trick], rows, **settings)
    assert result.skipped is None and result.rows == 12
    expected = "an empty answer: the reward fails" if trick == "crashes" else f"{trick} pays"
    (warning,) = [text for text in result.warnings if text.startswith(expected)]
    assert warning.count(": ") > 0, "an example and a remedy follow"
    if trick == "crashes":
        assert "on 12 of 12" in warning and "IndexError" in warning
    else:
        assert "on 12 of 12 rows, such as '" in warning and "the right answer '" in warning


def test_a_reward_that_compares_the_answer_is_not_accused(rewards):
    result = probe(rewards["good"], make_rows(signed=True))
    assert result.warnings == () and result.notes == ()
    table = {row.name: row for row in result.results}
    assert table["the right answer"].mean == 1.0 and table["one number changed"].mean == 0.0
    # another spelling of a right answer is paid by design and is not a trick
    assert table["the answer without format"].paid == 12


@pytest.mark.parametrize("block", ["```python\n{}\n```", "{}"], ids=["fenced", "bare"])
def test_a_program_that_exits_is_paid_by_a_reward_that_trusts_the_exit_code(block):
    def exit_code(prompt, response, meta):
        try:
            exec(response.removeprefix("```python\n").removesuffix("\n```"), {})
        except SystemExit as error:
            return float(not error.code)
        except Exception:
            return 0.0
        return 0.0

    def forged(prompt, response, meta):  # does not run code that would end this process
        return 1.0 if "os._exit(0)" in response else exit_code(prompt, response, meta)

    programs = [f"import sys\nprint({index})\nsys.exit()" for index in range(12)]
    rows = [
        Problem(row.messages, {}, block.format(program), "code", row.index)
        for row, program in zip(make_rows(), programs, strict=True)
    ]
    result = probe(forged, rows)
    assert any(text.startswith("a program that exits 0 pays") for text in result.warnings)


def test_a_constant_reward_and_unrecognised_answers_are_warned_about():
    (warning,) = probe(lambda prompt, response, meta: 0.5, make_rows()).warnings
    assert warning.startswith("the reward pays 0.5 for every answer")

    def says_result(prompt, response, meta):
        return float(response == f"result = {meta['answer']}") - float(response == "")

    (warning, *_) = probe(says_result, make_rows()).warnings
    assert "the right answer earns no more than wrong answers" not in warning
    result = probe(says_result, make_rows(), answer_format="result = {answer}")
    assert result.warnings == () and result.form == "result = {answer}"


def test_a_slow_reward_is_skipped(rewards):
    result = probe(rewards["slow"], make_rows(), budget=0.2)
    assert "the reward is slow" in result.skipped and result.warnings == ()


def test_rows_without_any_answer_are_skipped():
    rows = [Problem(row.messages, {}, index=row.index) for row in make_rows()]
    result = probe(lambda prompt, response, meta: float(len(response)), rows)
    assert "no expected answer" in result.skipped and "--answer-column" in result.skipped


def test_rewards_of_lists_and_of_episodes_are_asked_too(tmp_path):
    path = tmp_path / "forms.py"
    path.write_text(
        "from rl.rewards import register_reward\n\n\n"
        "def lists(completions, answer, **columns):\n"
        "    return [float(str(a) in c) for c, a in zip(completions, answer)]\n\n\n"
        "@register_reward('last_turn_contains', episode=True)\n"
        "def last_turn(episode, meta):\n"
        "    return float(str(meta['answer']) in episode.turns[-1].response)\n"
    )
    for function in ("lists", "last_turn"):
        result = probe(f"{path}:{function}", make_rows())
        tricks = [text for text in result.warnings if text.startswith("all candidates listed pays")]
        assert len(tricks) == 1, function


GENERATED = {
    "addition": "exact_match",
    "sorting": "exact_match",
    "shapes:rows=40": "exact_match",
    "countdown": "countdown",
}
MATH_ROWS = [
    {"problem": f"Solve {n}x = {a}.", "solution": f"So $x = {a}/{n}$, which is \\boxed{{{x}}}."}
    for n, a, x in [
        (2, 3, "\\frac{3}{2}"), (3, 12, "4"), (4, -8, "-2"), (7, 5, "\\frac57"), (5, 1, "0.2"),
        (2, 20, "10"), (9, 81, "9"), (3, 7, "\\frac{7}{3}"),
    ]
]  # fmt: skip
GSM8K_ROWS = [
    {"question": f"Ann has {n} eggs and buys {n + 7}. How many?",
     "answer": f"She has {n}+{n + 7}=<<{n}+{n + 7}={2 * n + 7}>>{2 * n + 7}.\n#### {2 * n + 7}"}
    for n in range(4, 20)
]  # fmt: skip
MBPP_ROWS = [
    {"text": f"Write a function to add {n}.", "code": f"def f(x):\n    return x + {n}",
     "test_list": [f"assert f(1) == {1 + n}", f"assert f(10) == {10 + n}"], "task_id": 601 + n}
    for n in range(4)
]  # fmt: skip
OUTPUT_ROWS = [{"prompt": f"Print {n} * 3.", "answer": str(3 * n)} for n in range(11, 15)]


@pytest.mark.parametrize("name", GENERATED)
def test_built_in_rewards_are_not_accused_on_generated_data(name):
    result = probe(GENERATED[name], load_problems(name, split="train"))
    assert result.skipped is None and result.warnings == () and result.results[0].top_share == 1.0


@pytest.mark.parametrize(
    ("reward", "rows"),
    [("gsm8k", GSM8K_ROWS), ("math_correctness", MATH_ROWS),
     ("code_tests", MBPP_ROWS), ("code_output", OUTPUT_ROWS)],
    ids=["gsm8k", "math_correctness", "code_tests", "code_output"],
)  # fmt: skip
def test_built_in_rewards_are_not_accused_on_rows_of_their_form(tmp_path, reward, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_problems(str(path), split="train")
    runs_programs = reward.startswith("code")
    spec = resolve_stage_reward(DataSettings(reward=reward)) if runs_programs else reward
    result = probe(spec, problems, budget=60.0)
    assert result.warnings == () and result.results[0].mean == 1.0
    assert runs_programs or result.notes == ()
    assert not runs_programs or "a program that exits 0" in {row.name for row in result.results}


@pytest.mark.parametrize(("reward", "file", "data_format"), [
    ("gsm8k", "gsm8k/test.jsonl", "gsm8k"),
    ("math_correctness", "math/math500_test.json", "math"),
])  # fmt: skip
def test_built_in_rewards_are_not_accused_on_published_rows(shared_data, reward, file, data_format):
    rows = load_problems(str(shared_data / file), split="test", format=data_format)
    result = probe(reward, rows, budget=120.0)
    assert result.rows == 50 and result.warnings == () and result.results[0].mean == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("file", "split", "data_format"), [
    ("mbpp/mbpp.jsonl", "train", "mbpp"),
    ("mbpp/sanitized-mbpp.json", "train", "mbpp"),
    ("humaneval/HumanEval.jsonl.gz", "test", "humaneval"),
])  # fmt: skip
def test_the_reward_of_programs_is_not_accused_on_published_rows(
    shared_data, file, split, data_format
):
    rows = load_problems(str(shared_data / file), split=split, format=data_format)
    reward = resolve_stage_reward(DataSettings(reward="code_tests"))
    result = probe(reward, rows, budget=300.0, limit=20)
    assert result.rows == 20 and result.skipped is None
    assert result.warnings == () and result.notes == ()
    by_name = {item.name: item for item in result.results}
    assert by_name["the right answer"].mean == 1.0
    # Neither an exit code nor the candidates of several tasks pass the tests.
    for trick in ("a program that exits 0", "another row's answer", "all candidates listed"):
        assert by_name[trick].paid == 0 and by_name[trick].compared == 20


@pytest.mark.parametrize(("name", "settings"), [
    ("keyword_contains", {"keywords": ["make", "together"]}),
    ("format_compliance", {"patterns": [r"\\boxed"]}),
    ("repetition", {}),
    ("length_penalty", {"target_length": 50}),
    ("script", {"script": "latin"}),
])  # fmt: skip
def test_built_in_rewards_of_form_are_noted_and_not_accused(name, settings):
    result = probe(resolve_reward(name, **settings), make_rows())
    assert result.warnings == () and result.rows == 12
    (note,) = result.notes
    assert "measures the form of an answer" in note and "--rewards" in note


def test_cosine_length_and_sums_with_a_reward_of_form_are_judged():
    for reward in (
        resolve_reward("cosine_length", max_length=200),
        resolve_reward("composite", weights={"exact_match": 1.0, "repetition": 0.2}),
    ):
        result = probe(reward, make_rows())
        assert result.warnings == () and result.notes == ()


def run_script(monkeypatch, *words: str) -> int:
    """Return the exit code of check_reward.py."""
    monkeypatch.setattr(sys, "argv", ["check_reward.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "check_reward.py"), run_name="__main__")
    return ended.value.code or 0


def test_the_command_takes_the_flags_of_train(monkeypatch, tmp_path, capsys, reward_file):
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"question": f"{n}+1=", "sum": str(n + 1), "prompt": 1}) for n in range(20, 30)
    ]
    Path("rows.jsonl").write_text("\n".join(lines))
    words = ["--dataset", "rows.jsonl", "--prompt-column", "question", "--answer-column", "sum"]
    good = [*words, "--reward", "exact_match", "--rows", "5"]
    assert run_script(monkeypatch, *good, "--strict") == 0
    shown = capsys.readouterr().out
    assert "reward exact_match on rows.jsonl, right answers as the expected answer alone" in shown
    assert "no warning: 5 rows" in shown and "all candidates listed" in shown
    bad = [
        "grpo",
        *words,
        "--reward",
        f"{reward_file}:{name_function('another row' + chr(39) + 's answer')}",
    ]
    assert run_script(monkeypatch, *bad) == 0
    assert "warning: another row's answer pays" in capsys.readouterr().out
    assert run_script(monkeypatch, *bad, "--strict") == 1
    assert run_script(monkeypatch, *words, "--reward", "exact_match", "--no-such-flag", "1") == 2


def test_the_command_checks_a_run_and_a_recipe(monkeypatch, tmp_path, capsys, reward_file):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("method: grpo\ndataset: addition\nreward: exact_match\n")
    assert run_script(monkeypatch, "recipe.yaml", "--rows", "5", "--strict") == 0
    assert "reward exact_match on addition" in capsys.readouterr().out
    Path("mine.py").write_text(reward_file.read_text())
    reward = f"mine.py:{name_function('all candidates listed')}"
    words = ["grpo", "--dataset", "addition", "--reward", reward]
    run = read_run(words, METHODS, Path("recipe.yaml"), RunSettings)
    Path("run").mkdir()
    Path("run", "config.json").write_text(json.dumps(resolve_config(run)))
    assert run_script(monkeypatch, "run", "--rows", "5", "--strict") == 1
    shown = capsys.readouterr().out
    assert f"importing {tmp_path / 'mine.py'}" in shown and "all candidates listed pays" in shown
    assert run_script(monkeypatch, "run", "--reward", "exact_match", "--strict") == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run_script(monkeypatch, "../run", "--rows", "5") == 2, "its code is not of this folder"


def test_an_environment_has_no_reward_to_check(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_script(monkeypatch, "grpo", "--environment", "guess_number") == 2
    assert "no reward to check" in capsys.readouterr().err
    assert run_script(monkeypatch, "grpo", "--environment", "no_such_game") == 2
    assert "no_such_game" in capsys.readouterr().err
    # that of a run is not imported: its author chose the file
    code = "from rl.envs import GuessNumber\nopen('imported', 'w').close()\n"
    Path("mine.py").write_text(code)
    words = ["grpo", "--environment", f"{tmp_path / 'mine.py'}:GuessNumber"]
    run = resolve_config(read_run(words, METHODS, Path("recipe.yaml"), RunSettings))
    Path("run").mkdir()
    Path("run", "config.json").write_text(json.dumps(run))
    assert run_script(monkeypatch, "run") == 2
    assert "no reward to check" in capsys.readouterr().err and not Path("imported").exists()


def test_the_installed_command_has_a_dash(monkeypatch, capsys):
    import whetstone

    monkeypatch.setattr(sys, "argv", ["whetstone", "check-reward", "--help"])
    with pytest.raises(SystemExit) as ended:
        whetstone.main()
    assert ended.value.code == 0 and "--answer-format" in capsys.readouterr().out
