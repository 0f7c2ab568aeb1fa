"""Collect the code blocks and the commands of README.md and docs/*.md.

A comment before a block controls how it is tested; readers of the page do not see it:

    <!-- test: file=hunt.py -->          the block is that file (so is one that begins "# hunt.py")
    <!-- test: skip=needs two GPUs -->   the block is not run, and why
    <!-- test: column=tests -->          each line of JSON is the value of that column of a row
"""

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
SCRIPTS = "train|sample|evaluate|export|plot|serve|watch|check_reward|why"
SCRIPT = re.compile(rf"({SCRIPTS})\.py ")
COMMAND = re.compile(
    rf"(python3?|accelerate|make|sbatch|srun|whetstone|pip|{SCRIPT.pattern[:-1]}) "
)
BLOCK = re.compile(
    r"(?:^ *<!-- test: (?P<note>.*?) -->\n+)?"
    r"(?:^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<fenced>.*?)^ *```$"
    r"|(?<=\n\n)(?P<plain>(?:    [^\n]*\n|\n(?=    ))+))",
    re.S | re.M,
)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FILE_NAME = re.compile(r"# ([\w.-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    file: str = ""
    skip: str = ""
    column: str = ""

    @property
    def place(self) -> str:
        return f"{self.page} line {self.line}"


def guess_language(text: str) -> str:
    """Return the language of a block that does not name it, "" for plain text."""
    if COMMAND.match(text):
        return "bash"
    return "json" if re.match(r"[\[{]\"", text) else ""


def read_blocks(page: str, text: str) -> list[Block]:
    """Return the blocks of a page, both fenced and indented by four spaces."""
    blocks = []
    for match in BLOCK.finditer(text):
        body = match["fenced"] if match["plain"] is None else match["plain"]
        indent = match["indent"] if match["plain"] is None else " " * 4
        body = re.sub(rf"^{indent}", "", body, flags=re.M)
        key, _, value = (match["note"] or "").partition("=")
        assert key in ("", "file", "skip", "column"), f"{page}: a comment of a block says {key!r}"
        notes = {key: value} if key else {}
        if named := FILE_NAME.match(body):
            notes["file"] = named[1]
        line = text[: match.start()].count("\n") + 1
        language = match["language"] or guess_language(body)
        blocks.append(Block(page, line, language, body, **notes))
    return blocks


def blocks_of(path: Path) -> list[Block]:
    return read_blocks(path.name, path.read_text())


def inline_commands_of(path: Path) -> list[str]:
    """Return the commands in a page's inline code, as `python x.py` where it writes `x.py`."""
    words = INLINE.findall(BLOCK.sub("\n", path.read_text()))
    lines = [" ".join(word.split()) for word in words]
    return [
        f"python {line}" if SCRIPT.match(line) else line for line in lines if COMMAND.match(line)
    ]
