"""Select the rollouts that the report shows, within a number of bytes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl.jsonl import Row, get_evaluation_step
from rl.reporting.episode_html import StoredEpisode
from rl.reporting.html_report import encode_json, render_turns
from rl.reporting.metric_plots import is_number
from rl.reporting.paired_comparison import average_by_problem, make_problem_key, score_row
from rl.reporting.update_files import TOKEN_VALUES, add_token_values
from rl.sanitize import sanitize_text

_TEXT_LIMIT, _PIECE_LIMIT, _TOKENS = 4000, 200, 1000  # characters; characters; tokens of an answer
_FILE_BYTES = 32 << 20  # bytes that are read of a file of rollouts
_EPISODE_BYTES = 200_000  # characters of a rendered episode
_BATCHES, _GROUPS, _ANSWERS = 12, 6, 8  # batches; groups of a batch; answers of a group
_ALARM_BATCHES = 4  # more batches, of steps with alarms
_EVALUATIONS = 12  # of each stage and kind
_PROBLEMS = 60  # held-out problems that are shown
Item = TypeVar("Item")
_BATCH_FILE = re.compile(r"step_(\d{6,})(?:_(.+))?\.jsonl")


@dataclass(frozen=True)
class EvaluationFile:
    """Hold the location of the held-out answers of an evaluation."""

    path: Path
    stage: str
    step: int
    greedy: bool


class _ByteBudget:
    """Count the bytes of the rows that fit in."""

    def __init__(self, limit: int):
        self.remaining = limit

    def spend(self, item: Any) -> bool:
        """Return whether the item fits in, and count it if it does."""
        size = len(encode_json(item))
        if size > self.remaining:
            return False
        self.remaining -= size
        return True


def list_evaluations(folder: Path) -> list[EvaluationFile]:
    """Return the files of held-out answers below the `folder` of rollouts, by step."""
    files = []
    for path in folder.glob("*-eval-*.jsonl"):
        step = get_evaluation_step(path.name)
        if step is not None:
            stage, _, rest = path.name.rpartition("-eval-")
            greedy = rest.startswith("greedy-")
            files.append(EvaluationFile(path, stage, step, greedy))
    return sorted(files, key=lambda file: (file.step, file.greedy, file.stage))


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of rollouts, of its first 32 MiB. Lines that are no JSON objects
    are skipped: a run may still write the file.
    """
    rows = []
    with path.open("rb") as file:
        for line in file.read(_FILE_BYTES).split(b"\n"):
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def select_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items at equal distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def collect_rollouts(
    folder: Path, limit: int, alarms: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the rollouts that the page shows, in at most `limit` bytes of JSON.

    `evaluations`: the same problems at up to 12 evaluations of each stage. `batches`: groups of
    answers of up to 12 training steps, best and worst among them, and of up to 4 more steps with
    alarms. `token_values`: which of TOKEN_VALUES a batch has. `files`: the names of all files of
    rollouts. `alarms`: the periods of `rl.reporting.curve_report.collect_alarms`.
    """
    files = list_evaluations(folder)
    evaluations = _collect_evaluations(files, _ByteBudget(limit * 2 // 5))
    used = len(encode_json(evaluations))
    batches = _collect_batches(folder, limit - used, alarms)
    return {
        "evaluations": evaluations,
        "batches": batches,
        "token_values": _list_token_values(batches),
        "files": [sanitize_text(path.name, 300) for path in sorted(folder.glob("*.jsonl"))][:2000],
    }


def _collect_evaluations(
    files: Sequence[EvaluationFile], budget: _ByteBudget
) -> list[dict[str, Any]]:
    """Return the answers to the same problems at the selected evaluations."""
    selected: list[EvaluationFile] = []
    for kind in dict.fromkeys((file.stage, file.greedy) for file in files):
        selected += select_evenly([f for f in files if (f.stage, f.greedy) == kind], _EVALUATIONS)
    evaluations = [(file, read_rollouts(file.path)) for file in selected]
    entries: list[dict[str, Any]] = []
    for file, rows in evaluations:
        scores = [score for row in rows if (score := score_row(row)) is not None]
        entries.append(
            {
                "stage": sanitize_text(file.stage, _PIECE_LIMIT),
                "step": file.step,
                "greedy": file.greedy,
                "file": sanitize_text(file.path.name, _PIECE_LIMIT),
                "answers": len(rows),
                "mean": sum(scores) / len(scores) if scores else None,
                "rows": [],
            }
        )
    # of several answers to a problem, the first is shown
    by_problem = [{make_problem_key(row): row for row in reversed(rows)} for _, rows in evaluations]
    for number, key in enumerate(_choose_problems(evaluations)):
        answers = [
            {"problem": number, **make_answer(shown[key])} if key in shown else None
            for shown in by_problem
        ]
        if not budget.spend(answers):
            continue
        for entry, answer in zip(entries, answers, strict=True):
            if answer is not None:
                entry["rows"].append(answer)
    return entries


def _choose_problems(
    evaluations: Sequence[tuple[EvaluationFile, Sequence[Mapping[str, Any]]]],
) -> list[str]:
    """Return problems in turn of those that were learned, were lost, stayed wrong, stayed right.

    The last stage with evaluations by samples decides.
    """
    sampled = [item for item in evaluations if not item[0].greedy] or evaluations
    if not sampled:
        return []
    last, last_rows = sampled[-1]
    first_rows = next(rows for file, rows in sampled if file.stage == last.stage)
    before, after = average_by_problem(first_rows), average_by_problem(last_rows)
    kinds: dict[tuple[bool, bool], list[str]] = {
        (False, True): [], (True, False): [], (False, False): [], (True, True): []
    }  # fmt: skip
    for key, value in after.items():
        kinds[(before.get(key, value) > 0.5, value > 0.5)].append(key)
    in_turn = itertools.chain(*itertools.zip_longest(*kinds.values()))
    return [key for key in in_turn if key is not None][:_PROBLEMS]


def _collect_batches(
    folder: Path, limit: int, alarms: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups of answers of training steps at equal distances, and of steps with alarms."""
    matches = [
        (int(match[1]), match[2] or "", path)
        for path in folder.glob("step_*.jsonl")
        if (match := _BATCH_FILE.fullmatch(path.name))
    ]
    matches.sort()
    alarming = [match for match in matches if _name_alarms(match[0], alarms)]
    chosen = {*select_evenly(matches, _BATCHES), *select_evenly(alarming, _ALARM_BATCHES)}
    selected = sorted(chosen)
    batches = []
    for step, stage, path in selected:
        budget = _ByteBudget(limit // len(selected))
        rows = read_rollouts(path)
        add_token_values(rows, path.with_suffix(".update.safetensors"))
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            groups.setdefault(_make_group_key(row), []).append(row)
        batch: dict[str, Any] = {
            "step": step,
            "stage": sanitize_text(stage, _PIECE_LIMIT),
            "alarms": _name_alarms(step, alarms),
            "file": sanitize_text(path.name, _PIECE_LIMIT),
            "page": path.with_suffix(".html").name if path.with_suffix(".html").is_file() else None,
            "num_answers": len(rows),
            "groups": [],
        }
        for group in _choose_groups(list(groups.values())):
            entry = {**_describe_problem(group[0]), "size": len(group), "answers": []}
            # from the highest to the lowest reward, both ends among them
            ordered = sorted(group, key=get_reward, reverse=True)
            for answer in map(make_answer, select_evenly(ordered, _ANSWERS)):
                if budget.spend(answer):
                    entry["answers"].append(answer)
            if entry["answers"] and budget.spend({**entry, "answers": []}):
                batch["groups"].append(entry)
        batches.append(batch)
    return batches


def _list_token_values(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of TOKEN_VALUES the answers of batches have. The spans of a rendered episode
    have the classes of their bands.
    """
    answers = [
        answer for batch in batches for group in batch["groups"] for answer in group["answers"]
    ]
    return [
        name
        for name in TOKEN_VALUES
        if any(
            name in item or re.search(rf'<span class="[^"]* {name[0]}\d', item.get("html", ""))
            for item in answers
        )
    ]


def _name_alarms(step: int, alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the alarms that are on at a step."""
    return sorted({item["name"] for item in alarms if item["first"] <= step <= item["last"]})


def _make_group_key(row: Row) -> str:
    """Return the key of the row's group."""
    return json.dumps([row.get("group"), make_problem_key(row)], default=str)


def get_reward(row: Row) -> float:
    """Return the reward of a row; 0 if it has none."""
    reward = row.get("reward")
    return float(reward) if is_number(reward) else 0.0


def _choose_groups(groups: Sequence[Sequence[Row]]) -> list[Any]:
    """Return groups: the widest range of rewards, the lowest and the highest mean, then others at
    equal distances.
    """
    if len(groups) <= _GROUPS:
        return list(groups)
    rewards = [[get_reward(row) for row in group] for group in groups]
    means = [sum(values) / len(values) for values in rewards]
    ranges = [max(values) - min(values) for values in rewards]
    order = range(len(groups))
    best = [max(order, key=lambda i: ranges[i]), min(order, key=lambda i: means[i]),
            max(order, key=lambda i: means[i]), *select_evenly(order, _GROUPS)]  # fmt: skip
    return [groups[i] for i in list(dict.fromkeys(best))[:_GROUPS]]


def _describe_problem(row: Row) -> dict[str, Any]:
    """Return prompt, expected answer and name of a row's problem, as bounded text."""
    fields = {
        "tag": row.get("tag"),
        "number": row.get("problem"),
        "prompt": row.get("prompt"),
        "expected": row.get("answer"),
    }
    return {
        name: sanitize_text(str(value), _TEXT_LIMIT)
        for name, value in fields.items()
        if value is not None and value != ""
    }


def make_answer(row: Row) -> dict[str, Any]:
    """Return a row of rollouts as the page shows it, with bounded text.

    An answer with tokens has `tokens` and `logprobs` (None: not sampled), otherwise `text`. An
    episode of several turns has `html`, which rl.reporting.episode_html renders.
    """
    episode = StoredEpisode(row)
    answer: dict[str, Any] = {
        "reward": _round(row.get("reward")),
        "advantage": _round(row.get("advantage")),
        "stop": sanitize_text(episode.stop_reason, _PIECE_LIMIT),
        "length": sum(map(_measure_length, episode.answers)),
        "unit": "tokens" if any(item.get("tokens") for item in episode.answers) else "characters",
        "metrics": _bound_metrics(row.get("metrics")),
        "score": score_row(row),
        **_describe_problem(row),
    }
    if row.get("error"):
        answer["error"] = sanitize_text(str(row["error"]), _TEXT_LIMIT)
    if episode.has_several_turns:
        return {**answer, **_render_episode(episode)}
    tokens = row.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        return {**answer, "text": sanitize_text(str(row.get("response", "")), _TEXT_LIMIT)}
    answer["tokens"] = [sanitize_text(str(piece), _PIECE_LIMIT) for piece in tokens[:_TOKENS]]
    for name, digits in {"logprobs": 4, "advantages": 4, **dict.fromkeys(TOKEN_VALUES, 3)}.items():
        values = row.get(name)
        if isinstance(values, list) and len(values) == len(tokens):
            answer[name] = [_round(value, digits) for value in values[:_TOKENS]]
    return answer


def _measure_length(answer: Row) -> int:
    """Return the number of tokens of an answer; characters if it has no tokens."""
    tokens = answer.get("tokens")
    return (
        len(tokens) if isinstance(tokens, list) and tokens else len(str(answer.get("response", "")))
    )


def _render_episode(episode: StoredEpisode) -> dict[str, str]:
    """Return the `html` of an episode of several turns; a `text` if it is too long or malformed."""
    shown = {name: episode.row.get(name) for name in ("advantage", "seats")}
    try:
        html = render_turns(_bound_strings({**shown, "turns": episode.turns}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return {"text": sanitize_text(f"this episode cannot be shown: {error}", _TEXT_LIMIT)}
    if len(html) > _EPISODE_BYTES:
        return {"text": f"[an episode of {len(episode.turns)} turns, too long for this page]"}
    return {"html": html}


def _round(value: Any, digits: int = 4) -> float | None:
    """Return the number with `digits` significant digits; None if it is no finite number."""
    return float(f"{value:.{digits}g}") if is_number(value) or isinstance(value, bool) else None


def _bound_metrics(metrics: Any) -> dict[str, float | None]:
    """Return the first metrics of an answer."""
    items = list(metrics.items())[:20] if isinstance(metrics, Mapping) else []
    return {sanitize_text(str(name), _PIECE_LIMIT): _round(value) for name, value in items}


def _bound_strings(value: Any, depth: int = 0) -> Any:
    """Return the value with its texts and lists bounded; deep parts become text."""
    if isinstance(value, str):
        return sanitize_text(value, _TEXT_LIMIT)
    if depth > 8:
        return sanitize_text(str(value), _PIECE_LIMIT)
    if isinstance(value, Mapping):
        items = list(value.items())[:100]
        return {str(key): _bound_strings(item, depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_bound_strings(item, depth + 1) for item in value[:_TOKENS]]
    return value
