"""Generate problems by seed: sums, countdown, sorting, programs of a line, and shapes to count."""

from rl.data.synthetic.addition_dataset import addition
from rl.data.synthetic.countdown_dataset import countdown
from rl.data.synthetic.one_line_functions import oneliners
from rl.data.synthetic.shape_images import shapes
from rl.data.synthetic.sorting_dataset import sorting

__all__ = ["addition", "countdown", "oneliners", "shapes", "sorting"]
