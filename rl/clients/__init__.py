"""Provide Tinker's verbs: service, training and sampling clients, the driver, and the worker that
every rank runs.
"""

from rl.clients.classifier import ClassifierClient
from rl.clients.config import LoRAConfig, TrainingConfig, names_nearest
from rl.clients.custom_loss import LossHandle, PerDatumLossFn
from rl.clients.futures import APIFuture
from rl.clients.in_parts import drop_gradients, in_parts
from rl.clients.proof import Seen, prove
from rl.clients.rest_client import RestClient
from rl.clients.sampling import SamplingClient
from rl.clients.service import ServiceClient
from rl.clients.settings import SamplerSettings, WorkerSettings
from rl.clients.slices import Slice
from rl.clients.stream import SampleStream
from rl.clients.training import TrainingClient
from rl.clients.versions import max_context

__all__ = [
    "APIFuture",
    "ClassifierClient",
    "LoRAConfig",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SampleStream",
    "SamplerSettings",
    "SamplingClient",
    "Seen",
    "ServiceClient",
    "Slice",
    "TrainingClient",
    "TrainingConfig",
    "WorkerSettings",
    "drop_gradients",
    "in_parts",
    "max_context",
    "names_nearest",
    "prove",
]
