"""Test bench/architectures.py on a dozen architectures (all kinds of attention, experts, states),
and that it reports injected faults.
"""

import copy

import pytest
from safetensors.torch import load_file, save_file
from test_architectures import make_params, one_thread  # noqa: F401  (a fixture of its own)
from tiny_models import tiny_model

from bench import architectures as table
from rl.distributed import make_accelerator
from rl.learner import Learner, learner_checkpoint, packing
from rl.models import lora_targets, model_loading
from rl.sampler.hf_states import RecurrentState
from rl.types import LoraConfig

# Full, sliding and chunked attention; ALiBi and learned positions; experts; linear attention, state
# space models, convolutions.
DOZEN = (
    "llama gpt2 mistral gemma2 llama4_text bloom qwen3_moe gpt_oss qwen3_next falcon_h1 lfm2 mamba"
).split()
CELLS = ("padded", "packed", "shared", "checkpointing", "sampler", *table.SAVED)


@pytest.mark.parametrize("name", make_params(DOZEN, ("gpt2", "qwen3_next")))
def test_a_row_is_exact_or_refused(name):
    result, allowed = table.row(name), ("exact", "refused: UserError", "refused: layout")
    assert all(result[cell].startswith(allowed) for cell in CELLS), result
    assert result["padded"] == result["sampler"] == result["resume"] == result["reload"] == "exact"


# ---------------------------------------------------------------------------------- injected faults


def judge_layout(name, layout):
    model, datums = tiny_model(name), table.sequences()
    plain = model_loading._disable_randomness(copy.deepcopy(model))
    expected, accelerator = table.compute_plain(plain, datums), make_accelerator(bf16=False)
    settings = table.LearnerSettings(token_budget=400, layout=layout)
    return table.judge_architecture(model, name, datums, expected, accelerator, settings)


@pytest.fixture
def exact_layouts(monkeypatch):
    """Make learners consider every layout exact, so that only the table's comparison can detect
    errors.
    """

    def probe(self, model):
        self.layouts = {"padded", "packed"}

    monkeypatch.setattr(Learner, "_probe_layouts", probe)


def test_one_wrong_position_turns_a_row_red(exact_layouts, monkeypatch):
    assert judge_layout("llama", "packed") == "exact"
    lay_out = packing._packed

    def faulty(tokens, chunk, datums):
        ids, positions, mask, index = lay_out(tokens, chunk, datums)
        if len(tokens) > 3:
            positions[0, -1] += 1  # the last token of the last sequence
        return ids, positions, mask, index

    monkeypatch.setattr(packing, "_packed", faulty)
    assert judge_layout("llama", "packed").startswith("WRONG")


def test_a_state_that_runs_on_turns_a_row_red(exact_layouts):
    assert judge_layout("qwen3_next", "padded") == "exact"
    assert judge_layout("qwen3_next", "packed").startswith("WRONG")


def test_a_state_of_another_row_turns_a_row_red(monkeypatch):
    """The fault is injected after the decoder's self-test."""
    model = model_loading._disable_randomness(tiny_model("falcon_h1"))
    assert table.sampled(model) == "exact"
    make, enter = table.make_decoder, RecurrentState.add_rows

    def faulty(self, prompt_of_row):
        enter(self, prompt_of_row)
        for layer in self.cache.layers:
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name, {})
                states |= {i: state.roll(1, 0) for i, state in states.items() if state is not None}

    def tried(first):
        decoder = make(first)
        monkeypatch.setattr(RecurrentState, "add_rows", faulty)
        return decoder

    monkeypatch.setattr(table, "make_decoder", tried)
    assert table.sampled(model).startswith("WRONG")


def test_an_optimizer_that_is_not_read_turns_a_row_red(monkeypatch):
    load_state = learner_checkpoint.load_learner_state
    monkeypatch.setattr(
        table.learner_checkpoint,
        "load_learner_state",
        lambda learner, path, with_optimizer, rank: load_state(learner, path, False, rank),
    )
    result = table.measure_saved_columns(tiny_model("llama"))
    assert result["resume"].startswith("WRONG") and result["reload"] == result["adapter"] == "exact"


def test_a_weight_that_is_written_otherwise_turns_a_row_red(monkeypatch):
    write = learner_checkpoint.write_model

    def faulty(model, tokenizer, folder, **options):
        write(model, tokenizer, folder, **options)
        if folder.name in ("last", "adapter"):
            (file,) = folder.glob("*.safetensors")
            tensors = load_file(str(file))
            tensors[next(name for name in tensors if "v_proj" in name)] += 0.05
            save_file(tensors, str(file), {"format": "pt"})

    monkeypatch.setattr(table.learner_checkpoint, "write_model", faulty)
    result = table.measure_saved_columns(tiny_model("llama"))
    assert result["resume"] == "exact"
    assert result["reload"].startswith("WRONG") and result["adapter"].startswith("WRONG")


@pytest.mark.parametrize("name", ["laguna", pytest.param("deepseek_v4", marks=pytest.mark.slow)])
def test_layers_whose_adapters_would_not_come_back_get_none(name):
    """Laguna's shared experts, which transformers renames on loading, and DeepSeek V4's grouped
    layers count as not adapted.
    """
    model = tiny_model(name)
    unadaptable = lora_targets.find_unadaptable(model, LoraConfig())
    none = {key for key in unadaptable if "shared_experts" in key or "o_a_proj" in key}
    adapted = set(lora_targets.find_lora_targets(model, LoraConfig()))
    assert none and not {key.removesuffix(".weight") for key in none} & adapted
    assert table.measure_saved_columns(model)["adapter"] == "exact"


def test_a_config_without_an_end_of_text_can_be_read(tmp_path):
    """CPM-Ant's config has no eos_token_id."""
    model = tiny_model("cpmant")
    assert not hasattr(model.config, "eos_token_id")
    assert model_loading.collect_eos_token_ids(model, None) == ()
    learner_checkpoint.write_model(model, None, tmp_path / "m")
    assert model_loading.load_model(str(tmp_path / "m")).eos_token_ids == ()


def test_a_padding_row_is_read_as_it_was_written():
    """transformers zeroes Youtu's padding row on loading, so a continued run would start from other
    weights.
    """
    result = table.measure_saved_columns(tiny_model("youtu"))
    assert result["resume"] == "exact"
    why = "refused: transformers does not read what the file says of model.embed_tokens.weight"
    assert result["reload"] == result["adapter"] == why
