"""Describe weights that vLLM servers load: all weights of a model, or a LoRA adapter on a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl.vllm.transfer_validation import FolderManifest

MAX_DIFFERENCE = 0.1  # nats on average, as of the self-test (rl.trainer.self_test)
_MAX_DIFFERENCE_FP32 = 0.01


@dataclass(frozen=True)
class AdapterCheck:
    """Hold the learner's logprobs of fixed tokens, to be compared with a server's. `logprobs`: of
    all tokens but the first. `exact`: the learner computes in fp32.
    """

    tokens: list[int]
    logprobs: list[float]
    exact: bool

    def find_error(self, logprobs: Sequence[float | None], dtype: str) -> str | None:
        """Return what is wrong with a server's logprobs of the tokens, None if they are right."""
        is_fp32 = self.exact and dtype == "torch.float32"
        limit = _MAX_DIFFERENCE_FP32 if is_fp32 else MAX_DIFFERENCE
        gap = np.array(logprobs[1:], np.float64) - np.array(self.logprobs)
        if (mean := float(np.abs(gap).mean())) <= limit:
            return None
        return (
            f"computes other logprobs with a LoRA adapter than the learner: they differ by "
            f"{mean:.2g} nats on average, allowed are {limit:g}. It may not apply all parts of the "
            "adapter: start it without --enable-lora, so that adapters are merged"
        )


@dataclass(frozen=True)
class ServerWeights:
    """Hold weights for servers.

    `folder`: in the format of Hugging Face, or of PEFT for an adapter. `base`: of an adapter, the
    model below it. `check`: of an adapter.
    """

    weights_id: str
    folder: Path
    base: ServerWeights | None = None
    check: AdapterCheck | None = None
    _manifests: dict[str, FolderManifest] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> ServerWeights:
        """Return the weights of the whole model: these, or those below the adapter."""
        return self.base or self

    def read_manifest(self, dtype: str) -> FolderManifest:
        """Return the digests of the tensors in a server's dtype, which are computed once."""
        if dtype not in self._manifests:
            self._manifests[dtype] = FolderManifest(self.folder, dtype)
        return self._manifests[dtype]
