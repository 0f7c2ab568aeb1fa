"""What methods that learn from rows share: where a datum is cut off, figures of each held-out set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.types import Datum, Problem, TensorData


def cut_to(data: Any, datum: Datum, row: Problem) -> Datum:
    """The datum without what lies beyond `max_row_tokens`, where the data settings say that too
    long rows are cut.

    The answer loses its end, its end mark included: nothing teaches the model to stop in the middle
    of a sentence. UserError where nothing of the answer would be left.
    """
    longest = data.max_row_tokens
    if data.on_too_long != "cut" or longest is None or datum.model_input.length < longest:
        return datum
    cut = longest - 1  # inputs lack the last token
    fields = {
        name: TensorData(value.array[:cut], value.dtype)
        for name, value in datum.loss_fn_inputs.items()
    }
    if not any(np.any(fields[name].array) for name in ("weights", "mask") if name in fields):
        raise UserError(
            f"row {row.index} of {row.tag}{f' ({row.place})' if row.place else ''}: its prompt alone takes max_row_tokens {longest}, cut off "
            "there nothing of the answer is left: give max_prompt_tokens as well, or raise max_row_tokens"
        )
    return Datum(datum.model_input.cut(cut), fields)


def by_tag(
    rows: Sequence[Problem], evaluate: Callable[[Sequence[Problem]], Mapping[str, float]]
) -> dict[str, float]:
    """`test/...` of all rows and, of several data sets, `test/<tag>/...` of each."""
    found = {f"test/{name}": value for name, value in evaluate(rows).items()}
    sets: dict[str, list[Problem]] = {}
    for row in rows:
        sets.setdefault(row.tag, []).append(row)
    for tag, members in sorted(sets.items()) if len(sets) > 1 else ():
        found |= {
            f"test/{tag.replace('/', '-')}/{name}": value
            for name, value in evaluate(members).items()
        }
    return found
