"""Convert images from user input to bytes, and from bytes to model inputs.

Driver, learner and sampler share an `ImageReader`, which processes an image once.
"""

from rl.images.image_input import (
    IMAGE_KEYS,
    content_to_text,
    decode_image,
    find_image_file,
    get_image,
    has_images,
    is_image_part,
    make_image_chunk,
    open_image,
    replace_images,
    to_data_url,
)
from rl.images.image_reader import (
    ImageReader,
    attach_image_reader,
    get_image_reader,
    make_no_images_error,
)
from rl.images.vision_families import VISION_FAMILIES

__all__ = [
    "VISION_FAMILIES",
    "IMAGE_KEYS",
    "ImageReader",
    "make_image_chunk",
    "replace_images",
    "has_images",
    "get_image",
    "is_image_part",
    "attach_image_reader",
    "open_image",
    "get_image_reader",
    "content_to_text",
    "decode_image",
    "find_image_file",
    "to_data_url",
    "make_no_images_error",
]
