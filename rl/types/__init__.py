"""Define the types that all packages share: model inputs, training data, sampling parameters,
problems and responses.

Names and fields follow Tinker's client, so that a script for that client only needs other imports.
Additions of this project are marked "extension".
"""

from __future__ import annotations

import sys

from rl.types.expert_records import experts_as_text, experts_from_text
from rl.types.inputs import (
    Chunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    PlacedImage,
)
from rl.types.length_limit import find_length_limit
from rl.types.problem_types import Message, Messages, Problem, StoredAnswer
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
    merge_counters,
)
from rl.types.sampling_params import (
    DISTRIBUTION_PARAMETERS,
    PARAMETER_BOUNDS,
    TRUNCATION_DEFAULTS,
    SamplingParams,
)
from rl.types.training_data import (
    LOSS_INPUT_DTYPES,
    Datum,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    TensorData,
)
from rl.types.training_params import (
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

__all__ = [
    "DISTRIBUTION_PARAMETERS",
    "LOSS_INPUT_DTYPES",
    "PARAMETER_BOUNDS",
    "TRUNCATION_DEFAULTS",
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
    "Messages",
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
    "find_length_limit",
    "merge_counters",
    "experts_as_text",
    "experts_from_text",
]

# Tinker's client has a separate submodule for each of these; some scripts import from the
# submodules.
_SUBMODULES = (
    "checkpoint datum encoded_text_chunk forward_backward_output get_info_response "
    "get_server_capabilities_response image_asset_pointer_chunk image_chunk "
    "load_weights_response lora_config loss_fn_inputs loss_fn_output loss_fn_type model_id "
    "model_input model_input_chunk optim_step_response optimizer provenance_spans "
    "sample_response sampled_sequence sampling_params save_weights_for_sampler_response "
    "save_weights_response stop_reason tensor_data tensor_dtype training_run "
    "weights_info_response"
).split()
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
