"""Supervised fine-tuning: cross-entropy on worked responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.datums import supervised_datum
from rl.methods.base import Models, Progress, one_pass
from rl.setting_checks import without_samples
from rl.settings import DataSettings, LoopSettings, ModelSettings, OptimSettings, SamplingSettings
from rl.types import Datum, Problem


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Supervised fine-tuning: learn to say what the data says."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        if self.loop.batch_size % self.optim.num_substeps:
            raise ValueError(f"batch_size {self.loop.batch_size} is no multiple of num_substeps {self.optim.num_substeps}")
        without_samples(self, "sft learns from the data's answers")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (1e-4 if self.model.lora_rank else 1e-5)


class Sft:
    """The hooks of `sft`."""

    online = False

    def __init__(self, settings: SftSettings):
        self.settings = settings

    def datums(self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int) -> list[Datum]:
        """Prompt and response as one sequence; the response's tokens (and its end) carry weight 1."""
        return [response_datum(row, renderer) for row in rows]

    def learn(self, models: Models, datums: Sequence[Datum], progress: Progress) -> dict[str, float]:
        """One pass; the loss is the mean negative logprob of a response token, `optim/loss`."""
        settings = self.settings
        return one_pass(
            models,
            datums,
            loss="cross_entropy",
            config={},
            normalise="tokens",
            optim=settings.optim,
            loop=settings.loop,
            progress=progress,
            peak=settings.learning_rate,
        )

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


def response_datum(row: Problem, renderer: Any) -> Datum:
    """A row's prompt and response as one sequence; the response's tokens (and its end) carry weight 1."""
    if row.response is None:
        raise ValueError(f"row {row.index} of {row.tag} has no response to learn: name its column with --response-column")
    messages = [*row.messages, {"role": "assistant", "content": row.response}]
    model_input, weights = renderer.build_supervised_example(messages)
    return supervised_datum(model_input.to_ints(), weights)
