"""Check the wrapped packages for test_wrapped_packages.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from wrapper_scripted import (
    Found,
    ScriptedSampler,
    check_refusal,
    count_cases,
    play_environment,
    renderer,
)
from wrapper_servers import check_mcp_episodes, check_openenv_episodes

from rl.envs import resolve_environment
from rl.rollout import RolloutBatch, rollout
from rl.types import SamplingParams

# ---------------------------------------------------------------------------- reasoning-gym


def _rg(task: str, **settings: Any) -> Any:
    made = resolve_environment("reasoning_gym", task=task, **settings).make()
    made.row, made.seed = {"index": 3, "split": "train"}, 0
    return made


def check_task_answers() -> Found:
    import reasoning_gym

    def case(task: str) -> bool:
        made = _rg(task)
        question = made.start()
        # Several answers are right, and the task does not list any.
        if made.entry["answer"] is None:
            return bool(question) and made.step({"role": "assistant", "content": ""}).reward < 1
        right = made.step(
            {"role": "assistant", "content": f"I think <answer>{made.entry['answer']}</answer>"}
        )
        wrong = made.step({"role": "assistant", "content": "certainly not this"})
        return bool(question) and right.reward >= 0.99 > wrong.reward and right.done

    return count_cases(
        [(task, lambda task=task: case(task)) for task in sorted(reasoning_gym.factory.DATASETS)]
    )


def check_curriculum_levels() -> Found:
    import reasoning_gym

    def case(task: str) -> bool:
        curriculum = reasoning_gym.factory.create_curriculum(task)
        count = max(len(item.levels) for item in curriculum.attributes.values())
        requests = []
        for level in {0, count - 1}:
            made = _rg(task, level=level)
            requests.append(made.start())
        return all(requests)

    return count_cases(
        [(task, lambda task=task: case(task)) for task in sorted(reasoning_gym.factory.CURRICULA)]
    )


def an_episode_through_the_rollout() -> Found:
    spec = resolve_environment("reasoning_gym", task="chain_sum", levels=3)
    rows = spec.make().rows("train", 9)
    tests = [row for row in spec.make().rows("test", 9)]

    def says(prompt: str) -> str:
        sums = re.findall(r"(\d[\d +\-]*\d) = ?\?", prompt) or re.findall(
            r"(\d[\d +\-]*\d)", prompt
        )
        # The expression contains only digits and signs.
        return str(eval(sums[-1].replace("+0", "+"), {"__builtins__": {}}))

    result = play_environment(spec, says, rows=rows)
    rewards = [reward for item in result.groups for reward in item.get_total_rewards()]
    requests = {
        split: [_question(spec, row) for row in inputs]
        for split, inputs in (("train", rows), ("test", tests))
    }
    return count_cases([
        ("levels are spread",
         lambda: [row["level"] for row in rows] == [0, 1, 2] * 3),
        ("right answers are paid", lambda: rewards == [1.0] * 9),
        ("training and held-out questions differ",
         lambda: not set(requests["train"]) & set(requests["test"])),
        ("the same row asks the same",
         lambda: requests["train"] == [_question(spec, row) for row in rows]),
    ])  # fmt: skip


def _question(spec: Any, row: dict) -> str:
    made = spec.make()
    made.row = row
    return made.start()


# ---------------------------------------------------------------------------- textarena


def check_game_starts() -> Found:
    """Start every base game with its minimum number of players, and send an invalid move."""
    import textarena as ta

    names = sorted(
        name for name in ta.envs.registration.ENV_REGISTRY if re.fullmatch(r"[A-Za-z0-9]+-v0", name)
    )

    def case(name: str) -> bool:
        made = resolve_environment("textarena", game=name).make()
        made.seed, made.member = 5, 0
        turn = made.start()
        came = made.step({"role": "assistant", "content": "[0]"})
        return bool(turn.messages) and isinstance(came.done, bool) and len(made.seats) >= 1

    return count_cases([(name, lambda name=name: case(name)) for name in names])


def guess_middle(prompt: str) -> str:
    low, high = 1, 20
    for guess, hint in re.findall(
        r"\[(\d+)\].*?target number is (lower|higher)", prompt, re.DOTALL
    ):
        low, high = (low, int(guess) - 1) if hint == "lower" else (int(guess) + 1, high)
    return f"[{(low + high) // 2}]"


def games_are_played() -> Found:
    guess = resolve_environment("textarena", game="GuessTheNumber-v0", rules=False)
    result = play_environment(guess, guess_middle, rows=[{} for _ in range(20)], group=2)
    rewards = [item.get_total_rewards() for item in result.groups]
    board = resolve_environment("textarena", game="TicTacToe-v0")

    def first_free(prompt: str) -> str:
        taken = re.findall(r"\[(\d)\]", prompt.split("You are Player")[-1])
        return f"[{next((i for i in '012345678' if i not in taken), '0')}]"

    both = play_environment(board, first_free, rows=[{} for _ in range(3)])
    random_other = resolve_environment(
        "textarena",
        game="TicTacToe-v0",
        others="random",
        moves=" ".join(f"[{i}]" for i in range(9)),
    )
    item = play_environment(random_other, first_free, rows=[{} for _ in range(10)], group=2)
    again = play_environment(random_other, first_free, rows=[{} for _ in range(10)], group=2)
    totals = [round(sum(group.get_total_rewards()), 6) for group in both.groups]
    return count_cases([
        ("halving finds each number", lambda: rewards == [[1.0, 1.0]] * 20),
        ("within 5 guesses",
         lambda: max(_turns(item) for g in result.groups for item in g.trajectories_G) <= 5),
        ("a group's members meet the same number",
         lambda: all(len(set(map(_turns, g.trajectories_G))) == 1 for g in result.groups)),
        ("self-play has a trajectory for each seat", lambda: len(both.groups) == 6),
        ("one wins what the other loses", lambda: round(sum(totals), 6) == 0.0),
        ("a game against a random player ends", lambda: not item.errors and len(item.groups) == 10),
        ("and is a function of its seed, played beside others",
         lambda: _tokens(item) == _tokens(again)),
    ])  # fmt: skip


def _turns(first: Any) -> int:
    return len(first.transitions)


def _tokens(result: RolloutBatch) -> list:
    return [
        [turn.ob.to_ints() for turn in item.transitions]
        for group in result.groups
        for item in group.trajectories_G
    ]


# ---------------------------------------------------------------------------- skyrl-gym


def check_skyrl_episodes() -> Found:
    row = {
        "messages": [{"role": "user", "content": "What is 6*7? End with #### and the number."}],
        "answer": "42",
    }
    once = resolve_environment("skyrl_gym", env="gsm8k")
    several = resolve_environment("skyrl_gym", env="gsm8k_multi_turn")
    right, wrong = (
        play_environment(once, lambda _, s=s: s, rows=[row]).groups[0].get_total_rewards()
        for s in ("It is\n#### 42", "#### 41")
    )
    answers = iter(["#### 1", "#### 2", "#### 42"])
    result = play_environment(several, lambda _: next(answers), rows=[row])
    turns = result.groups[0].trajectories_G[0].transitions
    return count_cases([
        ("a right answer", lambda: right == [1.0]),
        ("a wrong answer", lambda: wrong == [0.0]),
        ("several turns, each with its reward",
         lambda: [round(t.reward, 3) for t in turns] == [0.04, 0.04, 1.0]),
        ("its metrics at the end", lambda: turns[-1].metrics.get("steps") == 3.0),
        ("an unknown name",
         lambda: check_refusal("skyrl_gym", "did you mean gsm8k", env="gsm8")),
    ])  # fmt: skip


# ---------------------------------------------------------------------------- tinker-cookbook


def tinker_groups() -> Found:
    import asyncio

    import tinker
    from tinker_cookbook.rl import types

    from rl.integrations import TinkerGroup

    render = renderer()
    seen: list[Any] = []

    class Count(types.Env):
        def __init__(self, start: int):
            self.remaining = start

        async def initial_observation(self) -> Any:
            await asyncio.sleep(0.01)
            return self._asked(), [sorted(render.end_tokens)[0]]

        def _asked(self) -> Any:
            return tinker.ModelInput.from_ints(
                render.build_generation_prompt(
                    [{"role": "user", "content": f"Say {self.remaining}"}]
                ).to_ints()
            )

        async def step(self, action: list[int], *, extra: Any = None) -> Any:
            seen.append((type(action), type(action[0]), extra))
            await asyncio.sleep(0.01)
            text = render.parse_response(action)[0]["content"]
            right, self.remaining = text == str(self.remaining), self.remaining - 1
            return types.StepResult(
                float(right),
                self.remaining == 0,
                self._asked(),
                [sorted(render.end_tokens)[0]],
                {"right": float(right)},
                {"said": text},
            )

    class FailingEnv(Count):
        async def step(self, action: list[int], *, extra: Any = None) -> Any:
            raise RuntimeError("no luck")

    class Group(types.EnvGroupBuilder):
        def __init__(self, *kinds: type):
            self.kinds, self.cleaned = kinds, 0

        async def make_envs(self) -> Any:
            return [kind(3) for kind in self.kinds]

        async def compute_group_rewards(self, trajectory_group: Any, env_group: Any) -> Any:
            assert len(trajectory_group) == len(env_group)
            assert all(isinstance(item, types.Trajectory) for item in trajectory_group)
            return [
                (10.0, {"length": float(len(item.transitions[0].ac.tokens))})
                for item in trajectory_group
            ]

        async def cleanup(self) -> None:
            self.cleaned += 1

        def logging_tags(self) -> list[str]:
            return ["counting"]

    made = [Group(Count, Count), Group(Count, FailingEnv, Count)]
    groups = [TinkerGroup(builder, i, seconds=20.0) for i, builder in enumerate(made)]
    result = rollout(
        groups,
        ScriptedSampler(render, lambda p: re.findall(r"Say (\d)", p)[-1]),
        SamplingParams(max_tokens=8),
        seed=0,
    )
    return count_cases([
        ("episodes and their group rewards",
         lambda: [g.get_total_rewards() for g in result.groups] == [[13.0, 13.0]] * 2),
        ("actions are lists of ints", lambda: {item[:2] for item in seen} == {(list, int)}),
        ("extra says why sampling stopped",
         lambda: {item[2]["stop_reason"] for item in seen} == {"stop"}),
        ("metrics of steps and of groups",
         lambda: (
             result.groups[0].metrics_G[0]["length"] == 2.0
             and [t.metrics["right"] for t in result.groups[0].trajectories_G[0].transitions]
             == [1.0] * 3
         )),
        ("the tag", lambda: result.groups[0].tag == "counting"),
        ("one that raises costs its episode",
         lambda: len(result.errors) == 1 and "no luck" in result.errors[0]),
        ("groups are cleaned up", lambda: [item.cleaned for item in made] == [1, 1]),
    ])  # fmt: skip


CHECKS: dict[str, list[tuple[str, Callable[[], Found]]]] = {
    "reasoning-gym": [("every task pays its own answer and not another",
                       check_task_answers),
                      ("every curriculum asks at its first and last level",
                       check_curriculum_levels),
                      ("episodes through the rollout", an_episode_through_the_rollout)],
    "textarena": [("every game begins and takes an answer", check_game_starts),
                  ("games are played to their end", games_are_played)],
    "skyrl-gym": [("episodes of one turn and of several", check_skyrl_episodes)],
    "openenv": [("episodes on a server", check_openenv_episodes)],
    "mcp": [("tools of a server", check_mcp_episodes)],
    "tinker-cookbook": [("groups of environments", tinker_groups)],
}  # fmt: skip
