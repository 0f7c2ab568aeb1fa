"""Test offline RL: rows in every format, datums by hand, the Q-loss in float64, and learning."""

import gzip
import json
import shutil

import learning
import numpy as np
import pytest
import torch
from whole_runs import RECIPE, train

from rl import ServiceClient
from rl.algorithms import METHODS, Models, Offline, check_stored_answer
from rl.algorithms.offline import OfflineOptions, OfflineSettings
from rl.config import RunSettings, parse_run
from rl.data import ProblemSet, filter_answers, load_rollouts
from rl.errors import UserError
from rl.losses import get_loss
from rl.renderers import get_renderer
from rl.trainer import execute as run
from rl.trainer import make_renderer
from rl.trainer.batch_log import BatchLog
from rl.types import Problem, StoredAnswer

# --------------------------------------------------------------------------------------------- rows


def make_row(group=0, reward=1.0, tokens=(4, 6, 12), logprobs=(-0.5, -0.25, -0.125), **more):
    """Return a row as a run writes it."""
    return {
        "group": group, "index": 0, "tag": "addition", "problem": 7 + group, "prompt": "12+34=",
        "response": "46", "reward": reward, "prompt_tokens": [1, 2, 10, 3, 4, 11],
        "response_tokens": list(tokens), "logprobs": list(logprobs), "temperature": 1.0, **more,
    }  # fmt: skip


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_runs_own_rows_are_grouped_as_they_were_sampled(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    write(folder / "step_000001.jsonl", make_row(0), make_row(0, reward=0.0), make_row(1))
    write(folder / "step_000002.jsonl", make_row(0, reward=0.5))
    (folder / "step_000002.html").write_text("a page")
    write(folder / "grpo-eval-000002.jsonl", make_row(7))  # held-out answers are not trained on
    write(folder / "grpo-eval-greedy-000002.jsonl", make_row(7))
    problems = load_rollouts(tmp_path / "run")
    assert [[a.reward for a in p.answers] for p in problems] == [[1.0, 0.0], [1.0], [0.5]]
    answer = problems[0].answers[0]
    assert (answer.tokens, answer.logprobs, answer.temperature, answer.text) == (
        (4, 6, 12), (-0.5, -0.25, -0.125), 1.0, "46",
    )  # fmt: skip
    assert answer.place == "step_000001.jsonl line 1"
    assert [p.answers for p in load_rollouts(folder)] == [p.answers for p in problems]
    assert len(load_rollouts(folder, limit=2)) == 2


def test_rows_with_tokens_and_no_group_are_grouped_by_their_prompt(tmp_path):
    rows = [
        {"prompt_tokens": prompt, "response_tokens": [3], "reward": reward}
        for prompt, reward in (([1, 2], 1.0), ([9], 0.25), ([1, 2], 0.0))
    ]
    problems = load_rollouts(write(tmp_path / "rows.jsonl", *rows))
    assert [[a.reward for a in p.answers] for p in problems] == [[1.0, 0.0], [0.25]]


def test_published_shapes(tmp_path):
    solved = {
        "big": {"solution": "s", "is_correct": True},
        "small": {"solution": "t", "is_correct": "False"},
    }
    rows = [
        {"prompt": "a?", "response": "x", "reward": 0.5},
        {"prompt": "b?", "response": "y", "reward": True, "level": 3},
        {"prompt": "a?", "response": "z", "reward": "false"},
        {"question": "c?", "code": ["p", "q"], "score": [True, False]},
        {"question": "d?", "ground_truth": "G", **solved},
        {"prompt": "e?", "response": "w", "reward": 1, "source": {"solution": "u"}},
    ]
    problems = load_rollouts(write(tmp_path / "rows.jsonl", *rows), system_prompt="Think.")
    assert [[(a.text, a.reward) for a in p.answers] for p in problems] == [
        [("x", 0.5), ("z", 0.0)], [("y", 1.0)], [("p", 1.0), ("q", 0.0)], [("s", 1.0), ("t", 0.0)],
        [("w", 1.0)],
    ]  # fmt: skip
    assert [m["content"] for m in problems[2].messages] == ["Think.", "c?"]
    assert problems[1].meta == {"level": 3} and problems[3].meta == {"ground_truth": "G"}
    columns = {"prompt_column": "q", "response_column": "texts", "reward_column": "points"}
    named = {"q": "a?", "texts": ["x"], "points": [2], "score": [9]}
    (problem,) = load_rollouts(write(tmp_path / "named.jsonl", named), **columns)
    assert [(a.text, a.reward) for a in problem.answers] == [("x", 2.0)]


@pytest.mark.parametrize(("row", "says"), [
    ("{", "no JSON"),
    ({"response": "x", "reward": 1},
     "no column of prompt, question, problem, instruction.*--prompt-column"),
    ({"prompt": "a", "response": "x"}, "no column of reward.*--reward-column"),
    ({"prompt": "a", "response": ["x", "y"], "reward": [1]},
     "'response' has 2 answers and 'reward' 1 rewards"),
    ({"prompt": "a", "response": "x", "reward": "good"},
     "'reward' is a number or a truth value, this is 'good'"),
    ({"prompt": "a", "response": "x", "reward": float("nan")}, "'reward' is a number"),
    ({"prompt": "a", "response": 3, "reward": 1}, "'response' has the type int, text is expected: '3'"),
    (make_row(tokens=[]), "'response_tokens' is a list of one or more token ids"),
    (make_row(logprobs=[-1.0]), "'logprobs' has one number for each of the 3"),
    ({"prompt": "a", "m": {"solution": "x", "is_correct": None}},
     "'m.is_correct' is a number or a truth value"),
])  # fmt: skip
def test_bad_rows_are_named_with_file_and_line(row, says, tmp_path):
    path = write(tmp_path / "rows.jsonl", make_row(), row)
    with pytest.raises(UserError, match=f"(?s)rows.jsonl line 2: .*{says}"):
        load_rollouts(path)
    assert len(load_rollouts(path, on_bad_row="skip")) == 1


def test_published_files(shared_data):
    file = shared_data / "rollouts" / "qwen25math" / "math_cot_100.jsonl"
    maths, rows = load_rollouts(file), [json.loads(line) for line in file.read_text().splitlines()]
    assert [sum(a.reward for a in p.answers) for p in maths] == [sum(row["score"]) for row in rows]
    assert all(len(p.answers) == 8 for p in maths)
    assert maths[3].answers[2].text == rows[3]["response"][2]
    file = shared_data / "gsm8k" / "example_model_solutions.jsonl"
    grade, text = load_rollouts(file), file.read_text()
    assert sum(len(p.answers) for p in grade) == 4 * len(text.splitlines()) == 4 * 1319
    assert sum(a.reward for p in grade for a in p.answers) == text.count('"is_correct": true')


def test_a_published_file_is_trained_on_as_it_is(shared_data, tmp_path, capsys):
    data = shared_data / "gsm8k" / "example_model_solutions.jsonl"
    model = f"--base-model tiny:chat --tokenizer {shared_data / 'tokenizers' / 'minimind_6400'}"
    options = f"--train-limit 3 --steps 1 --batch-size 2 --output-dir {tmp_path / 'run'}"
    words = f"offline --dataset {data} {model} {options}"
    run.execute(parse_run(words.split(), METHODS, RECIPE, options=RunSettings))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(row["optim/kl_behaviour_v1"]) < 1e-5
    assert row["optim/tokens"] > 500
    assert row["progress/epoch"] == pytest.approx(2 / 3)
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert "The stored answers have no logprobs: the initial policy scores them" in text


def test_a_gzipped_file_and_nothing_at_all(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "a?", "response": "x", "reward": 1}))
    assert len(load_rollouts(tmp_path / "rows.jsonl.gz")) == 1
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for path, says in (
        (tmp_path / "outer", r"outer holds no rollouts \(.jsonl\) \(only folders: inner\)"),
        (tmp_path / "empty", "holds no rollouts"),
        (tmp_path / "absent", "do not exist"),
    ):
        with pytest.raises(UserError, match=says):
            load_rollouts(path)


def make_stored_problem(*rewards, **more):
    return Problem(
        [{"role": "user", "content": "12+34="}],
        answers=tuple(StoredAnswer(r, "46", place="here", **more) for r in rewards),
    )


@pytest.mark.parametrize(("top_fraction", "threshold", "kept"), [
    (0.25, None, [[0.9], [1.0]]),
    (0.01, None, [[1.0]]),
    (0.5, None, [[0.9, 0.5], [1.0, 0.5]]),
    (1.0, None, [[0.9, 0.1, 0.5], [0.2, 1.0, 0.5], [0.0, 0.0]]),
    (None, 0.5, [[0.9, 0.5], [1.0, 0.5]]),
])  # fmt: skip
def test_filters_keep_the_best_and_their_ties(top_fraction, threshold, kept):
    rewards = ((0.9, 0.1, 0.5), (0.2, 1.0, 0.5), (0.0, 0.0))
    problems = ProblemSet([make_stored_problem(*each) for each in rewards])
    result = filter_answers(problems, top_fraction, threshold)
    assert [[a.reward for a in p.answers] for p in result] == kept
    assert [p.index for p in result] == list(range(len(kept)))


@pytest.mark.parametrize("percent", [7, 28, 29, 55])
def test_a_top_fraction_of_100_different_answers_is_a_percentage(percent):
    problems = ProblemSet([make_stored_problem(*map(float, range(100)))])
    (kept,) = filter_answers(problems, percent / 100, None)
    assert len(kept.answers) == percent


def test_a_filter_that_keeps_nothing_says_what_there_was():
    with pytest.raises(UserError, match="reward of 2 or more; the best has 0.9"):
        filter_answers(ProblemSet([make_stored_problem(0.9)]), None, 2.0)


# ------------------------------------------------------------------------------------------- datums


class Policy:
    """Stand-in for a client with a value head."""

    def compute_values(self, inputs):
        results = [np.cumsum(item.to_ints()).astype(np.float32) for item in inputs]
        return type("Future", (), {"result": lambda _: results})()


class FakeReferencePolicy:
    def __init__(self):
        self.requests_seen = 0

    def logprobs(self, datums, temperature):
        self.requests_seen += len(datums)
        targets = [d.loss_fn_inputs["target_tokens"].array.astype(np.float32) for d in datums]
        return [-0.01 * temperature * tokens for tokens in targets]


def datums_of(rows, **options):
    beginning = FakeReferencePolicy()
    renderer = get_renderer("plain", DigitTokenizer())
    method = Offline(OfflineSettings(offline=OfflineOptions(**options)))
    models = Models(Policy(), {"beginning": lambda: beginning})
    return method.build_datums(rows, renderer, models, 0), beginning


class DigitTokenizer:
    """A tokenizer of digits, "+" (10) and "=" (11); 12 is the end token."""

    eos_token_id, bos_token_id = 12, None

    def encode(self, text, add_special_tokens=False):
        return ["0123456789+=".index(c) for c in text]


TOKENS = {"prompt_tokens": (1, 2), "tokens": (3, 4), "logprobs": (-0.5, -0.7)}


def fields(datum, *names):
    return [datum.loss_fn_inputs[name].array.tolist() for name in names]


def test_group_baseline_and_stored_or_scored_behaviour():
    row = Problem(
        [{"role": "user", "content": "1+"}],
        answers=(StoredAnswer(1.0, **TOKENS), StoredAnswer(0.25, "34")),
    )
    (exact, scored), beginning = datums_of([row], loss="dro")
    assert exact.model_input.to_ints() == [1, 2, 3]
    names = ("target_tokens", "mask", "advantages", "logprobs")
    *labels, logprobs = fields(exact, *names)
    assert labels == [[2, 3, 4], [0, 1, 1], [0, 0.375, 0.375]]
    assert logprobs == pytest.approx([0, -0.5, -0.7])
    *labels, logprobs = fields(scored, *names)
    assert labels == [[10, 3, 4, 12], [0, 1, 1, 1], [0, -0.375, -0.375, -0.375]]
    assert logprobs == pytest.approx([0, -0.03, -0.04, -0.12]) and beginning.requests_seen == 1
    text = Offline(OfflineSettings()).describe_data([row], None)
    assert text is not None and text.startswith(
        "1 of 2 stored answers have no logprobs: the initial policy scores them"
    )
    assert "baseline" not in text
    best = OfflineSettings(offline=OfflineOptions(loss="bc", top_fraction=0.5))
    assert Offline(best).describe_data([row], None) is None


def test_problems_whose_group_baseline_leaves_no_advantage_are_counted():
    equal = [Problem([], answers=(StoredAnswer(1.0, **TOKENS),) * n) for n in (1, 2)]
    mixed = Problem([], answers=tuple(StoredAnswer(reward, **TOKENS) for reward in (0.0, 1.0)))
    text = Offline(OfflineSettings()).describe_data(equal, None)
    assert text is not None and text.startswith("2 of 2 problems have a single stored answer")
    text = Offline(OfflineSettings()).describe_data([*equal, mixed], None)
    assert text is not None and text.startswith("2 of 3 problems")
    for options in ({"baseline": "learned"}, {"baseline": "none"}, {"loss": "ilql"}):
        settings = OfflineSettings(offline=OfflineOptions(**options))
        assert Offline(settings).describe_data(equal, None) is None


@pytest.mark.parametrize(("options", "expected"), [
    # values of the prefixes (1), (1, 2), (1, 2, 3) are 1, 3, 6; those before the two actions are 3
    # and 6
    ({"loss": "importance_sampling", "baseline": "learned"},
     {"advantages": [0, 7, 4], "returns": [0, 10, 10]}),
    # the first action leads to the value 6 of (1, 2, 3), discounted; the last leads to the final
    # reward
    ({"loss": "ilql", "gamma": 0.5},
     {"returns": [0, 3, 10], "advantages": [0, 0, 4], "logprobs": [0, -0.5, -0.7]}),
    ({"loss": "bc", "reward_threshold": 1.0}, {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]}),
])  # fmt: skip
def test_the_fields_of_a_stored_answer_by_hand(options, expected):
    row = Problem([], answers=(StoredAnswer(10.0, **TOKENS),))
    (datum,), beginning = datums_of([row], **options)
    assert beginning.requests_seen == 0
    for name, values in expected.items():
        assert fields(datum, name) == [pytest.approx(values)]
    assert options["loss"] != "bc" or set(datum.loss_fn_inputs) == set(expected)


# ------------------------------------------------------------------------------------------- Q-loss


def test_q_loss_is_the_formula_over_all_of_q():
    """Check Q(s, a) = V(s) + tau log (pi / pi_b)(a | s), over the vocabulary in float64."""
    torch.manual_seed(0)
    steps, vocabulary = 7, 5
    tau, cql, c, kappa = 0.3, 0.7, 0.4, 0.8
    logits = torch.randn(steps, vocabulary, dtype=torch.float64, requires_grad=True)
    values = torch.randn(steps, dtype=torch.float64, requires_grad=True)
    actions = torch.randint(0, vocabulary, (steps,))
    old, returns = torch.randn(steps).double(), torch.randn(steps).double()
    behaviour = torch.log_softmax(torch.randn(steps, vocabulary).double(), -1)
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1]).double()
    expected = torch.zeros((), dtype=torch.float64)
    for t in range(steps):
        if not mask[t]:
            continue
        v = values[t].detach()
        q = v + tau * (torch.log_softmax(logits[t], -1) - behaviour[t])
        soft = tau * torch.logsumexp(q / tau + behaviour[t], -1)
        assert (soft - v).abs() < 1e-12  # the soft value of Q is V
        # the TD error of Q against its target, both computed from the old value
        td = returns[t] - (old[t] + q[actions[t]] - v)
        conservative = soft - q[actions[t]]
        u = returns[t] - values[t]
        share = kappa if u > 0 else 1 - kappa
        expected = expected + (td**2 / 2 + cql * conservative) / tau + c * share * u**2
    target = torch.autograd.grad(expected, (logits, values))
    logp = torch.log_softmax(logits, -1).gather(1, actions[:, None])[:, 0]
    drew = behaviour.gather(1, actions[:, None])[:, 0]
    inputs = {
        "mask": mask, "values": values, "returns": returns, "advantages": returns - old,
        "logprobs": drew,
    }  # fmt: skip
    config = {"tau": tau, "cql_coef": cql, "value_coef": c, "expectile": kappa}
    loss, metrics = get_loss("ilql").fn(logp, logp, inputs, torch.tensor([0, 3, steps]), config)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["active_tokens:sum"] == 5
    for result, right in zip(torch.autograd.grad(loss, (logits, values)), target, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------- whole runs


def mixed_answers(path, copies: int = 8):
    rng = np.random.default_rng(0)
    rows = []
    for a in range(10):
        for b in range(10):
            wrong = [d for d in range(10) if d != max(a, b)]
            answers = [max(a, b)] * (copies // 4)
            answers += [int(rng.choice(wrong)) for _ in range(copies - len(answers))]
            rows.append({"prompt": f"{a}+{b}=", "response": [str(x) for x in answers],
                         "reward": [float(x == max(a, b)) for x in answers]})  # fmt: skip
    return write(path, *(rows[i] for i in rng.permutation(len(rows))))


def of_it(folder):
    """Write the same problems as prompts with reference answers."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(max(a, b))} for a in range(10) for b in range(10)]
    folder.mkdir()
    write(folder / "test.jsonl", *rows)
    return folder


LOSSES = {
    "bc --reward-threshold 1": 50, "bc --top-fraction 0.25": 50, "importance_sampling": 50,
    "dro": 50, "dro --baseline learned": 50,
    # the value of a token must first propagate to the token before it
    "ilql --schedule linear": 300,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.campaign
def test_it_improves_on_the_behaviour_policy_from_mixed_rollouts(tmp_path):
    """The behaviour policy is cloned first, so its score is known: a quarter. Every loss then
    continues from its weights.
    """
    data, request = mixed_answers(tmp_path / "answers.jsonl"), of_it(tmp_path / "asked")
    often = "--reward exact_match --max-tokens 3 --batch-size 25 --save-every 0"
    words = f"offline --dataset {data} --eval-dataset {request} {often}"
    clone = "--loss bc --top-fraction 1 --steps 120 --learning-rate 2e-3 --eval-every 120"
    behaviour = train(f"{words} {clone} --warmup-steps 10", tmp_path / "clone")[-1][
        "test/env/all/correct"
    ]
    learning.check_figure("accuracy of the behaviour", behaviour, above=0.15)
    learning.check_figure("accuracy of the behaviour, at most", behaviour, below=0.4)
    model = tmp_path / "clone" / "checkpoints" / "offline-final" / "model"
    for i, (loss, steps) in enumerate(LOSSES.items()):
        more = f"--base-model {model} --learning-rate 1e-3 --steps {steps} --eval-every {steps}"
        rows = train(f"{words} --loss {loss} {more}", tmp_path / str(i))
        after = rows[-1]["test/env/all/correct"]
        learning.check_figure(f"accuracy after {loss}", after, above=0.7)


@pytest.mark.slow
def test_a_runs_rollouts_are_learnt_from_token_for_token(tmp_path):
    """At the weights that sampled them, the stored logprobs equal the learner's."""
    words = "--batch-size 8 --max-tokens 4 --learning-rate 1e-12 --eval-every 0"
    options = "--group-size 4 --steps 2 --rollouts-every 1 --temperature 0.7"
    train(f"grpo {words} {options}", tmp_path / "run")
    options = f"--steps 2 --dataset {tmp_path / 'run'} --temperature 0.7"
    for row in train(f"offline {words} {options}", tmp_path / "offline"):
        assert abs(row["optim/kl_behaviour_v1"]) < 1e-5 and row["optim/kl_behaviour_v2"] < 1e-8
    with pytest.raises(UserError, match="sampled at temperature 0.7.*set --temperature 0.7"):
        train(f"offline {words} --steps 1 --dataset {tmp_path / 'run'}", tmp_path / "other")


STAGES = """
stages:
  - {method: grpo, base_model: "tiny:addition", steps: 2, rollouts_every: 1, learning_rate: 1e-12}
  - {method: grpo, steps: 1, rollouts_every: 1, learning_rate: 0.1}
  - {method: offline, base_model: "tiny:addition", dataset: grpo-1, steps: 4, save_every: 2, loss: dro}
batch_size: 8
group_size: 4
max_tokens: 4
learning_rate: 1e-2
temperature: 1.0
eval_every: 0
"""


@pytest.mark.slow
def test_a_stage_learns_from_the_rollouts_of_an_earlier_one(tmp_path):
    """The stage learns only from the rollouts of that stage, also after a resume."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(STAGES)
    whole = train(str(recipe), tmp_path / "whole")
    rows = [row for row in whole if row["stage"] == "offline"]
    # the two steps of grpo-1 used 8 of the 16 problems
    assert rows[0]["progress/epoch"] == 0.5
    # the weights that sampled these rows are nearly this stage's initial weights: grpo-1 hardly
    # moved
    assert abs(rows[0]["optim/kl_behaviour_v1"]) < 1e-5 < 1e-3 < rows[-1]["optim/kl_behaviour_v2"]

    write_row = BatchLog.write_row

    def cut(self, done, metrics):
        if self.context.name == "offline" and done == 3:
            raise InterruptedError
        write_row(self, done, metrics)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(BatchLog, "write_row", cut)
        train(str(recipe), tmp_path / "cut")
    assert train(f"{recipe} --resume", tmp_path / "cut") == whole
    # a finished run no longer needs the rollouts; an unfinished run names the missing ones instead
    # of learning from the rest
    (tmp_path / "cut" / "rollouts" / "step_000001.jsonl").unlink()
    assert train(f"{recipe} --resume", tmp_path / "cut") == whole
    listed = tmp_path / "cut" / "checkpoints.jsonl"
    rows = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(row for row in rows if "offline-final" not in row))
    # otherwise the list would be rebuilt from this checkpoint
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "offline-final")
    says = "lacks the rollouts of 1 of the 2 steps asked for .step 1 first"
    with pytest.raises(UserError, match=says):
        train(f"{recipe} --resume", tmp_path / "cut")


@pytest.mark.parametrize(("old", "new", "says"), [
    ("grpo-1", "gpro",
     "stage offline: stored rollouts gpro do not exist .* earlier stages that sample: "
     "grpo-1, grpo-2"),
    ("grpo-1", "offline", "stored rollouts offline do not exist"),
    ("grpo-1", "''", "offline needs stored answers: .* the name of an earlier stage"),
    ("steps: 2, rollouts_every: 1", "steps: 2, rollouts_every: 0",
     "of stage grpo-1, which stores none: set its rollouts_every"),
    ("steps: 2,", "steps: 2, temperature: 0.7,",
     "sampled at temperature 0.7, .* score them at 1: give stage offline temperature: 0.7"),
    ("method: grpo, base_model", "name: grpo-1, method: sft, base_model",
     "of stage grpo-1, but sft samples no answers"),
])  # fmt: skip
def test_an_earlier_stage_without_usable_rollouts_is_named_before_it_runs(old, new, says, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    text = STAGES.replace(old, new, 1)
    recipe.write_text(text)
    with pytest.raises(UserError, match=f"(?s){says}"):
        train(str(recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_answers_that_cannot_be_learnt_are_named(tmp_path):
    with ServiceClient(output_dir=tmp_path) as service:
        policy = service.create_full_training_client("tiny:addition")
        renderer = make_renderer(policy, None)
        for answer, says in (
            ({"prompt_tokens": (1,), "tokens": (99,)},
             "a line: token 99 is outside the policy's vocabulary of 14 tokens"),
            ({"text": "ten"}, "tokenizer has no tokens for some of the text .*ten.*: use a model"),
            ({"text": "1" * 600},
             "a line: prompt and answer take 60. tokens, .* context holds 512"),
        ):  # fmt: skip
            answer = StoredAnswer(1.0, **answer, place="a line")
            row = Problem([{"role": "user", "content": "1+1="}], answers=(answer,))
            with pytest.raises(UserError, match=says):
                check_stored_answer(OfflineSettings(), policy.info, renderer, row, answer)


@pytest.mark.parametrize(("words", "says"), [
    ("offline", "offline needs stored answers: --dataset"),
    ("offline --dataset nowhere", "stored rollouts nowhere do not exist"),
    ("offline --loss bc", "loss bc needs either --top-fraction"),
    ("offline --top-fraction 0.1", "other losses neither"),
    ("offline --tau 0 --loss ilql", "tau is at least 1e-06"),
    ("offline --more-datasets x",
     "--more-datasets x has no effect: stored answers are read from a single dataset"),
])  # fmt: skip
def test_misuse_is_named_before_anything_is_written(words, says, tmp_path, capsys):
    with pytest.raises((UserError, SystemExit)) as caught:
        train(f"{words} --steps 1", tmp_path / "run")
    text = " ".join((str(caught.value) + capsys.readouterr().err).replace("│", " ").split())
    assert says in text and not (tmp_path / "run").exists()
