"""Render pages from the files of templates/. A page is one file with its styles and scripts."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.errors import UserError, install_command
from rl.jsonl import Row
from rl.reporting.episode_html import TOKEN_BANDS, StoredEpisode
from rl.sanitize import sanitize_text

MAX_REPORT_BYTES = 10_000_000
_TEXT_LIMIT = 100_000  # characters of a text in a template
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


def encode_json(value: Any) -> str:
    """Return JSON that may stand in a script element: ASCII, without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _clean(value: Any) -> Any:
    """Return a text without control characters and marks that reverse the direction of writing."""
    if type(value) is not str or (value.isprintable() and len(value) <= _TEXT_LIMIT):
        return value
    return sanitize_text(value, _TEXT_LIMIT)


@functools.cache
def _make_environment() -> Any:
    """Return jinja2's environment of the templates. Texts are escaped and bounded."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # styles and scripts are not templates: nothing in them is filled in
    environment.globals["read"] = lambda name: Markup((_TEMPLATES / name).read_text("utf-8"))
    return environment


def render_template(name: str, **context: Any) -> str:
    """Return a page. The texts of `context` are escaped and bounded."""
    return _make_environment().get_template(name).render(context)


def render_turns(row: Row) -> str:
    """Return the turns of an episode as HTML."""
    parts = _make_environment().get_template("episode.html").module
    return parts.turns(StoredEpisode(row).describe())


def render_report(context: Mapping[str, Any], data: Mapping[str, Any], plotly: str) -> str:
    """Return the page. `context` fills the template; its texts are escaped and bounded. `data` is
    what the page's script draws; it becomes JSON. `plotly`: the library's script.
    """
    return render_template(
        "report.html",
        **context,
        data=encode_json({**data, "bands": TOKEN_BANDS}),
        plotly=plotly.replace("</script", "<\\/script"),
    )
