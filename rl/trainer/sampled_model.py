"""Load saved weights with the settings to sample them with, for sample.py and `rl.sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.client import SamplingClient, ServiceClient
from rl.config import DataSettings, SamplingSettings
from rl.renderers import Renderer
from rl.trainer.saved_weights import SavedWeights
from rl.trainer.stage_models import make_renderer
from rl.types import SamplingParams


@dataclass(frozen=True)
class SampledModel:
    """Hold loaded weights and the settings to sample them with."""

    name: str
    sampler: SamplingClient
    renderer: Renderer
    params: SamplingParams
    data: DataSettings


def load_sampled_model(
    saved: SavedWeights,
    service: ServiceClient,
    data: DataSettings,
    sampling: SamplingSettings,
    *,
    system_prompt: str | None = None,
    renderer_name: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int = -1,
    top_p: float = 1.0,
) -> SampledModel:
    """Load weights into a sampler of `service`.

    The keywords replace values of `data` and `sampling`; None keeps them, and the system prompt ""
    is none. Raises UserError if the weights cannot be loaded.
    """
    if system_prompt is not None:
        data = replace(data, system_prompt=system_prompt or None)
    sampler = saved.create_sampler(service)
    renderer = make_renderer(sampler, renderer_name or data.renderer, data.template, sampling.stop)
    params = SamplingParams(
        sampling.max_tokens if max_tokens is None else max_tokens,
        None,
        renderer.get_stop_sequences(),
        sampling.temperature if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return SampledModel(saved.name, sampler, renderer, params, data)
