"""Models whose positions are turned by frequencies that depend on the length of the whole sequence.

longrope (Phi-3.5, Phi-4-mini) has two sets: one up to the original context, one beyond it, and the
longest row of a forward decides for all, so rows of both kinds share no forward. Keys that were
stored before a sequence grew past that length were turned by the other set, while a learner that
scores the finished sequence turns all of them by one. dynamic NTK changes at every length beyond
the original, and which set is in use hangs on the forwards before: such rows cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LengthSwitch:
    """`at`: sequences of up to so many positions have one set of frequencies. `beyond`: longer ones
    have one of their own.
    """

    kind: str
    at: int
    beyond: bool

    def is_beyond(self, length: int) -> bool:
        """Which set of frequencies a row of so many tokens has; rows of both share no forward.
        ValueError where it has none of its own.
        """
        if length > self.at and not self.beyond:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {self.at} that this model was made for, and beyond them the frequencies "
                f"of its rotary embedding ({self.kind}) depend on what ran before: shorten the sequences, or set another rope_type (yarn, "
                "say) in the model's config.json"
            )
        return length > self.at

    def most(self, prompt: int) -> int | None:
        """How many positions a sequence may reach that starts with `prompt` of them; None: this
        sets no bound.
        """
        return None if self.beyond and prompt > self.at else self.at

    def refusal(self, prompt: int, wanted: int) -> str:
        """Why a sequence of `wanted` positions that starts with `prompt` cannot be sampled or
        scored, and what to do.
        """
        said = f"the model's rotary positions ({self.kind}) have frequencies that change where a sequence grows past {self.at} tokens"
        if not self.beyond:
            return f"{said}, with every token; {wanted} tokens are too many: stay within {self.at} (a shorter prompt, a lower max_tokens)"
        other = f"lower max_tokens to {self.at + 1 - prompt} or less"
        return (
            f"{said}. A prompt of {prompt} tokens that reaches {wanted} crosses it, and its logprobs would not be those of the "
            f"finished sequence: {other}, or give a prompt of more than {self.at} tokens"
        )


def length_switch(model: Any) -> LengthSwitch | None:
    """What the rotary modules of a HF model say; None where no frequency depends on the length."""
    found = list(_switches(model))
    if not found:
        return None
    # layers of different kinds: nothing beyond the first change is one and the same
    if len(set(found)) > 1:
        return LengthSwitch(found[0].kind, min(one.at for one in found), beyond=False)
    return found[0]


def _switches(model: Any) -> Iterator[LengthSwitch]:
    for module in model.modules():
        own = vars(module)
        kinds, config = own.get("rope_type"), own.get("config")
        if kinds is None or config is None:
            continue
        per_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in per_layer.items():
            if kind != "longrope" and "dynamic" not in str(kind):
                continue
            rope = (
                config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            )
            at = (
                rope.get("original_max_position_embeddings")
                or own.get("original_max_seq_len")
                or config.max_position_embeddings
            )
            yield LengthSwitch(str(kind), int(at), beyond=kind == "longrope")
