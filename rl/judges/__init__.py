"""Provide models that score the policy's samples: reference, teacher, reward model, comparison,
rubric.
"""

from rl.judges.comparison import (
    Comparison,
    ComparisonModel,
    comparison_messages,
    swapped,
    verdict_examples,
)
from rl.judges.episode_rewards import episode_of, with_episode_rewards
from rl.judges.learned import ComparedInGroup, LearnedRewards, RewardModel, judged
from rl.judges.published import PublishedRewardModel, WeightedRewardModels
from rl.judges.reward_scores import scores_of
from rl.judges.rubric import Question, Rubric, RubricJudge
from rl.judges.scoring import (
    BaseScorer,
    FrozenScorer,
    TokenScorer,
    check_vocabulary,
    full_input,
    full_tokens,
    shares_vocabulary,
)

__all__ = [
    "verdict_examples",
    "BaseScorer",
    "ComparedInGroup",
    "Comparison",
    "ComparisonModel",
    "FrozenScorer",
    "LearnedRewards",
    "PublishedRewardModel",
    "Question",
    "RewardModel",
    "Rubric",
    "RubricJudge",
    "TokenScorer",
    "WeightedRewardModels",
    "check_vocabulary",
    "comparison_messages",
    "episode_of",
    "full_input",
    "full_tokens",
    "judged",
    "scores_of",
    "shares_vocabulary",
    "swapped",
    "with_episode_rewards",
]
