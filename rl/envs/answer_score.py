"""Score the answers of environments in the worker processes that score those of problems."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from rl.rewards import Scorer, resolve_reward
from rl.rollout import EpisodeFailed, Metrics

# By process (episodes are forked), name and settings of the reward.
_scorers: dict[tuple[int, str, str], Scorer] = {}
_lock = threading.Lock()


def grade_answer(
    name: str, question: str, answer: str, row: Mapping[str, Any], config: str = "{}"
) -> tuple[float, Metrics]:
    """Return the score of an answer by the reward `name`, and metrics: `correct`, and the reward's
    metrics. `config` is the reward's settings as JSON.

    A built-in reward that hangs or dies is ended by its `Scorer`. The answer then scores 0 with the
    metric `gave_up`. Raises EpisodeFailed if any other reward hangs, dies or raises.
    """
    meta = {key: value for key, value in row.items() if key != "messages"}
    score = _get_scorer(name, config).submit(question, answer, meta).result()
    if score.reward is None:
        raise EpisodeFailed(score.error or f"reward {name!r} gave no score")
    return score.reward, {"correct": score.reward, **score.metrics}


def _get_scorer(name: str, config: str) -> Scorer:
    """Return the scorer of a reward in this process, created on first use."""
    with _lock:
        key = (os.getpid(), name, config)
        if key not in _scorers:
            reward = resolve_reward(name, **json.loads(config))
            # A reward of the user's may read any variable, such as the key of a service.
            _scorers[key] = Scorer(reward, environment=() if reward.builtin else ("*",))
        return _scorers[key]
