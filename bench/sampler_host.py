"""Count what the host does for a sampler on a GPU, without a GPU, beside the targets of the design.

    python bench/sampler_host.py      # results/sampler_host.csv: two minutes

tests/sampler/host_counts.py counts, with a device that records instead of running.
"""

import sys
from pathlib import Path

# Import from the repository root: kernels.py of this folder would shadow the package.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path += [f"{sys.path[0]}/tests", f"{sys.path[0]}/tests/sampler"]
from host_counts import measure  # noqa: E402

from bench.harness import RESULTS, make_parser, write_rows  # noqa: E402

if __name__ == "__main__":
    output = make_parser(__doc__, output=RESULTS / "sampler_host.csv").parse_args().output
    write_rows(output, measure())
