"""Run scripted episodes of wrapped environments, and count test cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rl.envs import EnvironmentGroup, EpisodeLimits, resolve_environment
from rl.models import load_model
from rl.renderers import Renderer, get_renderer
from rl.rollout import RolloutBatch, rollout
from rl.types import Problem, SampledSequence, SampleResponse, SamplingParams

Found = tuple[int, int, list[str]]


def renderer() -> Renderer:
    return get_renderer("role_colon", load_model("tiny:ascii").tokenizer)


class ScriptedSampler:
    """Sample answers that are a function of the prompt's text."""

    info = {"max_context": None}

    def __init__(self, render: Renderer, says: Callable[[str], str]):
        self.render, self.says = render, says

    def sample_many(self, requests: Sequence[Any]) -> Any:
        responses = []
        for request in requests:
            text = self.says(self.render.tokenizer.decode(list(request.prompt)))
            tokens = [*self.render.encode(text), *sorted(self.render.end_tokens)[:1]]
            first = SampledSequence(tokens, [-1.0] * len(tokens), "stop", version=0)
            responses.append(SampleResponse([first] * request.num_samples))
        return SimpleNamespace(result=lambda: (responses, {"emitted_tokens": 1}))


def play_environment(
    spec: Any,
    says: Callable[[str], str],
    *,
    rows: Sequence[dict] = ({},),
    group: int = 1,
    seconds: float = 30.0,
) -> RolloutBatch:
    """Run episodes of an environment through the rollout."""
    render = renderer()
    metas = [{k: v for k, v in row.items() if k != "messages"} for row in rows]
    problems = [
        Problem(row.get("messages", ()), meta, index=i)
        for i, (row, meta) in enumerate(zip(rows, metas, strict=True))
    ]
    groups = [
        EnvironmentGroup(
            spec, problem, group, render, limits=EpisodeLimits(turns=40, seconds=seconds)
        )
        for problem in problems
    ]
    return rollout(groups, ScriptedSampler(render, says), SamplingParams(max_tokens=64), seed=0)


def count_cases(cases: Sequence[tuple[str, Callable[[], bool]]]) -> Found:
    """Run each case and count the results; cases that are false or raise are named."""
    bad = []
    for name, case in cases:
        try:
            if not case():
                bad.append(f"{name}: does not hold")
        except Exception as error:
            bad.append(f"{name}: {type(error).__name__}: {str(error)[:100]}")
    return len(cases) - len(bad), len(cases), bad


def check_refusal(name: str, text: str, **settings: Any) -> bool:
    """Return whether creating the environment raises ValueError with `text` in its message."""
    try:
        resolve_environment(name, **settings).make()
    except ValueError as error:
        return text in str(error)
    return False


def check_episode_cost(name: str, **settings: Any) -> bool:
    """Return whether an environment that cannot answer costs exactly its episode."""
    row = {"messages": [{"role": "user", "content": "?"}], "answer": "x"}
    result = play_environment(resolve_environment(name, **settings), lambda _: "x", rows=[row])
    return not result.groups and len(result.errors) == 1
