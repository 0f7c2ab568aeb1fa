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
from rl.data.row_readers import Columns
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
    """Convert the contents of rows to problems: wrap prompts, insert images, set the tag."""

    template: PromptTemplate
    images: RowImages
    tag: str

    def parse(
        self, content: Problem, columns: Columns, index: int, place: str, prompt_column: str
    ) -> Problem:
        """Return the problem of a row. Raises BadRow for bad images or tools."""
        image_columns = self.images.image_columns(columns)
        prompt = self.images(self.template(content.messages, columns), columns)
        meta = {key: value for key, value in content.meta.items() if key not in image_columns}
        chat = is_chat(columns, prompt_column)
        return replace(
            content,
            messages=prompt,
            meta=meta,
            tag=self.tag,
            index=index,
            place=place,
            chat=chat,
            tools=read_tools(columns) if prompt else (),
        )
