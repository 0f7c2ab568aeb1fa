"""Provide Tinker's verbs: service, training and sampling clients."""

from rl.client.api_future import APIFuture
from rl.client.classifier_client import ClassifierClient
from rl.client.custom_loss import LossHandle, PerDatumLossFn
from rl.client.rest_client import RestClient
from rl.client.sample_stream import SampleStream
from rl.client.sampling_client import SamplingClient
from rl.client.scorer_handle import SampleScorerHandle
from rl.client.service_client import ServiceClient
from rl.client.training_client import (
    CallRecorder,
    TrainingClient,
    drop_gradients,
    forward_backward_microbatches,
)
from rl.client.training_config import LoRAConfig, TrainingConfig, suggest_settings

__all__ = [
    "APIFuture",
    "CallRecorder",
    "ClassifierClient",
    "LoRAConfig",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SampleScorerHandle",
    "SampleStream",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "TrainingConfig",
    "drop_gradients",
    "forward_backward_microbatches",
    "suggest_settings",
]
