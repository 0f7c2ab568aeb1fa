"""Define, read and print settings: fields, recipes, the command line and its help."""

from rl.config import format_help
from rl.config.aliases import current_settings
from rl.config.check_config import (
    check_comparison_groups,
    check_substeps,
    reject_sampling_settings,
    require,
)
from rl.config.cli import override_settings, parse_run, read_run
from rl.config.correction_config import CorrectionSettings
from rl.config.data_config import (
    AnswerDataSettings,
    DataFormat,
    DataSettings,
    PreferenceDataSettings,
)
from rl.config.environment_config import EnvironmentSettings
from rl.config.fields import (
    RawValue,
    SettingsError,
    build_settings,
    check_ranges,
    flatten_settings,
    format_as_flags,
    nearest_name,
    unflatten_settings,
)
from rl.config.flag_parser import list_changed_settings
from rl.config.number_range import (
    FINITE,
    POSITIVE,
    RATE,
    SIZE,
    Inside,
    NotNegative,
    Range,
    Share,
    Weight,
)
from rl.config.recorded_files import (
    LAUNCH_FOLDER_KEY,
    find_source_file,
    is_method_address,
    locate_recorded_files,
    match_recorded_files,
    record_resumed_files,
)
from rl.config.reward_model_config import LearnedRewardSettings, is_api_address
from rl.config.rollout_config import AsyncRolloutSettings, RolloutSettings
from rl.config.run_config import (
    RunConfig,
    StageConfig,
    diff_configs,
    resolve_config,
)
from rl.config.saved_config import load_resolved_config
from rl.config.sections import (
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
    "RolloutSettings",
    "AsyncRolloutSettings",
    "RawValue",
    "Inside",
    "KlSettings",
    "LearnedRewardSettings",
    "is_api_address",
    "LoopSettings",
    "ModelSettings",
    "OptimSettings",
    "POSITIVE",
    "PreferenceDataSettings",
    "RATE",
    "Range",
    "RowLoopSettings",
    "RunConfig",
    "RunSettings",
    "SamplingSettings",
    "SettingsError",
    "ShapingSettings",
    "Share",
    "StageConfig",
    "Weight",
    "format_as_flags",
    "build_settings",
    "check_comparison_groups",
    "check_ranges",
    "check_substeps",
    "diff_configs",
    "LAUNCH_FOLDER_KEY",
    "find_source_file",
    "is_method_address",
    "locate_recorded_files",
    "match_recorded_files",
    "record_resumed_files",
    "flatten_settings",
    "list_changed_settings",
    "load_resolved_config",
    "format_help",
    "nearest_name",
    "require",
    "override_settings",
    "parse_run",
    "read_run",
    "resolve_config",
    "unflatten_settings",
    "reject_sampling_settings",
]
