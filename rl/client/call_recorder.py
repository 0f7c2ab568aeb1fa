"""Define what watches the learner calls of a TrainingClient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rl.types import AdamParams, Datum


class CallRecorder(Protocol):
    """Receive the calls that change a model, in their order. It must not change their arguments."""

    def record_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, Any],
        divisor: float,
        outputs: Future,
    ) -> None:
        """Receive a forward_backward call. `outputs`: a future of (outputs by datum, metrics);
        outputs have the entropies of a recorded call, which change neither loss nor gradient.
        """

    def record_scale(self, factor: float) -> None:
        """Receive a factor that multiplies the gradient accumulated since the last step."""

    def record_step(self, params: AdamParams) -> None:
        """Receive an optimizer step."""
