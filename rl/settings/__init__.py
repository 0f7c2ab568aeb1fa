"""Define, read and print settings: fields, recipes, the command line and its help."""

from rl.settings import help_pages
from rl.settings.checks import check_compared, check_substeps, only_with, without_samples
from rl.settings.cli import override, parse, read
from rl.settings.correction_tables import CorrectionSettings
from rl.settings.data_tables import (
    AnswerDataSettings,
    DataFormat,
    DataSettings,
    PreferenceDataSettings,
)
from rl.settings.environment_tables import EnvironmentSettings
from rl.settings.fields import (
    Given,
    SettingsError,
    as_flags,
    build,
    flatten,
    nearest,
    unflatten,
    words_of,
)
from rl.settings.flow_tables import EpisodeFlowSettings, FlowSettings
from rl.settings.judge_tables import LearnedRewardSettings
from rl.settings.other_words import current_settings
from rl.settings.ranges import (
    FINITE,
    POSITIVE,
    RATE,
    SIZE,
    Inside,
    NotNegative,
    Range,
    Share,
    Weight,
    check_ranges,
)
from rl.settings.run_plan import Run, StagePlan, difference, from_resolved, resolved
from rl.settings.tables import (
    KlSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    RowLoopSettings,
    RunSettings,
    SamplingSettings,
    ShapingSettings,
)

__all__ = [
    "current_settings",
    "NotNegative",
    "SIZE",
    "AnswerDataSettings",
    "DataFormat",
    "CorrectionSettings",
    "DataSettings",
    "EnvironmentSettings",
    "FINITE",
    "EpisodeFlowSettings",
    "FlowSettings",
    "Given",
    "Inside",
    "KlSettings",
    "LearnedRewardSettings",
    "LoopSettings",
    "ModelSettings",
    "OptimSettings",
    "POSITIVE",
    "PreferenceDataSettings",
    "RATE",
    "Range",
    "RowLoopSettings",
    "Run",
    "RunSettings",
    "SamplingSettings",
    "SettingsError",
    "ShapingSettings",
    "Share",
    "StagePlan",
    "Weight",
    "as_flags",
    "build",
    "check_compared",
    "check_ranges",
    "check_substeps",
    "difference",
    "flatten",
    "from_resolved",
    "help_pages",
    "nearest",
    "only_with",
    "override",
    "parse",
    "read",
    "resolved",
    "unflatten",
    "without_samples",
    "words_of",
]
