"""Execute runs: the two training loops, stages, resuming, and the memory plan of a whole run."""

from rl.run.asked import asked_with, that_fit
from rl.run.entry import guarded, main
from rl.run.episodes import check_scoring, environment_of, episode_groups, episode_reward
from rl.run.evaluation import answer_rows, figures
from rl.run.export import described, export, push
from rl.run.hosts import make_renderer
from rl.run.notebook import Trained, train
from rl.run.opponents import seated
from rl.run.prepare import held_out_problems, held_out_rows, reward_of, sandbox_kind
from rl.run.reopen import open_weights
from rl.run.trust import check_trusted, environment_address, rewards_of

__all__ = [
    "Trained",
    "answer_rows",
    "asked_with",
    "check_scoring",
    "check_trusted",
    "described",
    "environment_address",
    "environment_of",
    "episode_groups",
    "episode_reward",
    "export",
    "figures",
    "guarded",
    "held_out_problems",
    "held_out_rows",
    "main",
    "make_renderer",
    "open_weights",
    "push",
    "reward_of",
    "rewards_of",
    "sandbox_kind",
    "seated",
    "that_fit",
    "train",
]
