"""Check a thousand random conversations in each renderer for token exactness.

    python bench/token_exactness.py --csv bench/results/token_exactness.csv

In each conversation, an environment sends any text (control tokens as text, few-shot answers, tool
answers) and a policy writes any tokens. The check (`tests/conversations.py::check`) requires that
the trained tokens are exactly the sampled tokens, in order, with their logprobs. It also requires a
single datum as long as each prompt extends the previous prompt and answer. Random numbers replace a
model.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conversations import RENDERERS, check, check_canonical, load  # noqa: E402


def parts(count: int, most: int = 50) -> list[int]:
    """Split `count` into parts of at most `most`."""
    return [min(most, count - begun) for begun in range(0, count, most)]


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--conversations", type=int, default=1000)
parser.add_argument(
    "--tokenizers", type=Path, help="folder of tokenizers (default: of WHETSTONE_DATA)"
)
parser.add_argument("--renderers", nargs="+", default=list(RENDERERS))
parser.add_argument("--csv", type=Path)

if __name__ == "__main__":
    args = parser.parse_args()
    folder = (
        args.tokenizers or Path(os.environ.get("WHETSTONE_DATA", "../shared/data")) / "tokenizers"
    )
    lines = [
        "renderer,conversations,turns,datums,written anew,prompts equal to the template's,seconds"
    ]
    for name in args.renderers:
        begin = time.perf_counter()
        renderer = load(name, folder)
        found: Counter[str] = Counter()
        # The conversations of a part run concurrently, each in a separate thread.
        for seed, count in enumerate(parts(args.conversations)):
            found.update(check(name, renderer, count, seed))
        compared = check_canonical(name, renderer, args.conversations // 4)
        figures = [*found.values(), compared, round(time.perf_counter() - begin, 1)]
        lines.append(",".join([f'"{name}"', *map(str, figures)]))
        print(lines[-1], flush=True)
    if args.csv:
        args.csv.write_text(
            f"# python bench/token_exactness.py {' '.join(sys.argv[1:])}\n"
            + "\n".join(lines)
            + "\n"
        )
