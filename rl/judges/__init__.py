"""Provide models that score the policy's samples: reference, teacher, reward model, comparison,
rubric.
"""

from rl.judges.comparison_judge import (
    AnswerComparison,
    ComparisonModel,
    make_comparison_prompt,
    make_verdict_examples,
    swap_answers,
)
from rl.judges.episode_rewards import add_episode_rewards, make_episode
from rl.judges.learned_rewards import (
    LearnedRewards,
    PairwiseJudge,
    PublishedRewardModel,
    RewardModel,
    WeightedRewardModels,
    apply_learned_rewards,
)
from rl.judges.openai_client import APIScoringClient, OpenAIClient
from rl.judges.reward_scores import compute_reward_scores
from rl.judges.rubric_judge import APIRubricJudge, Rubric, RubricJudge, RubricQuestion
from rl.judges.token_scorers import (
    BaseModelScorer,
    FrozenScorer,
    TokenScorer,
    check_vocabulary,
    restore_full_input,
    shares_vocabulary,
)

__all__ = [
    "make_verdict_examples",
    "BaseModelScorer",
    "PairwiseJudge",
    "APIRubricJudge",
    "APIScoringClient",
    "AnswerComparison",
    "OpenAIClient",
    "ComparisonModel",
    "FrozenScorer",
    "LearnedRewards",
    "PublishedRewardModel",
    "RubricQuestion",
    "RewardModel",
    "Rubric",
    "RubricJudge",
    "TokenScorer",
    "WeightedRewardModels",
    "check_vocabulary",
    "make_comparison_prompt",
    "make_episode",
    "restore_full_input",
    "apply_learned_rewards",
    "compute_reward_scores",
    "shares_vocabulary",
    "swap_answers",
    "add_episode_rewards",
]
