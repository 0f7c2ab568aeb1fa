"""Provide the shared parts of methods that learn from rows: truncation of datums, and metrics of
each held-out set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.types import Datum, Problem, TensorData


def truncate_datum(data: Any, datum: Datum, row: Problem) -> Datum:
    """Truncate a datum to `max_row_tokens`, if the data settings cut rows that are too long.

    The answer loses its end, including its end token, so that the model does not learn to stop in
    the middle of a sentence. Raises UserError if nothing of the answer would remain.
    """
    longest = data.max_row_tokens
    if data.on_too_long != "cut" or longest is None or datum.model_input.length < longest:
        return datum
    cut = longest - 1  # inputs exclude the last token
    fields = {
        name: TensorData(value.array[:cut], value.dtype)
        for name, value in datum.loss_fn_inputs.items()
    }
    if not any(np.any(fields[name].array) for name in ("weights", "mask") if name in fields):
        raise UserError(
            f"row {row.index} of {row.tag}{f' ({row.place})' if row.place else ''}: its prompt "
            f"fills max_row_tokens {longest}, so nothing of the answer remains: set "
            "max_prompt_tokens as well, or raise max_row_tokens"
        )
    return Datum(datum.model_input.truncate(cut), fields)


def evaluate_by_tag(
    rows: Sequence[Problem], evaluate: Callable[[Sequence[Problem]], Mapping[str, float]]
) -> dict[str, float]:
    """Return `test/...` of all rows and, if the rows come from several data sets, `test/<tag>/...`
    of each data set.
    """
    metrics = {f"test/{name}": value for name, value in evaluate(rows).items()}
    sets: dict[str, list[Problem]] = {}
    for row in rows:
        sets.setdefault(row.tag, []).append(row)
    for tag, members in sorted(sets.items()) if len(sets) > 1 else ():
        metrics |= {
            f"test/{tag.replace('/', '-')}/{name}": value
            for name, value in evaluate(members).items()
        }
    return metrics
