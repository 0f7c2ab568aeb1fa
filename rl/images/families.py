"""What each family of vision-language models asks for: which text stands for an image, which
tensors go beside its tokens.

Each rule gives, of one image, the text that its tokenizer turns into the image's tokens, and, of a
batch, the forward's arguments. Shapes: R rows, L positions, n images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """`image_token`: the token whose embedding an image's features replace. `placeholder`: what a
    chat template writes for one image.
    """

    config: Any
    tokenizer: Any
    image_processor: Any

    # the argument that says which tokens are an image's (None: the model takes none)
    types_as = "mm_token_type_ids"

    @property
    def image_token_id(self) -> int:
        return int(getattr(self.config, "image_token_id", None) or self.config.image_token_index)

    @property
    def image_token(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))

    @property
    def placeholder(self) -> str:
        return self.image_token

    def process(self, image: Any) -> dict[str, Any]:
        """The image processor's tensors of one PIL image."""
        return dict(self.image_processor(images=[image], return_tensors="pt"))

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        """The text that stands for the image."""
        raise NotImplementedError

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The forward's arguments that hold the images of a batch, in the order of its tokens."""
        raise NotImplementedError

    def positions(
        self, model: Any, row: Tensor, types: Tensor, images: Sequence[Mapping[str, Any]]
    ) -> Tensor | None:
        """Positions [3, L] of one row whose rotary embedding has three axes; None where positions
        count tokens.
        """
        return None


class Grids(Family):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: patches end to end, a grid (time, height, width in patches)
    an image, positions of three axes.
    """

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        merged = int(self.config.vision_config.spatial_merge_size) ** 2
        return self.image_token * (int(tensors["image_grid_thw"].prod()) // merged)

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        import torch

        return {
            name: torch.cat([one[name] for one in images])
            for name in ("pixel_values", "image_grid_thw")
        }

    def positions(
        self, model: Any, row: Tensor, types: Tensor, images: Sequence[Mapping[str, Any]]
    ) -> Tensor | None:
        import torch

        grids = torch.cat([one["image_grid_thw"] for one in images]) if images else None
        found, _ = model.model.get_rope_index(
            row[None], image_grid_thw=grids, mm_token_type_ids=types[None]
        )
        return found[:, 0]


class Gemma3(Family):
    """Gemma 3: images of one size, each a fixed number of tokens that see each other, both ways."""

    types_as = "token_type_ids"

    @property
    def placeholder(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.config.boi_token_index))

    def expansion(self, tensors: Mapping[str, Any]) -> str:
        end = self.tokenizer.convert_ids_to_tokens(self.config.eoi_token_index)
        one = f"\n\n{self.placeholder}{self.image_token * int(self.config.mm_tokens_per_image)}{end}\n\n"
        crops = int(tensors["num_crops"][0]) if "num_crops" in tensors else 0
        if not crops:
            return one
        return f"Here is the original image {one} and here are some crops to help you see better {' '.join([one] * crops)}"

    def pixels(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        import torch

        return {"pixel_values": torch.cat([one["pixel_values"] for one in images])}


class Tiles(Family):
    """Idefics3, SmolVLM: an image as tiles of one size and the whole of it once more, each a fixed
    number of tokens between marks.
    """

    types_as = ""

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
        return {name: torch.cat([one[name] for one in images], dim=1) for name in names}


FAMILIES: dict[str, type[Family]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), Grids),
    "gemma3": Gemma3,
    **dict.fromkeys(("smolvlm", "idefics3"), Tiles),
}
