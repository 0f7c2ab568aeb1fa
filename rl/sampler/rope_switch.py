"""Detect rotary embeddings with frequencies that depend on the length of the whole sequence.

longrope (Phi-3.5, Phi-4-mini) has two frequency sets: the first up to the original context, the
second beyond it. The longest row of a forward selects the set for all rows, so rows on both sides
of the threshold never share a forward. Keys cached before a sequence grew past the threshold were
rotated with the first set, while a learner that scores the finished sequence rotates all keys with
the second.

Dynamic NTK changes at every length beyond the original context, and the active set depends on the
previous forwards, so such rows cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeLengthSwitch:
    """Hold the length at which a model's rotary frequencies change.

    Sequences of up to `threshold` positions use the first set of frequencies.
    `has_long_frequencies` is true if longer sequences have a fixed second set.
    """

    kind: str
    threshold: int
    has_long_frequencies: bool

    def uses_long_frequencies(self, length: int) -> bool:
        """Return whether a row of `length` tokens uses the second set of frequencies.

        Rows with different results never share a forward. Raises ValueError if no fixed set exists
        for this length.
        """
        if length > self.threshold and not self.has_long_frequencies:
            raise ValueError(
                f"a sequence of {length} tokens is longer than this model's original context of "
                f"{self.threshold}, beyond which its rotary embedding ({self.kind}) has no fixed "
                "set of frequencies: shorten the sequences, or set another rope_type (yarn, say) "
                "in the model's config.json"
            )
        return length > self.threshold

    def max_length(self, prompt_length: int) -> int | None:
        """Return the largest length (positions) of a sequence with a prompt of `prompt_length`
        positions.

        None if the switch sets no limit.
        """
        return (
            None if self.has_long_frequencies and prompt_length > self.threshold else self.threshold
        )

    def check(self, prompt_length: int, total_length: int) -> None:
        """Raise ValueError if a sequence of `total_length` positions, of which `prompt_length` are
        the prompt, has no single set of rotary frequencies.
        """
        most = self.max_length(prompt_length)
        if most is None or total_length <= most:
            return
        message = (
            f"the model's rotary positions ({self.kind}) use other frequencies once a sequence "
            f"exceeds {self.threshold} tokens"
        )
        if not self.has_long_frequencies:
            raise ValueError(
                f"{message}, and have no fixed set beyond it; {total_length} tokens are too "
                f"many: stay within {self.threshold} (a shorter prompt, a lower max_tokens)"
            )
        other = f"lower max_tokens to {self.threshold + 1 - prompt_length} or less"
        raise ValueError(
            f"{message}. A prompt of {prompt_length} tokens that reaches {total_length} crosses "
            f"it, and its logprobs would differ from those of the finished sequence: {other}, or "
            f"pass a prompt of more than {self.threshold} tokens"
        )


def find_rope_switch(model: Any) -> RopeLengthSwitch | None:
    """Return the length switch of a HF model; None if no frequency depends on the length."""
    switches = list(_iter_rope_switches(model))
    if not switches:
        return None
    # Layers with different switches: the only safe limit is the smallest threshold.
    if len(set(switches)) > 1:
        return RopeLengthSwitch(
            switches[0].kind,
            min(switch.threshold for switch in switches),
            has_long_frequencies=False,
        )
    return switches[0]


def _iter_rope_switches(model: Any) -> Iterator[RopeLengthSwitch]:
    """Yield a `RopeLengthSwitch` for each length-dependent rotary module or layer type."""
    for module in model.modules():
        attributes = vars(module)
        kinds, config = attributes.get("rope_type"), attributes.get("config")
        if kinds is None or config is None:
            continue
        per_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in per_layer.items():
            if kind != "longrope" and "dynamic" not in str(kind):
                continue
            rope = (
                config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            )
            threshold = (
                rope.get("original_max_position_embeddings")
                or attributes.get("original_max_seq_len")
                or config.max_position_embeddings
            )
            yield RopeLengthSwitch(
                str(kind), int(threshold), has_long_frequencies=kind == "longrope"
            )
