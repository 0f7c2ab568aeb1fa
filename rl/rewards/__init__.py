"""Score text with reward functions.

`registry` holds names and settings; `text`, `maths`, `code`, ... hold the built-in rewards;
`scorer` runs rewards.
"""

from rl.rewards import code, countdown, maths, style, text
from rl.rewards.calls import Episode, RewardResult, Turn
from rl.rewards.files import load_file
from rl.rewards.guarded import GuardedProgram
from rl.rewards.pending import PendingScore, RewardsLost, Score
from rl.rewards.registry import GAVE_UP, Reward, register_reward, registered_rewards, resolve_reward
from rl.rewards.scorer import Scorer
from rl.rewards.styles import CONVERSATION
from rl.rewards.workers import environment_of_rewards

__all__ = [
    "CONVERSATION",
    "GAVE_UP",
    "Episode",
    "GuardedProgram",
    "PendingScore",
    "Reward",
    "RewardResult",
    "RewardsLost",
    "Score",
    "Scorer",
    "Turn",
    "load_file",
    "code",
    "environment_of_rewards",
    "countdown",
    "maths",
    "register_reward",
    "registered_rewards",
    "resolve_reward",
    "style",
    "text",
]
