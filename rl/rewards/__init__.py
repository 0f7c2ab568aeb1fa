"""Score text with reward functions.

`reward_registry` holds names and settings; `text`, `math_reward`, `code`, ... hold the built-in
rewards; `reward_scorer` runs rewards.
"""

from rl.rewards import (
    code,
    instruction_checks,
    math_reward,
    multiple_choice_reward,
    text,
    text_quality,
)
from rl.rewards.module_loader import load_file
from rl.rewards.reward_calls import Episode, EpisodeTurn, RewardItem, RewardResult, Score
from rl.rewards.reward_machines import get_reward_machines, serve_reward_workers
from rl.rewards.reward_registry import (
    GAVE_UP,
    Reward,
    is_builtin_reward,
    register_reward,
    registered_rewards,
    resolve_reward,
)
from rl.rewards.reward_scorer import PendingScore, RewardsLost, Scorer
from rl.rewards.reward_workers import build_worker_environment
from rl.rewards.sample_scores import (
    RankScores,
    SampleScore,
    ScoredProblem,
    ScoreTicket,
    ScoringTask,
    hash_beginning,
)
from rl.rewards.trl_adapter import CONVERSATION

__all__ = [
    "CONVERSATION",
    "GAVE_UP",
    "Episode",
    "PendingScore",
    "Reward",
    "RewardItem",
    "RewardResult",
    "RewardsLost",
    "RankScores",
    "SampleScore",
    "ScoreTicket",
    "ScoredProblem",
    "ScoringTask",
    "hash_beginning",
    "Score",
    "Scorer",
    "EpisodeTurn",
    "get_reward_machines",
    "load_file",
    "code",
    "build_worker_environment",
    "instruction_checks",
    "is_builtin_reward",
    "multiple_choice_reward",
    "math_reward",
    "register_reward",
    "registered_rewards",
    "resolve_reward",
    "serve_reward_workers",
    "text_quality",
    "text",
]
