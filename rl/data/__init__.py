"""Read rows as problems, in an order that the seed and the step determine."""

from rl.data.contamination import ContaminationResult, find_contamination
from rl.data.curriculum import Curriculum
from rl.data.dataset_registry import (
    DATASET_REGISTRY,
    GENERATED_REWARDS,
    find_dataset,
    split_named_file,
)
from rl.data.length_limits import LengthLimits, RowTooLong
from rl.data.problem_loader import find_default_reward, has_row_splits, load_problems
from rl.data.problem_set import Mixture, ProblemSet, concatenate_sets
from rl.data.prompt_template import PromptTemplate
from rl.data.rollout_file import filter_answers, load_rollouts
from rl.data.row_checks import RowCheck, make_answers_check, select_good_rows
from rl.data.row_formats import read_label
from rl.data.row_readers import FaultyRows, MissingSplit
from rl.data.streaming import StreamedProblemSet
from rl.data.synthetic import addition, countdown, oneliners, sorting

__all__ = [
    "DATASET_REGISTRY",
    "GENERATED_REWARDS",
    "Curriculum",
    "PromptTemplate",
    "FaultyRows",
    "LengthLimits",
    "Mixture",
    "MissingSplit",
    "ContaminationResult",
    "ProblemSet",
    "RowCheck",
    "StreamedProblemSet",
    "RowTooLong",
    "addition",
    "make_answers_check",
    "countdown",
    "filter_answers",
    "select_good_rows",
    "concatenate_sets",
    "find_dataset",
    "load_problems",
    "load_rollouts",
    "oneliners",
    "read_label",
    "find_contamination",
    "find_default_reward",
    "has_row_splits",
    "sorting",
    "split_named_file",
]
