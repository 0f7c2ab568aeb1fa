"""Measure rewards per second through the worker processes, for cheap rewards.

    python bench/reward_pool.py [REPETITIONS]

Two workers score 512 short items at a time. The script prints the median and the best repetition.
The trainer scores registered bounded rewards (exact_match, gsm8k) in the trainer process, unless a
reward is named by its address, as here.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rl.rewards import Scorer  # noqa: E402

ITEMS = [
    (f"{i}+1=", f"\\boxed{{{i + 1}}}" if i % 2 else str(i + 1), {"answer": str(i + 1)})
    for i in range(512)
]


def measure(reward: str, repetitions: int) -> tuple[float, float]:
    """Return the (median, best) rewards per second."""
    with Scorer(reward, workers=2) as scorer:
        scorer.score_many(ITEMS)
        # Start both workers and settle the chunk size before timing.
        scorer.score_many(ITEMS)
        seconds = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            scores = scorer.score_many(ITEMS)
            seconds.append(time.perf_counter() - begin)
    assert all(score.error is None for score in scores), scores[0]
    return len(ITEMS) / statistics.median(seconds), len(ITEMS) / min(seconds)


if __name__ == "__main__":
    for name in ("rl.rewards.text:exact_match", "rl.rewards.math_reward:gsm8k"):
        print(
            f"{name:30} "
            f"{'{:.0f} a second, at best {:.0f}'.format(*measure(name, int((sys.argv[1:] or ['20'])[0])))}"
        )
