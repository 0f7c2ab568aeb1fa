"""Commands that start and end quickly, though they import torch and transformers."""

import atexit
import gc


def quick() -> None:
    """Called by a script before it imports anything large.

    A million objects that stay come with the imports: Python's collector looks at them again and again while they come, and once more
    when the process ends, some two of the six seconds of a short command. Here it looks less often, and not at the end.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # registered first, so called last
