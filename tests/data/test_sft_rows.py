"""Test what a stage reads from any file (lengths, held-out sets, stops, flags), and what SFT learns
and measures.
"""

import logging
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_helpers import get_contents, make_sum_rows, write_rows
from helpers import call, make_worker
from whole_runs import train

from rl.algorithms import METHODS, SFT, SftSettings
from rl.algorithms.sft import SftOptions, make_response_datum
from rl.config import (
    AnswerDataSettings,
    DataSettings,
    RunSettings,
    SettingsError,
    override_settings,
    read_run,
)
from rl.data import LengthLimits, ProblemSet, RowCheck, load_problems, select_good_rows
from rl.errors import UserError
from rl.jsonl import read_jsonl
from rl.models import load_skeleton
from rl.renderers import get_renderer
from rl.rollout import supervised_datum
from rl.trainer import load_held_out_problems, load_training_problems
from rl.types import Problem


@pytest.fixture(scope="module")
def tokenizer():
    return load_skeleton("tiny:addition", tokenizer=None).tokenizer


@pytest.fixture(scope="module")
def plain(tokenizer):
    return get_renderer("plain", tokenizer)


def test_a_folder_without_a_test_split_holds_out_its_last_tenth(tmp_path):
    write_rows(tmp_path / "d" / "part-1.jsonl", *make_sum_rows(20))
    write_rows(tmp_path / "d" / "part-2.jsonl", *make_sum_rows(20, 40))
    rows, held_out = load_training_problems(DataSettings(dataset=str(tmp_path / "d")), True)
    assert (len(rows), len(held_out)) == (36, 4)
    assert not set(get_contents(rows)) & set(get_contents(held_out))


def test_several_held_out_sets_keep_their_names(tmp_path):
    files = [
        str(write_rows(tmp_path / f"{name}.jsonl", *make_sum_rows(n)))
        for name, n in (("main", 40), ("easy", 3), ("hard", 5))
    ]
    main, easy, hard = files
    data = DataSettings(dataset=main, eval_dataset=easy, more_eval_datasets=(hard,))
    for held_out in (load_held_out_problems(data), load_training_problems(data, True)[1]):
        assert Counter(p.tag for p in held_out) == {"easy": 3, "hard": 5}
    for name in ("", " "):
        with pytest.raises(UserError, match="the name of a data set is empty"):
            load_held_out_problems(DataSettings(dataset=main, eval_dataset=name))


def check(renderer, sampled=0, reads=("response",), **limits):
    info = {"max_context": 200}
    return RowCheck(info, renderer, "rows", reads, sampled, limits=LengthLimits(**limits))


def load_rows(folder, *lengths):
    """Return rows by the tokens of their prompts (without the "=") and answers."""
    rows = [{"prompt": "1" * n + "=", "completion": "2" * m} for n, m in lengths]
    return load_problems(write_rows(folder / "rows.jsonl", *rows))


def test_too_long_rows_are_named_counted_skipped_or_cut(tmp_path, caplog, plain):
    problems = load_rows(tmp_path, (3, 2), (30, 2), (3, 30))
    limits = {"max_prompt_tokens": 10, "max_row_tokens": 20}
    with caplog.at_level(logging.WARNING):
        remaining = select_good_rows(problems, check(plain, **limits), "error")
    assert get_contents(remaining) == ["111="] and "2 bad rows beside 1 good" in caplog.text
    assert "rows.jsonl line 2" in caplog.text and "rows.jsonl line 3" in caplog.text
    says = r"line 2.*prompt of 31 tokens, more than max_prompt_tokens 10.*--on-too-long"
    with pytest.raises(UserError, match=says):
        select_good_rows(problems, check(plain, max_prompt_tokens=10, on_too_long="error"), "error")
    cut = select_good_rows(problems, check(plain, **limits, on_too_long="cut"), "error")
    assert get_contents(cut) == ["111=", "1" * 9 + "=", "111="]
    assert [p.index for p in cut] == [0, 1, 2]
    settings = SftSettings(data=AnswerDataSettings(max_row_tokens=20, on_too_long="cut"))
    (datum,) = SFT(settings).build_datums([cut[2]], plain, None, 0)
    whole = make_response_datum(cut[2], plain)
    assert datum.model_input.to_ints() == whole.model_input.to_ints()[:19]
    assert datum.loss_fn_inputs["weights"].array.sum() == 16
    # sampled: leaves space for max_tokens
    asks = select_good_rows(problems, check(plain, sampled=8, reads=(), max_row_tokens=20), "error")
    assert get_contents(asks) == ["111=", "111="]


def test_a_row_that_would_be_cut_before_its_answer_is_named(tmp_path, caplog, plain):
    problems = load_rows(tmp_path, (3, 2), (19, 2))
    cut = check(plain, max_row_tokens=20, on_too_long="cut")
    with pytest.raises(UserError, match=r"line 2: its prompt fills max_row_tokens 20"):
        select_good_rows(problems, cut, "error")
    with caplog.at_level(logging.WARNING):
        assert get_contents(select_good_rows(problems, cut, "skip")) == ["111="]
    assert "line 2" in caplog.text


def test_a_conversation_may_be_cut_after_any_trained_message(plain):
    talk = [("user", "1="), ("assistant", "2"), ("user", "3" * 30)]
    messages = tuple({"role": role, "content": content} for role, content in talk)
    row = Problem(messages, response="4", place="rows.jsonl line 1")
    last = check(plain, max_row_tokens=20, on_too_long="cut")
    with pytest.raises(UserError, match="line 1: its prompt fills max_row_tokens 20"):
        last(row)
    settings = SftSettings(data=AnswerDataSettings(max_row_tokens=20, on_too_long="cut"))
    assert replace(last, train_on=SFT(settings).train_on)(row) == row
    (datum,) = SFT(settings).build_datums([row], plain, None, 0)
    assert datum.model_input.length == 19 and datum.loss_fn_inputs["weights"].array.sum() == 2


def test_the_bad_answer_of_a_pair_must_fit_for_kto(plain):
    row = Problem(({"role": "user", "content": "1="},), response="2", rejected="3" * 300)
    kto = METHODS["kto"](METHODS["kto"].Settings())
    fits = replace(check(plain), longest=kto.longest)
    for place in ("", "rows.jsonl line 1"):  # generated, and read from a file
        with pytest.raises(UserError, match="does not fit: its longest sequence takes 303 tokens"):
            fits(replace(row, place=place))


def test_the_models_context_is_as_on_bad_row_says(tmp_path, plain):
    problems = load_rows(tmp_path, (1, 1), (300, 1))
    with pytest.raises(UserError, match="does not fit"):
        select_good_rows(problems, check(plain), "error")
    assert len(select_good_rows(problems, check(plain), "skip")) == 1
    assert len(select_good_rows(problems, check(plain, on_too_long="skip"), "error")) == 1


def test_flags_with_dots_reach_the_template_and_evaluate_takes_data_flags(tmp_path):
    words = ["grpo", "--template.enable_thinking", "false", "--template.x", "1", "--stop", "\n"]
    run = read_run(words, METHODS, tmp_path / "no.yaml", RunSettings)
    settings = run.stages[0].settings
    assert settings.data.template == (("enable_thinking", "false"), ("x", "1"))
    assert settings.sampling.stop == ("\n",)
    data, sampling = override_settings(
        (settings.data, settings.sampling),
        ["--prompt-column", "q", "--stop", "a", "b", "--template.y", "2"],
    )
    assert (data.prompt_column, sampling.stop) == ("q", ("a", "b"))
    assert data.template == (("enable_thinking", "false"), ("x", "1"), ("y", "2"))
    with pytest.raises(SettingsError, match="did you mean --prompt-column"):
        override_settings((data, sampling), ["--prompt-colum", "q"])


def test_stop_strings_end_an_answer_before_them(tokenizer, plain):
    renderer = plain.with_stops(["3", "+"])
    tokens = tokenizer.encode("124+53", add_special_tokens=False)
    assert renderer.parse_response(tokens) == ({"role": "assistant", "content": "124"}, True)
    assert renderer.parse_response(tokens[:2]) == ({"role": "assistant", "content": "12"}, False)
    assert renderer.get_stop_sequences()[-2:] == ["3", "+"]


# ---------------------------------------------------------------------------------------------- SFT


def test_all_turns_are_learnt_by_default_and_a_text_whole(plain):
    talk = [("user", "1+1="), ("assistant", "2"), ("user", "2+2=")]
    row = Problem(tuple({"role": role, "content": text} for role, text in talk), {}, "4")

    def count_trained(problem, **options):
        method = SFT(SftSettings(sft=SftOptions(**options)))
        (datum,) = method.build_datums([problem], plain, None, 0)
        return datum.loss_fn_inputs["weights"].array.sum()

    # "2", "4" and the end mark of each
    assert count_trained(row) == count_trained(row, train_on="all_assistant") == 4
    assert count_trained(row, train_on="last_assistant") == 2
    # four of five characters have a predecessor, plus EOS
    assert count_trained(Problem((), {}, "1+1=2")) == 5
    output = SFT(SftSettings()).describe_data(ProblemSet([row]), plain)
    assert "every message of the assistant" in output and f"{4 / 11:.1%}" in output


@pytest.mark.parametrize("fused", [True, False])
def test_token_accuracy_is_that_of_the_plain_logits(fused):
    worker = make_worker(fused=fused)
    rng = np.random.default_rng(0)
    datums = [
        supervised_datum(rng.integers(0, 14, n).tolist(), (rng.random(n) < 0.6).astype(np.float32))
        for n in (4, 9, 6, 12)
    ]
    words = ("cross_entropy", {"token_accuracy": 1.0}, 1.0, False)
    _, sums = call(worker, "forward_backward", 0, datums, *words)
    model = worker.learners[0].model
    right = tokens = loss = 0.0
    for datum in datums:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0].double()
        targets = datum.loss_fn_inputs["target_tokens"].array
        for t in np.flatnonzero(datum.loss_fn_inputs["weights"].array):
            right += int(logits[t].argmax()) == targets[t]
            loss -= float(logits[t].log_softmax(-1)[targets[t]])
            tokens += 1
    assert sums["argmax_match:sum"] == right and 0 < right < tokens
    assert sums["weights:sum"] == tokens
    assert sums["loss:sum"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_sft_without_a_reward_measures_held_out_rows_keeps_the_best_and_counts_epochs(tmp_path):
    rows = [{"prompt": f"{a}+{a}=", "completion": str(2 * a)} for a in range(10, 60)]
    rows[7]["completion"] = "1" * 40  # dropped, so no part of an epoch
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    words = "--epochs 2 --batch-size 8 --eval-every 3 --learning-rate 3e-3 --max-row-tokens 20"
    log = train(f"sft --dataset {path} {words}", tmp_path / "run")
    assert log[-1]["step"] == math.ceil(2 * 44 / 8) == 11
    losses = {row["step"]: row["test/loss"] for row in log if "test/loss" in row}
    assert losses.keys() == {0, 3, 6, 9, 11} and losses[11] < losses[0]
    assert all(0 <= row.get("test/token_accuracy", 0) <= 1 for row in log)
    saved = read_jsonl(tmp_path / "run" / "checkpoints.jsonl")
    best = [row for row in saved if row["kind"] == "best"][-1]
    assert best["metric"] == "test/loss"
    assert best["value"] == min(losses[step] for step in losses if step)
