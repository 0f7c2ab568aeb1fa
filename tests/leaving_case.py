"""A script of two ranks with work to do at exit: leaving_case.py OUT [raises]

OUT/<rank> has a line for each event, in order.
"""

import atexit
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
HOME, RANK = Path(sys.argv[1]), os.environ["RANK"]


def append_note(word: str) -> None:
    with (HOME / RANK).open("a") as file:
        file.write(word + "\n")


class Left:
    """Write a line at interpreter shutdown, when the names of this file no longer exist."""

    file = os.open(HOME / RANK, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __del__(self, write=os.write):
        write(self.file, b"taken apart\n")


atexit.register(append_note, "registered before")
kept = Left()
from rl import ServiceClient  # noqa: E402

atexit.register(append_note, "registered after")
try:
    with ServiceClient(output_dir=HOME) as service:
        client = service.create_full_training_client("tiny:addition")
        append_note(str(client.save_weights_and_get_sampling_client().version))
finally:
    append_note("finally")
    if "raises" in sys.argv and RANK == "1":
        raise ValueError("of the script's own")
