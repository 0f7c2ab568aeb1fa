"""Test that a short command spends no time in Python's garbage collector: `rl.startup`."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

AT_THE_END = """
import atexit, gc
atexit.register(lambda: print("frozen at the end:", gc.get_freeze_count() > 0))  # registered before, so called after
from rl.startup import reduce_gc
reduce_gc()
print("looks less often:", gc.get_threshold()[0] > 10_000, "looks:", gc.isenabled(), "frozen now:", gc.get_freeze_count() > 0)
atexit.register(lambda: print("frozen while others end:", gc.get_freeze_count() > 0))
"""


def test_the_collector_looks_less_often_and_not_at_the_end():
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "looks less often: True looks: True frozen now: False",
        "frozen while others end: False",
        "frozen at the end: True",
    ]


def test_every_script_that_imports_torch_begins_so():
    for name in ("train", "sample", "evaluate", "export", "serve"):
        lines = (REPO / f"{name}.py").read_text().split('if __name__ == "__main__":')[1]
        assert 0 < lines.index("reduce_gc()") < lines.index("from rl.trainer import"), name
