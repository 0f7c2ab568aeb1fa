"""Test environments in whole runs: set by flags, in recipes and in evaluations, built-in and TRL's,
resumed mid-run, and partly broken.
"""

import json
import re
import textwrap
from pathlib import Path

import pytest
from doc_blocks import blocks_of
from rank_server import run_script
from scripted import ScriptedSampler
from whole_runs import RECIPE, train, two_and_two

from rl.algorithms import METHODS
from rl.config import RunSettings, SettingsError, parse_run, read_run
from rl.envs.python_env import Python
from rl.envs.tools import index_tools, run_calls
from rl.errors import UserError
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.sandbox import Sandbox
from rl.types import SamplingParams

REPO = Path(__file__).resolve().parents[2]
SMALL = (
    "--base-model tiny:ascii --batch-size 3 --group-size 3 --max-tokens 6 --eval-limit 4 "
    "--learning-rate 1e-3 --environment-rows 12"
)
LEVELS = "--curriculum success --curriculum-up 0.01 --curriculum-down 0 --curriculum-window 2"

# Rewards per turn, random episode ends, truncations, a tool and a level; member 2 fails at times.
WALK = '''
from rl.envs import Environment, TurnResult, tool

def length(text: str) -> int:
    """Counts.

    Args:
        text: what is counted
    """
    return len(text)

class Walk(Environment):
    """Goes on for a while."""
    def __init__(self, breaks: bool = False, longest: int = 4):
        self.breaks, self.longest, self.tools = breaks, longest, (length,)
    def rows(self, split, count):
        return [{"level": i % 3} for i in range(count)]
    def start(self):
        self.left = self.rng.randrange(1, self.longest)
        return "go "
    async def step(self, answer):
        if self.breaks and self.member == 2:
            raise RuntimeError("broken")
        self.left -= 1
        reward = sum(map(ord, answer["content"])) % 7 / 7 + 0.1 * self.row["level"]
        return TurnResult("on ", reward=reward, done=self.left <= 0, metrics={"correct": reward}, logs={"left": self.left})
'''


@pytest.fixture(scope="module")
def walk_spec(tmp_path_factory):
    file = tmp_path_factory.mktemp("walk") / "walk.py"
    file.write_text(WALK)
    return f"{file}:Walk"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [("grpo", f"--step-rewards to_go --reward-discount 0.9 {LEVELS}"),
     ("ppo", "--normalise-rewards --group-size 2 --environment-isolation thread")],
)  # fmt: skip
def test_four_steps_are_two_and_two(walk_spec, tmp_path, method, more):
    rows = two_and_two(
        f"{method} {SMALL} --environment {walk_spec} --max-turns 3 {more} --eval-every 2 "
        f"--rollouts-every 1",
        tmp_path,
    )
    steps = [row for row in rows if "progress/batch" in row]
    # which episodes continue depends on the name, and therefore on the path of this test
    assert any(row["env/all/turns_per_episode"] > 1 for row in steps) and {
        row["reward/failed"] for row in steps
    } == {0}
    rollouts = sorted((tmp_path / "whole" / "rollouts").glob("*.jsonl"))
    assert [a.read_text() for a in rollouts] == [
        (tmp_path / "cut" / "rollouts" / a.name).read_text() for a in rollouts
    ]


@pytest.mark.slow
def test_what_breaks_is_left_out_and_named_and_the_rest_is_trained(walk_spec, tmp_path):
    words = f"--environment {walk_spec} --environment.breaks --max-turns 3 --steps 2"
    rows = train(f"grpo {SMALL} {words} --eval-every 0 --rollouts-every 1", tmp_path)
    for row in (row for row in rows if "progress/batch" in row):
        assert row["reward/failed"] == 3 and row["env/all/total_episodes"] == 6
        lines = (tmp_path / "rollouts" / f"step_{int(row['step']):06d}.jsonl").read_text()
        written = [json.loads(line) for line in lines.splitlines()]
        assert len(written) == 6
        # the loss is divided by the tokens present, not by the requested ones; groups with equal
        # rewards do not count
        rewards = {}
        for r in written:
            rewards.setdefault(r["group"], []).append(r["reward"])
        differ = {g for g, earned in rewards.items() if len(set(earned)) > 1} or {0}
        turns = [turn for r in written if r["group"] in differ for turn in r["turns"]]
        kept = sum(len(turn["token_ids"]) for turn in turns if turn["sampled"])
        assert row["optim/tokens"] == kept
    assert not (REPO / "rollouts").exists()


@pytest.mark.slow
def test_an_environment_in_a_recipe_is_evaluated_as_it_was_trained(tmp_path):
    (tmp_path / "turns.py").write_text(
        "from rl.rewards import register_reward\n"
        "@register_reward('turns_of_a_file', episode=True)\n"
        "def turns(episode, meta):\n    return 0.25 * len(episode.turns)\n"
    )
    recipe = tmp_path / "sums.yaml"
    recipe.write_text(
        f"reward: {tmp_path}/turns.py:turns\n"
        "method: grpo\nbase_model: tiny:ascii\nmax_tokens: 5\nmax_turns: 2\n"
        "environment: {name: calculator, digits: 1, operations: '+'}\n"
        "steps: 1\nbatch_size: 2\ngroup_size: 2\neval_limit: 6\neval_every: 1\neval_greedy: false\n"
    )
    rows = train(f"{recipe}", tmp_path / "run")
    assert rows[-1]["test/env/all/total_episodes"] == 6
    words = [tmp_path / "run", "--trust-run", "--output", tmp_path / "found.json"]
    done = run_script("evaluate.py", *words, cwd=REPO)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["mean reward"] == pytest.approx(rows[-1]["test/env/all/reward/total"])
    # the episode-level reward adds this to the environment's rewards
    assert result["mean reward"] >= 0.25 and len(result["rows"]) == 6
    assert all(re.fullmatch(r"\d\+\d=", row["prompt"]) for row in result["rows"])
    done = run_script("evaluate.py", *words, "--environment.digit", "2", cwd=REPO)
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and "did you mean --environment.digits?" in text


def a_sandbox() -> Sandbox:
    """Return a sandbox, or skip the test if this machine has none."""
    try:
        return Sandbox()
    except UserError as error:
        pytest.skip(f"no sandbox here: {error}")


@pytest.mark.slow
def test_python_keeps_its_state_and_loses_it_with_what_ends_it():
    a_sandbox().close()
    environment = Python(seconds=2.0)
    python = environment.python
    assert python("a = 3\nprint('hi')\na * 2").split() == ["hi", "6"] and python("a + 1") == "4"
    assert "ZeroDivisionError" in python("1 / 0") and python("a") == "3"
    assert "ended by timeout" in python("while True: pass") and "NameError" in python("a")
    assert "ended by" in python("print('x' * 10**8)")
    environment.close()


def test_calls_of_an_answer_share_an_interpreter():
    a_sandbox().close()
    environment = Python()
    tools = index_tools(environment.tools)
    codes = [f"x{i} = {i}" for i in range(4)]
    calls = [{"function": {"name": "python", "arguments": {"code": code}}} for code in codes]
    assert not [call.error for call in run_calls({"tool_calls": calls}, tools) if call.error]
    assert environment.python("x0 + x1 + x2 + x3") == "6"
    environment.close()


def test_without_a_sandbox_python_does_not_begin(tmp_path):
    words = "--environment python --environment.sandbox none --steps 1"
    with pytest.raises(UserError, match="sandbox mode 'none' is unknown|no sandbox"):
        train(f"grpo {SMALL} {words}", tmp_path / "run")


BUILT_IN = {"calculator": "--environment.digits 1", "python": "", "search": ""}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_environments_run(name, tmp_path):
    if name == "search":
        pytest.importorskip("bm25s")
    if name == "python":
        a_sandbox()
    words = f"--environment {name} {BUILT_IN[name]} --steps 1 --max-turns 2 --eval-every 0"
    rows = train(f"grpo {SMALL} {words}", tmp_path)
    (row,) = [row for row in rows if "progress/batch" in row]
    assert row["env/all/total_episodes"] == 9 and row["reward/failed"] == 0
    assert "env/all/used_tool" in row


# ------------------------------------------------------------------------------- command-line flags


def settings_of(words: str, tmp_path: Path, recipe: str | None = None):
    if recipe is not None:
        (tmp_path / "r.yaml").write_text(textwrap.dedent(recipe))
        words = f"{tmp_path / 'r.yaml'} {words}"
    stages = read_run(words.split(), METHODS, RECIPE, RunSettings).stages
    return [stage.settings for stage in stages]


def test_settings_of_environments_on_the_line_and_in_recipes(tmp_path):
    (first,) = settings_of(
        "grpo --environment calculator --environment.digits 4 --environment.without-tool", tmp_path
    )
    assert first.env.environment == "calculator"
    assert dict(first.env.environment_settings) == {"digits": "4", "without_tool": "True"}
    recipe = """
        stages:
          - method: sft
            steps: 3
          - method: grpo
            environment: {name: calculator, digits: 5, operations: "+-"}
            max_turns: 4
    """
    sft, grpo = settings_of("--environment.digits 2", tmp_path, recipe)
    assert not hasattr(sft, "env") and grpo.env.max_turns == 4
    # the command line takes precedence
    assert dict(grpo.env.environment_settings) == {"digits": "2", "operations": "+-"}
    for words, text in (
        ("grpo --max-turns 4", "max-turns 4 has no effect"),
        ("grpo --environment.digits 4", "no environment is set"),
        ("sft --environment calculator", "no such setting"),
    ):
        with pytest.raises(SettingsError, match=text):
            settings_of(words, tmp_path)
    with pytest.raises(SettingsError, match="environment has no `name:`"):
        settings_of("", tmp_path, "method: grpo\nenvironment: {digits: 3}\n")


def test_later_sources_of_environment_settings_win(tmp_path):
    """A flag for all stages replaces the recipe's settings; a flag for a single stage
    adds to them.
    """
    recipe = """
        stages:
          - {method: grpo, environment: {name: calculator, digits: 4}, max_turns: 4}
    """
    for more, operations in (
        ("", ()),
        (" --grpo.environment.operations +", (("operations", "+"),)),
    ):
        (first,) = settings_of(f"--environment-settings digits 5{more}", tmp_path, recipe)
        assert first.env.environment_settings == (("digits", "5"), *operations)


def test_a_stages_own_environment_settings_without_effect_are_an_error(tmp_path):
    """A flag for all stages does not affect a stage without an environment. A setting of that stage
    itself has no effect there, so it is an error, with or without the flag.
    """
    recipe = """
        stages:
          - method: grpo
            name: tools
            environment: calculator
            max_turns: 4
          - {method: grpo, name: plain}
    """
    tools, plain = settings_of("--environment.digits 2", tmp_path, recipe)
    assert tools.env.environment_settings == (("digits", "2"),)
    assert plain.env.environment_settings == ()
    reference = recipe.replace("name: plain", "name: plain, environment.digits: 4")
    for words in ("", "--environment.digits 2"):
        with pytest.raises(SettingsError, match="stage plain: .*no environment is set"):
            settings_of(words, tmp_path, reference)


def test_help_shows_an_environments_settings(capsys):
    from rl.envs import show_help

    shown = {"options": RunSettings, "environments": show_help}
    with pytest.raises(SystemExit):
        parse_run(["grpo", "--environment", "calculator", "--help"], METHODS, RECIPE, **shown)
    text = capsys.readouterr().out
    assert "--environment.digits INT" in text and "Most digits of each number" in text
    assert "--group-size" in text
    with pytest.raises(SystemExit):
        parse_run(["--help"], METHODS, RECIPE, **shown)
    assert "calculator" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "text"), [
    ("--environment calculater", "did you mean 'calculator'"),
    ("--environment calculator --environment.digits many", "many is not INT"),
    ("--environment calculator --environment.digits 0", "digits must be from 1"),
    ("--environment calculator --dataset openai/gsm8k", "reads no data set"),
    ("--environment calculator --reward gsm8k", "would have no effect"),
    ("--environment nothing.py:Mine", "does not exist"),
    ("--environment search --environment.corpus a.txt", "needs questions"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_written(tmp_path, words, text):
    with pytest.raises(UserError, match=text):
        train(f"grpo {SMALL} {words} --steps 1", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", ["return None", "return [1]", "raise KeyError('lost')"])
def test_rows_that_an_environment_fails_to_make_are_an_error(tmp_path, code):
    (tmp_path / "rows.py").write_text(
        "from rl.envs import Environment\n"
        f"class Rows(Environment):\n    def rows(self, split, count): {code}\n"
    )
    with pytest.raises(UserError, match=r"makes no rows of the split train \("):
        train(f"grpo {SMALL} --environment {tmp_path}/rows.py:Rows --steps 1", tmp_path / "run")


# ----------------------------------------------------------------------------- docs/environments.md


def test_the_pages_example_runs(tmp_path, monkeypatch):
    """Run the file and the script of docs/environments.md unchanged, against scripted answers."""
    blocks = [b for b in blocks_of(REPO / "docs" / "environments.md") if b.language == "python"]
    written = {block.file or "script": block.text for block in blocks}
    assert len([line for line in written["hunt.py"].splitlines() if line.strip()]) <= 30
    (tmp_path / "hunt.py").write_text(written["hunt.py"])
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("tiny:ascii")

    def say(prompt, turn, stream, member):
        call = {"name": "larger", "arguments": {"number": turn + 1}}
        if turn == 0:
            return "0"
        # the first number that the secret does not exceed
        asks = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return str(turn) if prompt.endswith("no") else asks

    names = {
        "renderer": get_renderer("plain", tokenizer),
        "sampling_client": ScriptedSampler(tokenizer, say),
        "params": SamplingParams(max_tokens=100, temperature=1.0),
    }
    # the page's model, renderer and parameters are replaced by the ones above
    lines = written["script"].splitlines()
    replaced = ("client =", *(f"{name} =" for name in names))
    script = "\n".join(line for line in lines if not line.startswith(replaced))
    exec(compile(script, "script", "exec"), names)
    episodes = [episode for group in names["episodes"] for episode in group.trajectories_G]
    assert len(episodes) == 8
    for episode in episodes:
        last = episode.transitions[-1]
        assert episode.transitions[0].reward == -0.1 and last.reward == 1.0
        assert last.metrics["correct"] == 1.0 and last.metrics["tool/malformed"] == 0
