"""Render the report: one HTML file with its scripts and data, from the files of templates/."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.errors import UserError, install_command
from rl.reporting.episode_html import BANDS, ENTROPY_BANDS, RATIO_BANDS
from rl.reporting.rollout_report import encode_json
from rl.sanitize import sanitize_text

MAX_REPORT_BYTES = 10_000_000
# Class of the page's body under which tokens are coloured, and the letter of the tokens' classes.
TOKEN_COLOURS = {"by-logprob": "p", "by-entropy": "e", "by-ratio": "r"}
_TEXT_LIMIT = 100_000  # characters of a text in the template
_TEMPLATES = Path(__file__).with_name("templates")


def has_plotly() -> bool:
    """Return whether the package plotly is installed."""
    return "plotly" in sys.modules or importlib.util.find_spec("plotly") is not None


def load_plotly() -> str:
    """Return the script of Plotly, about 5 MB. Raises UserError if the package is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "the report draws its curves with plotly, which is not installed: "
            f"{install_command('report')}"
        ) from error
    return get_plotlyjs()


def _clean(value: Any) -> Any:
    """Return a text without control characters and marks that reverse the direction of writing."""
    return sanitize_text(value, _TEXT_LIMIT) if type(value) is str else value


def make_environment() -> Any:
    """Return jinja2's environment of the templates. Texts are escaped and bounded."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_report(context: Mapping[str, Any], data: Mapping[str, Any], plotly: str) -> str:
    """Return the page. `context` fills the template; its texts are escaped and bounded. `data` is
    what the page's script draws; it becomes JSON. `plotly`: the library's script.
    """
    bands = {"p": BANDS, "e": ENTROPY_BANDS, "r": RATIO_BANDS}
    upper_ends = {kind: [upper for upper, _ in items[:-1]] for kind, items in bands.items()}
    # not templates: nothing in them is filled in
    scripts = {name: (_TEMPLATES / name).read_text("utf-8") for name in ("report.css", "report.js")}
    return (
        make_environment()
        .get_template("report.html")
        .render(
            **context,
            data=encode_json({**data, "bands": upper_ends}),
            style=scripts["report.css"],
            script=scripts["report.js"],
            plotly=plotly.replace("</script", "<\\/script"),
            bands={
                mode: [(f"{kind}{i}", colour) for i, (_, colour) in enumerate(bands[kind])]
                for mode, kind in TOKEN_COLOURS.items()
            },
        )
    )
