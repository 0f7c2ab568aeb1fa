"""Run the verbs on every rank: driver, worker groups, verb routing and weight sync."""

from rl.runtime.consistency import ConsistencyReport, check_sync
from rl.runtime.driver import Driver, is_driver
from rl.runtime.rank_settings import (
    SamplerSettings,
    WorkerSettings,
    make_sampler_settings,
    make_worker_settings,
)
from rl.runtime.sample_temperatures import SampleTemperatures
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
    "is_driver",
    "make_sampler_settings",
    "make_worker_settings",
    "serve_verbs",
]
