"""Provide Tinker's `*_async` methods. A method that returns a future is awaited twice; a method
that makes a client or a sample is awaited once.
"""

from __future__ import annotations

from typing import Any

from rl.client.api_future import APIFuture
from rl.types import (
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)


class AsyncTrainingMethods:
    """Provide the `*_async` methods of a TrainingClient."""

    async def forward_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(*args, **kwargs)

    async def forward_backward_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(*args, **kwargs)

    async def forward_backward_custom_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(*args, **kwargs)

    async def optim_step_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(*args, **kwargs)

    async def save_state_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[SaveWeightsResponse]:
        return self.save_state(*args, **kwargs)

    async def save_weights_for_sampler_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(*args, **kwargs)

    async def save_weights_external_async(self: Any, *args: Any, **kwargs: Any) -> APIFuture[Any]:
        return self.save_weights_external(*args, **kwargs)

    async def load_state_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[LoadWeightsResponse]:
        return self.load_state(*args, **kwargs)

    async def load_state_with_optimizer_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> APIFuture[LoadWeightsResponse]:
        return self.load_state_with_optimizer(*args, **kwargs)

    async def save_weights_and_get_sampling_client_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return await self.save_weights_and_get_sampling_client(*args, **kwargs)

    async def create_sampling_client_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.create_sampling_client(*args, **kwargs)

    async def get_info_async(self: Any) -> GetInfoResponse:
        return self.get_info()


class AsyncSamplingMethods:
    """Provide the `*_async` methods of a SamplingClient."""

    async def sample_async(self: Any, *args: Any, **kwargs: Any) -> SampleResponse:
        return await self.sample(*args, **kwargs)

    async def compute_logprobs_async(self: Any, *args: Any, **kwargs: Any) -> list[float | None]:
        return await self.compute_logprobs(*args, **kwargs)

    async def get_base_model_async(self: Any) -> str:
        return self.get_base_model()


class AsyncServiceMethods:
    """Provide the `*_async` methods of a ServiceClient."""

    async def create_lora_training_client_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.create_lora_training_client(*args, **kwargs)

    async def create_training_client_from_state_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.create_training_client_from_state(*args, **kwargs)

    async def create_training_client_from_state_with_optimizer_async(
        self: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return await self.create_training_client_from_state_with_optimizer(*args, **kwargs)

    async def create_sampling_client_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.create_sampling_client(*args, **kwargs)

    async def get_server_capabilities_async(self: Any) -> GetServerCapabilitiesResponse:
        return self.get_server_capabilities()
