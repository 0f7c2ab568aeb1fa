"""Convert images from user input to bytes, and from bytes to model inputs.

Driver, learner and sampler share an `ImageReader`, which processes an image once.
"""

from rl.images.families import FAMILIES
from rl.images.given import (
    IMAGE_KEYS,
    as_chunk,
    has_images,
    image_of,
    is_image_part,
    opened,
    said,
    shown,
)
from rl.images.reader import ImageReader, note_reader, reader_of, without_reader

__all__ = [
    "FAMILIES",
    "IMAGE_KEYS",
    "ImageReader",
    "as_chunk",
    "has_images",
    "image_of",
    "is_image_part",
    "note_reader",
    "opened",
    "reader_of",
    "said",
    "shown",
    "without_reader",
]
