"""List the row formats, choose that of a data set, and convert its rows to problems."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.data.code_formats import APPS, MBPP, HumanEval, LiveCodeBench
from rl.data.evaluation_formats import GSM8K, MATH, AIMEFormat, IFEvalFormat, MultipleChoiceFormat
from rl.data.prompt_template import PromptTemplate
from rl.data.row_formats import (
    AlpacaFormat,
    ColumnNames,
    ColumnsFormat,
    MessagesFormat,
    PreferencesFormat,
    RowFormat,
    ShareGPTFormat,
    TextFormat,
    UnpairedFormat,
    is_chat,
    read_tools,
)
from rl.data.row_images import RowImages
from rl.data.row_readers import Columns, Row
from rl.types import Problem

# The formats by name, in the order in which `detect_format` tries them.
ROW_FORMATS: dict[str, type[RowFormat]] = {
    "humaneval": HumanEval,
    "mbpp": MBPP,
    "apps": APPS,
    "livecodebench": LiveCodeBench,
    "ifeval": IFEvalFormat,
    "columns": ColumnsFormat,  # before multiple_choice: a prompt is used as it is
    "multiple_choice": MultipleChoiceFormat,
    "messages": MessagesFormat,
    "sharegpt": ShareGPTFormat,
    "alpaca": AlpacaFormat,
    "gsm8k": GSM8K,
    "preferences": PreferencesFormat,
    "math": MATH,
    "text": TextFormat,
    "unpaired": UnpairedFormat,
    "aime": AIMEFormat,
}


def detect_format(columns: Columns, names: ColumnNames) -> str:
    """Return the name of the format of a row, by its columns."""
    return next(
        (name for name, form in ROW_FORMATS.items() if form.matches(columns, names)), "columns"
    )


def choose_format(format: str, columns: Columns, names: ColumnNames) -> RowFormat:
    """Return the reader of all rows.

    format: its name; "auto": it is detected from the columns of the first row, and is "columns" if
    the caller named a prompt or response column, even one that the row lacks.
    """
    if format == "auto":
        is_default = names.prompt == "prompt" and names.response is None
        format = detect_format(columns, names) if is_default else "columns"
    if names.answer == "answer" and "answer" not in columns:
        names = replace(names, answer=None)  # the default column may be absent
    return ROW_FORMATS[format](names)


@dataclass(frozen=True)
class RowParser:
    """Convert rows to problems: read their contents, wrap prompts, insert images, set the tag.

    image_column: see `RowImages`.
    """

    template: PromptTemplate
    tag: str
    image_column: str | None = None

    def parse(self, row: Row, reader: RowFormat, index: int) -> list[Problem]:
        """Return the problems of a row, with consecutive indices from `index`. Raises BadRow for a
        bad row, for a row of another format, and for bad images or tools.
        """
        columns = row.columns
        contents = reader.read_all(columns)
        images = RowImages(self.image_column, row.folder)
        image_columns = images.image_columns(columns)
        chat = is_chat(columns, reader.names.prompt)
        problems = []
        for number, content in enumerate(contents):
            prompt = images(self.template(content.messages, columns), columns)
            problems.append(
                replace(
                    content,
                    messages=prompt,
                    meta={k: v for k, v in content.meta.items() if k not in image_columns},
                    tag=self.tag,
                    index=index + number,
                    place=row.place
                    if len(contents) == 1
                    else f"{row.place}, instance {number + 1}",
                    chat=chat,
                    tools=read_tools(columns) if prompt else (),
                )
            )
        return problems
