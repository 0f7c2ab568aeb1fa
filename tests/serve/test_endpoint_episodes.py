"""Test `--environment endpoint`: the run and end of programs, and the tokens that are trained."""

import datetime
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import pytest
from scripted import ScriptedSampler
from serving import until

import rl
from rl.config import SettingsError
from rl.envs import EpisodeLimits, parse_environment, resolve_environment
from rl.errors import UserError
from rl.models import load_tokenizer
from rl.processes import SupervisedProcess
from rl.programs.program_rollout import LiveEndpoint, ProgramEpisode, get_live_endpoint
from rl.renderers import get_renderer
from rl.rollout import EpisodeFailed, rollout, trajectory_to_datums
from rl.types import Problem, SamplingParams

# Shared by the programs below. It imports only the standard library, and little of it: every
# program starts an interpreter.
HEAD = """
import http.client, json, os, sys, time
host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
def post(path, body):
    http_ = http.client.HTTPConnection(host, timeout=60)
    http_.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = http_.getresponse()
    return reply.status, json.loads(reply.read())
def ask(messages, **more):
    return post(f"/{path}/chat/completions", {"model": "gpt-4o-mini", "messages": messages, **more})
def answer(messages, **more):
    return ask(messages, **more)[1]["choices"][0]["message"]["content"]
def score(reward, **metrics):
    post("/" + os.environ["WHETSTONE_REWARD_URL"].removeprefix("http://").partition("/")[2], {"reward": reward, "metrics": metrics})
def user(text):
    return {"role": "user", "content": text}
def said(text):
    return {"role": "assistant", "content": text}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny:ascii")


def make_group(spec, problem, tokenizer, members=1, limits=None, prompt=None):
    renderer = get_renderer("plain", tokenizer)
    settings = {"limits": limits or EpisodeLimits(seconds=20.0), "system_prompt": prompt}
    return spec.make_token_level_group(problem, members, renderer, **settings)


@pytest.fixture
def play(tmp_path, tokenizer):
    """Return a function that runs a program per row, with `say` as the sampler."""

    def play(programs, say=lambda *_: "ok", *, limits=None, members=1, prompt=None, sampler=None,
             max_tokens=16, **settings):  # fmt: skip
        groups = []
        for i, program in enumerate(programs):
            file = tmp_path / f"program{i}.py"
            file.write_text(HEAD + textwrap.dedent(program))
            command = f"{sys.executable} -S {file}"
            spec = resolve_environment("endpoint", program=command, **settings)
            row = {"seed": 100 + i, "answer": "42", "question": "what is {seed}?"}
            problem = Problem((), row, tag="endpoint", index=i)
            groups.append(make_group(spec, problem, tokenizer, members, limits, prompt))
        sampler = sampler or ScriptedSampler(tokenizer, say)
        result = rollout(groups, sampler, SamplingParams(max_tokens=max_tokens), seed=1)
        play.requests_seen = [tokenizer.decode(prompt) for prompt in sampler.requests_seen]
        return result

    return play


@pytest.mark.parametrize("mode", ["raises", "cancelled"])
def test_a_program_does_not_outlive_its_task(monkeypatch, tokenizer, mode):
    started = []

    class RecordedProcess(SupervisedProcess):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self.pid)

    def fail(timer):
        raise OSError("no timer")

    monkeypatch.setattr("rl.programs.program_rollout.SupervisedProcess", RecordedProcess)
    if mode == "raises":
        monkeypatch.setattr("rl.programs.program_rollout._ProgramTimer.start", fail)
    endpoint, renderer = LiveEndpoint(), get_renderer("plain", tokenizer)
    episode = ProgramEpisode(renderer, EpisodeLimits(seconds=60), None, True)
    try:
        endpoint.episodes.running[episode.name] = episode
        program = endpoint._run_program(episode, ["sleep", "1000"], {**os.environ})
        task = endpoint.server.run_coroutine(program)
        assert until(lambda: started, 20)
        if mode == "cancelled":
            task.cancel()
        else:
            end = episode.events.get(timeout=20)
            assert end.code is None and end.output == "no timer"
        assert until(lambda: not Path(f"/proc/{started[0]}").exists(), 20)
    finally:
        endpoint.server.close()


TALK = """
    messages = [user("begin")]
    for i in range(3):
        messages += [said(answer(messages)), user(f"go {i}")]
    score(0.25 + len(messages), depth=7)
"""


def test_a_program_is_an_episode(play, tokenizer):
    result = play([TALK], lambda text, *_: f"<{len(text)}>", members=2)
    (group,) = result.groups
    assert not result.errors and group.get_total_rewards() == [7.25, 7.25]
    for trajectory in group.trajectories_G:
        turns = trajectory.transitions
        assert [tokenizer.decode(t.ac.tokens[:-1]) for t in turns] == [
            f"<{len(tokenizer.decode(t.ob.to_ints()))}>" for t in turns
        ]
        assert [t.episode_done for t in turns] == [False, False, True]
        last = turns[-1]
        assert last.metrics["depth"] == 7.0
        assert last.metrics["truncated"] == 0.0
        assert last.metrics["program/requests"] == 3
        asked = [t.logs["new_messages"][-1]["content"] for t in turns]
        assert asked == ["begin", "go 0", "go 1"]
        assert last.logs["response"] == tokenizer.decode(last.ac.tokens[:-1])
        trajectory.advantage = 1.0
        # trained tokens = sampled tokens, in one sequence
        (datum,) = trajectory_to_datums(trajectory)
        mask = datum.loss_fn_inputs["mask"].array.astype(bool)
        drawn = [token for t in turns for token in t.ac.tokens]
        assert datum.loss_fn_inputs["target_tokens"].array[mask].tolist() == drawn
        logprobs = [logprob for t in turns for logprob in t.ac.logprobs]
        assert datum.loss_fn_inputs["logprobs"].array[mask].tolist() == pytest.approx(logprobs)


WRONG = {  # failing programs: (text, message about the episode)
    "crashes": ("answer([user('a')]); raise ValueError('no idea')",
                "exit code 1.*ValueError: no idea"),
    "exits": ("answer([user('a')]); sys.exit(7)", "exit code 7"),
    "never calls": ("score(1.0)", "never called the model: it ended with exit code 0"),
    "dies at once": ("os.kill(os.getpid(), 9)", "never called the model: it was killed by signal 9"),
    "hangs before": ("print('waiting', flush=True); time.sleep(600)",
                     "never called the model: it did not finish within its 5 s.*waiting"),
    "hangs after": ("answer([user('a')]); time.sleep(600)", "did not finish within its 5 s"),
    "prints without end": ("answer([user('a')])\nwhile True: sys.stdout.write('x' * 1000000)",
                           "did not finish within its 5 s"),
    "posts nothing": ("answer([user('a')])", "posted no score"),
    "posts no number": ("answer([user('a')]); score('much')", "posted no score"),
}  # fmt: skip


@pytest.mark.slow
def test_what_goes_wrong_costs_its_own_episode_and_is_named(play):
    """All failing programs run in a batch with two good programs; one prints 100 MB first."""
    loud = "answer([user('a')])\nfor _ in range(100): sys.stdout.write('x' * 1000000)\nscore(3.0)"
    start, wrong = time.monotonic(), [program for program, _ in WRONG.values()]
    result = play([TALK, loud, *wrong], limits=EpisodeLimits(seconds=5.0))
    assert [group.get_total_rewards() for group in result.groups] == [[7.25], [3.0]]
    assert len(result.errors) == len(WRONG)
    for (name, (_, expected)), error in zip(WRONG.items(), result.errors, strict=True):
        assert re.search(expected, error, re.DOTALL), (name, error)
        assert len(error) < 1000 and "of row" in error
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_what_a_program_starts_ends_with_it(play, tmp_path):
    """A daemon in a separate session is killed, both if its program ends and if it hangs."""
    pids = tmp_path / "pids"
    daemon = f"""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
                time.sleep(600)
            os._exit(0)
        time.sleep(0.3)
        answer([user("a")])
        score(1.0)
        time.sleep(SECONDS)
    """
    programs = [daemon.replace("SECONDS", seconds) for seconds in ("0", "600")]
    result = play(programs, limits=EpisodeLimits(seconds=5.0))
    assert len(result.groups) == 1 and "within its 5 s" in " ".join(result.errors)
    remaining = [Path(f"/proc/{line}") for line in pids.read_text().split()]
    assert len(remaining) == 2 and until(lambda: not any(path.exists() for path in remaining), 10)


def test_turns_are_limited_and_the_program_may_come_to_its_end(play):
    counting = """
        given = 0
        while True:
            status, reply = ask([user("more")])
            if status != 200:
                break
            given += 1
        assert reply["error"]["code"] == "episode_over", reply
        score(given)
    """
    # The refusal crashes it: the episode is truncated and gets no reward.
    stubborn = "while True: answer([user('more')])"
    result = play([counting, stubborn], limits=EpisodeLimits(turns=3, seconds=20.0))
    assert not result.errors
    assert [group.get_total_rewards() for group in result.groups] == [[3.0], [0.0]]
    for group in result.groups:
        (trajectory,) = group.trajectories_G
        assert len(trajectory.transitions) == 3 and trajectory.transitions[-1].truncated
        assert trajectory.transitions[-1].metrics["truncated"] == 1.0


@pytest.mark.parametrize("tokens, context", [(60, 4096), (None, 59)])
def test_where_there_is_no_room_the_program_is_told_and_scored(play, tokenizer, tokens, context):
    growing = """
        messages, given = [user("0123456789")], 0
        while True:
            status, reply = ask(messages)
            if status != 200:
                break
            given += 1
            messages += [reply["choices"][0]["message"], user("0123456789")]
        assert reply["error"]["code"] == "context_length_exceeded", reply
        assert ask([user("a")])[0] == 400
        score(given)
    """
    sampler = ScriptedSampler(tokenizer, lambda *_: "ok", max_context=context)
    result = play([growing], limits=EpisodeLimits(tokens=tokens, seconds=20.0), sampler=sampler)
    (group,) = result.groups
    (trajectory,) = group.trajectories_G
    # Each prompt has 10 tokens and each answer 3 (with the end mark): the fourth answer of up to 16
    # tokens would end at 65, beyond 60.
    assert len(trajectory.transitions) == 3
    assert trajectory.transitions[-1].truncated
    assert trajectory.transitions[-1].metrics["context_overflow"] == 1.0
    assert group.get_total_rewards() == [float(len(trajectory.transitions))]


def test_an_overflow_refuses_the_concurrent_requests_too(play, tmp_path):
    sampling = tmp_path / "sampling"
    asking = f"""
        import pathlib, threading
        codes = {{}}
        def enquire(name, text):
            codes[name] = ask([user(text)])[1].get("error", {{}}).get("code")
        lengths = {{"first": 10, "second": 60, "third": 60}}
        threads = [threading.Thread(target=enquire, args=(k, "0" * n)) for k, n in lengths.items()]
        threads[0].start()
        while not pathlib.Path({str(sampling)!r}).exists():
            time.sleep(0.01)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        full = "context_length_exceeded"
        assert codes == {{"first": None, "second": full, "third": full}}, codes
        score(2.0)
    """

    def say(*_):
        sampling.touch()
        (episode,) = get_live_endpoint().episodes.running.values()
        while episode.request_count < 3:  # until all three requests wait
            time.sleep(0.01)
        return "ok"

    result = play([asking], say, limits=EpisodeLimits(tokens=60, seconds=20.0))
    assert not result.errors
    ((trajectory,),) = [group.trajectories_G for group in result.groups]
    assert len(trajectory.transitions) == 1 and trajectory.transitions[-1].truncated
    assert result.groups[0].get_total_rewards() == [2.0]


def test_the_run_says_how_tokens_are_drawn(play):
    asking = "answer([user('a')], temperature=0.2, seed=4, max_tokens=3, stop=['z']); score(1.0)"
    seen = []

    class RecordingSampler(ScriptedSampler):
        def sample_many(self, requests):
            seen.extend(requests)
            return super().sample_many(requests)

    tokenizer = load_tokenizer("tiny:ascii")
    result = play([asking], sampler=RecordingSampler(tokenizer, lambda *_: "k"))
    ((request,), (group,)) = seen, result.groups
    assert request.params.temperature == 1.0
    assert request.params.max_tokens == 3
    assert "z" in request.params.stop
    overruled = group.trajectories_G[0].transitions[-1].logs["overruled"]
    assert overruled == {"temperature": 0.2, "seed": 4}
    strict = (
        "assert ask([user('a')], temperature=0.2)[1]['error']['param'] == 'temperature'; "
        "answer([user('a')]); score(1.0)"
    )
    assert not play([strict], strict=True).errors


def test_an_episode_that_is_discarded_while_it_starts_leaves_nothing(
    tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spec = resolve_environment("endpoint", program="sleep 600")
    (env,) = make_group(spec, Problem((), {}), tokenizer).make_envs()
    env.close()  # by the rollout's thread, before the episode's thread starts the program
    with pytest.raises(EpisodeFailed, match="never called the model"):
        env.initial_observation().result()
    assert not list(tmp_path.glob("whetstone-row-*"))


def test_a_row_of_a_table_may_have_values_that_json_lacks(tokenizer):
    meta = {"on": datetime.date(2026, 11, 28), "raw": b"ab", "score": float("nan"), "n": 2}
    meta["parts"] = [{"on": datetime.date(2026, 11, 29), "n": 1}]
    spec = resolve_environment("endpoint", program="sh {on}")
    group = make_group(spec, Problem((), meta), tokenizer)
    parts = [{"on": "2026-11-29", "n": 1}]
    expected = {"on": "2026-11-28", "raw": "b'ab'", "score": None, "n": 2, "parts": parts}
    assert group.row == expected
    assert group.make_command("row.json") == ["sh", "2026-11-28"]


def test_a_column_seed_that_is_no_number_is_an_ordinary_column(tokenizer):
    spec = resolve_environment("endpoint", program="sh")

    def get_seed(meta):
        return make_group(spec, Problem((), meta, index=3), tokenizer).seed

    assert [get_seed({"seed": seed}) for seed in (7, "7", 7.0)] == [7] * 3
    others = [get_seed({"seed": seed}) for seed in (None, "abc", float("nan"))]
    assert others == [get_seed({})] * 3


@pytest.mark.parametrize("fault", ["no folder", "slow removal"])
def test_a_fault_of_the_disk_is_no_timeout_of_the_program(tokenizer, monkeypatch, fault):
    def fail(**_):
        raise OSError("disk full")

    endpoint, renderer = LiveEndpoint(), get_renderer("plain", tokenizer)
    episode = ProgramEpisode(renderer, EpisodeLimits(seconds=2), None, True)
    if fault == "no folder":
        monkeypatch.setattr("rl.programs.program_rollout.tempfile.mkdtemp", fail)
    else:
        remove = shutil.rmtree
        slow = lambda *options: (time.sleep(2.2), remove(*options))  # noqa: E731
        monkeypatch.setattr("rl.programs.program_rollout.shutil.rmtree", slow)
    try:
        endpoint.begin(episode, ["true"], {})
        end = episode.events.get(timeout=20)
        expected = (None, "disk full") if fault == "no folder" else (0, "")
        assert (end.code, end.output) == expected and not end.timed_out
    finally:
        endpoint.server.close()


def test_a_program_has_its_row_seed_and_arguments_and_no_keys(play, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s")
    monkeypatch.setenv("AGENT_LEVEL", "3")
    program = """
        assert sys.argv[1:] == ["--task", "what is {seed}?", "100", "{unknown}"], sys.argv
        row = json.load(open(os.environ["WHETSTONE_ROW"]))
        assert row["answer"] == "42" and row["seed"] == 100 == int(os.environ["WHETSTONE_SEED"])
        assert os.environ["AGENT_LEVEL"] == "3" and "SECRET_KEY" not in os.environ
        open(os.environ["TMPDIR"] + "/scratch", "w").write("x")
        score(float(answer([user("hi")]) == "ok"))
    """
    arguments = ("--task", "{question}", "{seed}", "{unknown}")
    result = play([program], arguments=arguments, pass_env=("AGENT_*",), prompt="Be kind.")
    assert not result.errors
    assert result.groups[0].get_total_rewards() == [1.0]
    assert play.requests_seen == ["Be kind.hi"]


def test_a_reward_scores_the_last_answer(play):
    program = "answer([user('first')]); answer([user('second')])"
    result = play(
        [program, program + "; score(9.0)"],
        lambda text, *_: "42" if "second" in text else "1",
        grader="exact_match",
    )
    assert not result.errors
    assert [group.get_total_rewards() for group in result.groups] == [[1.0], [1.0]]
    assert result.groups[1].trajectories_G[0].transitions[-1].metrics["posted"] == 9.0


def test_answers_that_are_asked_for_side_by_side(play):
    """A request with n=3 and requests from several threads each become a turn, and none is lost."""
    program = """
        import threading
        status, reply = ask([user("a")], n=3, logprobs=True, return_token_ids=True)
        assert len(reply["choices"]) == 3, reply
        assert ask([user("a")], logprobs=True, top_logprobs=2)[0] == 400
        found = []
        threads = [threading.Thread(target=lambda i=i: found.append(answer([user(f"b{i}")]))) for i in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        score(len(found))
    """
    result = play([program])
    assert not result.errors and result.groups[0].get_total_rewards() == [4.0]
    (trajectory,) = result.groups[0].trajectories_G
    assert len(trajectory.transitions) == 7
    assert sorted(play.requests_seen) == ["a"] * 3 + ["b0", "b1", "b2", "b3"]
    trajectory.advantage = 1.0
    assert len(trajectory_to_datums(trajectory)) == 7


def test_a_program_is_named_behind_a_colon():
    python = sys.executable
    spec = parse_environment(f"endpoint:{python} 'my agent.py'", [("arguments", "--seed '{seed}'")])
    assert spec.name == "endpoint"
    assert spec.make().command == [python, "my agent.py", "--seed", "{seed}"]
    assert not spec.needs_rows
    assert resolve_environment(f"endpoint:{python} a.py").make().command == [python, "a.py"]
    assert resolve_environment("endpoint", program=python, grader="exact_match").needs_rows
    wrongs = {
        "endpoint:": "program",
        "endpoint:no-such-program x": "no program 'no-such-program'",
        "endpoint:python 'x": "not a valid command line",
    }
    for wrong, text in wrongs.items():
        with pytest.raises((UserError, SettingsError), match=text):
            parse_environment(wrong, [])
    with pytest.raises(SettingsError, match="did you mean --environment.arguments"):
        parse_environment("endpoint:python a.py", [("argumets", "x")])
    with pytest.raises(SettingsError, match="needs the setting 'program'"):
        resolve_environment("endpoint")


AGENT = """
messages, found = [user("digits:")], ""
for turn in range(2):
    text = answer(messages)
    found += text
    messages += [said(text), user("more:")]
score(sum(c.isdigit() for c in found) / max(1, len(found)))
"""


@pytest.mark.slow
def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path):
    (tmp_path / "agent.py").write_text(HEAD + AGENT)
    settings = {
        "environment": f"endpoint:{sys.executable} -S {tmp_path / 'agent.py'}",
        "base_model": "tiny:ascii-small", "batch_size": 2, "group_size": 3, "steps": 2,
        "max_tokens": 6, "eval_limit": 2, "environment_rows": 8, "learning_rate": 1e-3,
        "quiet": True,
    }  # fmt: skip
    results = []
    for name in ("a", "b"):
        metrics = rl.train("grpo", output_dir=tmp_path / name, **settings).metrics
        drop = ("time", "seconds", "per_second", "tokens_s", "rss", "memory", "gpu")
        kept = [
            {k: v for k, v in row.items() if not any(word in k for word in drop)} for row in metrics
        ]
        results.append(kept)
    assert results[0] == results[1] and any("program/requests" in key for key in results[0][-1])
