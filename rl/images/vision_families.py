"""Define the image rules of each family of vision-language models.

A rule returns the text that the tokenizer converts into an image's tokens, and the forward's
arguments for a batch with images. Shapes: R rows, L positions, n images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VisionFamily:
    """Define the rules of a family.

    `image_token`: the token whose embedding is replaced by an image's features. `placeholder`: the
    text that a chat template writes for an image.
    """

    config: Any
    tokenizer: Any
    image_processor: Any

    # The forward's argument that marks the image tokens (empty: the model has no such argument).
    token_types_name = "mm_token_type_ids"

    @property
    def image_token_id(self) -> int:
        """Return the id of the image token."""
        return int(getattr(self.config, "image_token_id", None) or self.config.image_token_index)

    @property
    def image_token(self) -> str:
        """Return the text of the image token."""
        return str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))

    @property
    def placeholder(self) -> str:
        """Return the text that a chat template writes for an image."""
        return self.image_token

    def process(self, image: Any) -> dict[str, Any]:
        """Return the image processor's tensors for a PIL image."""
        return dict(self.image_processor(images=[image], return_tensors="pt"))

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        """Return the text that represents the image."""
        raise NotImplementedError

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the forward's arguments for the images of a batch, in the order of its tokens."""
        raise NotImplementedError

    def positions(
        self, model: Any, row: Tensor, types: Tensor, images: Sequence[Mapping[str, Any]]
    ) -> Tensor | None:
        """Return the rotary positions [3, L] of a row, if the model has three axes of positions.

        Returns None if positions count tokens.
        """
        return None


class QwenVisionFamily(VisionFamily):
    """Define the rules of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    Patches are concatenated. Each image has a grid (time, height, width in patches), and positions
    have three axes.
    """

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        merged = int(self.config.vision_config.spatial_merge_size) ** 2
        return self.image_token * (int(tensors["image_grid_thw"].prod()) // merged)

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        import torch

        return {
            name: torch.cat([tensors[name] for tensors in images])
            for name in ("pixel_values", "image_grid_thw")
        }

    def positions(
        self, model: Any, row: Tensor, types: Tensor, images: Sequence[Mapping[str, Any]]
    ) -> Tensor | None:
        import torch

        grids = torch.cat([tensors["image_grid_thw"] for tensors in images]) if images else None
        position_ids, _ = model.model.get_rope_index(
            row[None], image_grid_thw=grids, mm_token_type_ids=types[None]
        )
        return position_ids[:, 0]


class Gemma3Family(VisionFamily):
    """Define the rules of Gemma 3.

    Images have a fixed size and a fixed number of tokens, which attend to each other in both
    directions.
    """

    token_types_name = "token_type_ids"

    @property
    def placeholder(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.config.boi_token_index))

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        end = self.tokenizer.convert_ids_to_tokens(self.config.eoi_token_index)
        image_text = (
            f"\n\n{self.placeholder}"
            f"{self.image_token * int(self.config.mm_tokens_per_image)}{end}\n\n"
        )
        crops = int(tensors["num_crops"][0]) if "num_crops" in tensors else 0
        if not crops:
            return image_text
        return (
            f"Here is the original image {image_text} and here are some crops "
            f"to help you see better {' '.join([image_text] * crops)}"
        )

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        import torch

        return {"pixel_values": torch.cat([tensors["pixel_values"] for tensors in images])}


class TiledFamily(VisionFamily):
    """Define the rules of Idefics3 and SmolVLM.

    An image is split into tiles of a fixed size, followed by the whole image. Each tile has a fixed
    number of tokens between marker tokens.
    """

    token_types_name = ""

    def process(self, image: Any) -> dict[str, Any]:
        return dict(
            self.image_processor(images=[[image]], return_tensors="pt", return_row_col_info=True)
        )

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        vision = self.config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2 // self.config.scale_factor**2
        around, whole = "<fake_token_around_image>", "<global-img>"
        rows, columns = (int(tensors[name][0][0]) for name in ("rows", "cols"))
        tiles = "".join(
            "".join(
                f"{around}<row_{r + 1}_col_{c + 1}>{self.image_token * count}"
                for c in range(columns)
            )
            + "\n"
            for r in range(rows)
        )
        return f"{tiles}{chr(10) if tiles else ''}{around}{whole}{self.image_token * count}{around}"

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        import torch

        names = [name for name in ("pixel_values", "pixel_attention_mask") if name in images[0]]
        return {name: torch.cat([tensors[name] for tensors in images], dim=1) for name in names}


VISION_FAMILIES: dict[str, type[VisionFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QwenVisionFamily),
    "gemma3": Gemma3Family,
    **dict.fromkeys(("smolvlm", "idefics3"), TiledFamily),
}
