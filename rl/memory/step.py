"""The shapes of a step's work: the largest micro-batch, what is sampled at once."""

from __future__ import annotations

from rl.memory.given import MicroBatch
from rl.sampler import PAGE, pages_at_most, pool_size


def micro_batch(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    budget: int,
    layout: str,
    world: int,
    hidden: int,
) -> MicroBatch:
    """A rank's largest micro-batch where all prompts and answers are of one length; `groups`,
    `group`: of an optimizer step.

    Follows rl.learner and rl.learner.packing: the budget, a rank's share of the positions, the
    layout that "auto" takes.
    """
    length = prompt + answer
    # answers that share a prompt in one row
    together = max(1, min(group, (budget - prompt) // answer))
    row = prompt + together * answer
    rows = groups * -(-group // together)
    if layout == "auto":
        shared = rows * row * (1 + row / (6 * hidden))
        layout = (
            "shared"
            if together > 1
            and shared < 0.9 * groups * group * length * (1 + length / (12 * hidden))
            else "padded"
        )
    if layout == "shared":
        share = min(budget, -(-rows * row // world))
        fit = max(1, min(rows, share // row))
        return MicroBatch(fit, row, fit * together * length, masked=True)
    share = min(budget, -(-groups * group * length // world))
    fit = max(1, min(groups * group, share // length))
    if layout == "packed":
        return MicroBatch(1, fit * length, fit * length, masked=True)
    return MicroBatch(fit, length, fit * length)


def sampled_at_once(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    kv_cache_tokens: int,
    max_rows: int,
    world: int,
    paged: bool = False,
) -> tuple[int, int]:
    """(prompts, rows) that a rank decodes at once within its budgets. `paged`: as rows are let in,
    which wait when pages run out.
    """
    mine = -(-groups // world)
    if paged:
        rows = min(
            rows_let_in(max(kv_cache_tokens // PAGE, 1), -(-prompt // PAGE), group),
            mine * group,
            max_rows,
        )
        return -(-rows // group), rows
    room = max(1, kv_cache_tokens // max(1, prompt + group * (answer - 1)))
    prompts = min(mine, room, -(-max_rows // group))
    return prompts, min(prompts * group, max_rows)


def rows_let_in(pages: int, prompt_pages: int, group: int) -> int:
    """Rows that an engine lets in at once into a pool of so many pages: a group's prompt once, and
    a page for each row to write to.
    """
    whole, left = divmod(pages, prompt_pages + group)
    return max(whole * group + max(left - prompt_pages, 0), 1)  # one alone has been found to fit


def pool_pages(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    kv_cache_tokens: int,
    max_rows: int,
    world: int,
    streams: bool,
) -> int:
    """Pages that a rank's sampler takes for a call with its share of the groups; `streams`: all,
    for whatever may come.
    """
    asked = [(prompt, group, answer)] * -(-groups // world)
    return pool_size(
        max(kv_cache_tokens // PAGE, 1), None if streams else pages_at_most(asked, PAGE, max_rows)
    )
