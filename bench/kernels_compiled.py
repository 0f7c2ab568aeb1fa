"""Compile the sampler's kernels, and the head's Hopper kernels, at the sizes of real models on a
machine without a GPU: registers, spills, shared memory.

    python bench/kernels_compiled.py            # into bench/results/kernels_compiled.csv

The table has a row for each kernel and target.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path by the repository: bench/kernels.py would shadow the package
# `kernels`.
sys.path[0] = str(HERE.parent)
sys.path.append(str(HERE.parent / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        type=int,
        choices=[80, 86, 89, 90, 100, 120],
        default=[80, 90],
        help="compute capabilities",
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "kernels_compiled.csv")
    args = parser.parse_args()
    from test_kernel_compile import assembled, hoppers_kernels, sampler_kernels
    from test_kernel_paged_compile import MODELS, WIDTHS, paged_kernels

    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.writer(file)
        writer.writerow(
            ["target", "kernel", "case", "warps", "registers", "spilled_bytes", "shared_bytes"]
        )
        for target in args.targets:
            cases = [("", *given[:6]) for given in sampler_kernels(target)]
            for kernel, constants, data, warps, stages, _ in (
                hoppers_kernels() if target == 90 else ()
            ):
                flag = "".join(
                    f", {name}" for name in ("ENTROPY", "KEEP", "HAS_C") if constants.get(name)
                )
                cases.append(
                    (
                        f"{constants['TYPE']}, D={constants['D']}{flag}",
                        kernel,
                        constants,
                        data,
                        warps,
                        stages,
                        None,
                    )
                )
            for dtype, heads in [("bf16", given) for given in (*MODELS, *WIDTHS)] + [
                ("fp32", MODELS[1])
            ]:
                name = f"{dtype}, {heads[0]} heads over {heads[1]}, width {heads[2]}"
                for kernel, constants, warps, stages, kinds, _ in paged_kernels(*heads, dtype):
                    cases.append(
                        (
                            name + ", a part" * bool(constants.get("PARTIAL")),
                            kernel,
                            constants,
                            (),
                            warps,
                            stages,
                            kinds,
                        )
                    )
            for case, kernel, constants, data, warps, stages, kinds in cases:
                compiled, registers, spilled = assembled(
                    kernel, dict(constants), data, warps, stages, kinds, Path(folder), target
                )
                row = [
                    f"sm_{target}",
                    kernel.__name__.strip("_"),
                    case,
                    warps,
                    registers,
                    spilled,
                    compiled.metadata.shared,
                ]
                writer.writerow(row)
                file.flush()
                print(*row)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
