"""Read rows as problems, in an order that the seed and the step determine."""

from rl.data.addition import addition
from rl.data.catalogue import CATALOGUE, GENERATED_REWARDS, known
from rl.data.countdown import countdown
from rl.data.curriculum import Curriculum
from rl.data.load import load_problems, scored_by, tells_splits
from rl.data.mixture import Mixture
from rl.data.oneliners import oneliners
from rl.data.overlap import Overlap, overlap
from rl.data.problem_set import ProblemSet, joined
from rl.data.prompts import Dress
from rl.data.rollouts import filtered, load_rollouts
from rl.data.row_checks import RowCheck, answers_check, good_rows
from rl.data.rows import FaultyRows, NoSplit
from rl.data.streamed import Streamed
from rl.data.too_long import Limits, TooLong

__all__ = [
    "CATALOGUE",
    "GENERATED_REWARDS",
    "Curriculum",
    "Dress",
    "FaultyRows",
    "Limits",
    "Mixture",
    "NoSplit",
    "Overlap",
    "ProblemSet",
    "RowCheck",
    "Streamed",
    "TooLong",
    "addition",
    "answers_check",
    "countdown",
    "filtered",
    "good_rows",
    "joined",
    "known",
    "load_problems",
    "load_rollouts",
    "oneliners",
    "overlap",
    "scored_by",
    "tells_splits",
]
