"""Adapt links of docs/ for the site: mkdocs knows only the files of that folder.

A picture of bench/results/ is copied into the site. A link to another file of the repository
becomes its path as code.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PICTURE = re.compile(r"\]\((?:\.\./)+bench/results/([\w.-]+)\)")
OUTSIDE = re.compile(
    r"\[[^]]*\]\((?:\.\./)+((?:[A-Z]+\.md|bench/|recipes/|examples/|slurm/)[^)]*)\)"
)


def on_files(files, config):
    """Add the pictures that pages show."""
    texts = [Path(file.abs_src_path).read_text() for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in PICTURE.findall(text)}):
        source = ROOT / "bench" / "results" / name
        files.append(File.generated(config, f"pictures/{name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return the text of a page with links that the site can follow."""
    up = "../" * page.file.src_uri.count("/")
    markdown = PICTURE.sub(lambda match: f"]({up}pictures/{match[1]})", markdown)
    return OUTSIDE.sub(lambda match: f"`{match[1]}`", markdown)
