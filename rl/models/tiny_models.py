"""Define the tiny models that are built locally: `tiny:<preset>`. docs/models.md lists them.

Torch is not imported here, so that help and checks stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.errors import UserError


@dataclass(frozen=True)
class VisionPreset:
    """Describe a Qwen3-VL vision tower.

    Square patches of `patch` pixels, `merge` x `merge` of them per token, images of at most
    `pixels` x `pixels`.
    """

    hidden: int
    layers: int
    heads: int
    patch: int
    merge: int = 2
    pixels: int = 64


@dataclass(frozen=True)
class ModelPreset:
    """Describe the shape of a Qwen3 model.

    `alphabet`: the characters of its built-in tokenizer; None: the user passes a tokenizer.
    `vision`: the vision tower of a Qwen3-VL; None: text only.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    alphabet: str | None
    max_position: int = 512
    vision: VisionPreset | None = None


MODEL_PRESETS: dict[str, ModelPreset] = {
    # 0.43M parameters: tasks about digits, such as the default recipe.
    "addition": ModelPreset(128, 2, 4, 4, 384, "0123456789+="),
    # 0.24M: a student for distillation from it.
    "addition-small": ModelPreset(96, 2, 4, 4, 288, "0123456789+="),
    # The same shape over printable ASCII, for custom character-level tasks.
    "ascii": ModelPreset(128, 2, 4, 4, 384, "\n" + "".join(chr(c) for c in range(32, 127)), 1024),
    # The same, four times smaller, for games that are learned on a CPU.
    "ascii-small": ModelPreset(
        64, 2, 2, 2, 192, "\n" + "".join(chr(c) for c in range(32, 127)), 512
    ),
    # 0.52M: a similar shape with a vision tower, for tasks about small images. It has a separate
    # template; its characters are printable ASCII.
    "vision": ModelPreset(
        96,
        2,
        4,
        4,
        288,
        "\n" + "".join(chr(c) for c in range(32, 127)),
        1024,
        VisionPreset(64, 2, 4, 4),
    ),
    # A small model for a real tokenizer (--tokenizer): to try a recipe with a real data set on a
    # CPU.
    "chat": ModelPreset(64, 2, 4, 2, 192, None, 2048),
}


def get_model_preset(base_model: str) -> ModelPreset:
    """Return the preset of `tiny:<preset>`. Raises UserError for an unknown preset."""
    name = base_model.removeprefix("tiny:")
    if name not in MODEL_PRESETS:
        known = ", ".join(f"tiny:{p}" for p in MODEL_PRESETS)
        raise UserError(
            f"unknown preset {base_model!r}: use one of {known}, a model folder, or a hub name"
        )
    return MODEL_PRESETS[name]
