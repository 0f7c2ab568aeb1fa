"""Run the verbs on every rank: driver, worker groups, verb routing and weight sync."""

from rl.runtime.consistency import ConsistencyReport, check_sync
from rl.runtime.driver import Driver, is_driver
from rl.runtime.rank_settings import SamplerSettings, WorkerSettings
from rl.runtime.sample_temperatures import SampleTemperatures
from rl.runtime.sampler_versions import find_max_context
from rl.runtime.stream_worker import StepOutput, StepRequest
from rl.runtime.worker_group import serve_verbs

__all__ = [
    "ConsistencyReport",
    "Driver",
    "SampleTemperatures",
    "SamplerSettings",
    "StepOutput",
    "StepRequest",
    "WorkerSettings",
    "check_sync",
    "find_max_context",
    "is_driver",
    "serve_verbs",
]
