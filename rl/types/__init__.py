"""The nouns of every room: what a model reads, how it learns and samples, what is asked and what
comes back.

Names and fields follow Tinker's client, so that a script written for it needs only its imports
changed; what is ours alone is marked "extension".
"""

from __future__ import annotations

import sys

from rl.types.inputs import (
    Chunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    PlacedImage,
)
from rl.types.learning import (
    AdamOptimizerConfig,
    AdamParams,
    LoraConfig,
    LossFnInputs,
    LossFnOutput,
    LossFnType,
    ModelID,
    OptimizerConfig,
    OptimParams,
    TensorDtype,
)
from rl.types.noted import experts_as_text, experts_from_text
from rl.types.problems import Message, Problem, StoredAnswer
from rl.types.responses import (
    Checkpoint,
    CheckpointType,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    ModelData,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    StopReason,
    SupportedModel,
    TrainingRun,
    WeightsInfoResponse,
)
from rl.types.sampling import SamplingParams
from rl.types.training_data import (
    LOSS_INPUT_DTYPES,
    Datum,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    TensorData,
)

__all__ = [
    "LOSS_INPUT_DTYPES",
    "AdamOptimizerConfig",
    "AdamParams",
    "Checkpoint",
    "CheckpointType",
    "Chunk",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnInputs",
    "LossFnOutput",
    "LossFnType",
    "Message",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimParams",
    "OptimStepResponse",
    "OptimizerConfig",
    "PlacedImage",
    "Problem",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "StopReason",
    "StoredAnswer",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
    "TrainingRun",
    "WeightsInfoResponse",
    "experts_as_text",
    "experts_from_text",
]

# Tinker's client has each of these in a submodule of its own; scripts import some of them from
# there.
_SUBMODULES = (
    "checkpoint", "datum", "encoded_text_chunk", "forward_backward_output", "get_info_response", "get_server_capabilities_response",
    "image_asset_pointer_chunk", "image_chunk", "load_weights_response", "lora_config", "loss_fn_inputs", "loss_fn_output",
    "loss_fn_type", "model_id", "model_input", "model_input_chunk", "optim_step_response", "optimizer", "provenance_spans",
    "sample_response", "sampled_sequence", "sampling_params", "save_weights_for_sampler_response", "save_weights_response",
    "stop_reason", "tensor_data", "tensor_dtype", "training_run", "weights_info_response",
)  # fmt: skip
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
