"""Write the table, the CSV file and the plot of scaling.py."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

COLOURS = {"ddp": "#444444", "zero1": "#1f77b4", "zero2": "#2ca02c", "zero3": "#d62728"}
MARKERS = {"ddp": "s", "zero1": "o", "zero2": "^", "zero3": "v"}


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    fields = [asdict(row) if is_dataclass(row) else dict(row) for row in rows]  # type: ignore[arg-type]
    short = [
        {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        for row in fields
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(short[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(short)


def draw(rows: Sequence[Any], path: Path, load: Any) -> None:
    """Plot tokens per second per GPU over the number of GPUs, with a panel for each model size.

    Hollow markers show launches that do not fit.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.model for row in rows))
    columns = min(3, len(names))
    figure, axes = plt.subplots(
        -(-len(names) // columns),
        columns,
        figsize=(4.2 * columns, 3.3 * -(-len(names) // columns)),
        squeeze=False,
    )
    for panel, name in zip(axes.flat, names, strict=False):
        for launch, colour in COLOURS.items():
            mine = [row for row in rows if row.model == name and row.launch == launch]
            at, rate = [row.gpus for row in mine], [row.tokens_per_second_per_gpu for row in mine]
            panel.plot(at, rate, color=colour, linewidth=0.8, alpha=0.5)
            for fits in (True, False):
                points = [
                    (row.gpus, row.tokens_per_second_per_gpu) for row in mine if row.fits is fits
                ]
                panel.scatter(
                    *zip(*points, strict=True) if points else ([], []),
                    s=26,
                    marker=MARKERS[launch],
                    color=colour if fits else "white",
                    edgecolors=colour,
                    zorder=3,
                    label=launch if fits else None,
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        panel.set_ylim(bottom=0)
        panel.set_title(name)
        panel.grid(alpha=0.25)
    for panel in list(axes.flat)[len(names) :]:
        panel.set_visible(False)
    for panel in axes[-1]:
        panel.set_xlabel("GPUs")
    for row_of_panels in axes:
        row_of_panels[0].set_ylabel("tokens/s of each GPU")
    axes[0][0].legend(fontsize=8, loc="lower left")
    what = f"{load.answers} answers of {load.answer} tokens for each GPU (hollow: does not fit)"
    figure.suptitle(f"A GRPO step, modelled: {what}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def show(rows: Sequence[Any]) -> None:
    """Print the best launch that fits for each model size and number of GPUs.

    If no launch fits, print the launch that needs the least memory.
    """
    from rich.console import Console
    from rich.table import Table

    page = Table(
        title="The fastest launch that fits (of those that do not, the smallest)",
        title_justify="left",
    )
    heads = (
        "model",
        "GPUs",
        "launch",
        "tp",
        "GiB",
        "traffic GiB",
        "sample s",
        "train s",
        "traffic s",
        "driver s",
        "tok/s/GPU",
        "limit",
    )
    for head in heads:
        page.add_column(head, justify="left" if head in ("model", "launch", "limit") else "right")
    for name in dict.fromkeys(row.model for row in rows):
        for world in dict.fromkeys(row.gpus for row in rows):
            here = [row for row in rows if row.model == name and row.gpus == world]
            r = max(
                (row for row in here if row.fits),
                key=lambda row: row.tokens_per_second_per_gpu,
                default=None,
            )
            r = r or min(here, key=lambda row: row.memory_gib)
            seconds = (f"{value:.1f}" for value in (r.sample_s, r.train_s, r.traffic_s, r.driver_s))
            launch = r.launch if r.fits else f"({r.launch})"
            page.add_row(
                name,
                str(world),
                launch,
                str(r.sampler_tp),
                f"{r.memory_gib:.0f}",
                f"{r.traffic_gib:.0f}",
                *seconds,
                f"{r.tokens_per_second_per_gpu:,.0f}",
                r.limit,
            )
        page.add_section()
    Console(width=130, highlight=False).print(page)
