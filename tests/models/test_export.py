"""Test the export of weights: plain transformers (or PEFT) gives the run's logits, and merging is
correct for tied heads and embeddings.
"""

import copy
import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from chains import CHAINED, chain
from huggingface_hub.errors import LocalTokenNotFoundError
from rank_server import run_script
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import train

import export
from rl.errors import UserError
from rl.learner import learner_checkpoint
from rl.models import add_lora, check_weight_names_and_shapes, merge_adapter, model_loading
from rl.models.lora_targets import find_lora_targets, find_unadaptable
from rl.trainer import describe_export, export_weights, push_to_hub
from rl.types import LoraConfig

REPO = Path(__file__).resolve().parents[2]
IDS = torch.tensor([[2, 3, 12, 4, 5, 13, 7]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def assert_same_logits(model, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=atol)


def compute_run_logits(checkpoint: Path) -> torch.Tensor:
    """Return the run's logits, with unmerged adapters on their bases."""
    return logits(learner_checkpoint.load_for_sampling(str(checkpoint), None)[0].model)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    words = "sft --reward exact_match --steps 4 --batch-size 4 --learning-rate 3e-2"
    words += " --eval-every 2 --eval-limit 4 --max-tokens 4 --save-every 0"
    train(f"{words} --lora-rank 4 --train-unembed", folder / "lora")
    train(words, folder / "full")
    base = model_loading.load_model("tiny:addition", seed=3)
    learner_checkpoint.write_model(base.model, base.tokenizer, folder / "base")
    train(
        f"{words} --base-model {folder / 'base'} --lora-rank 4 --train-unembed",
        folder / "on_folder",
    )
    return {name: folder / name for name in ("lora", "full", "on_folder", "base")}


@pytest.mark.parametrize("dtype,atol", [("fp32", 1e-5), ("bf16", 0.1)])
@pytest.mark.parametrize("name", ["lora", "full", "on_folder"])
def test_an_export_gives_the_runs_own_logits_in_plain_transformers(
    runs, name, dtype, atol, tmp_path
):
    result = export_weights(str(runs[name]), tmp_path / "out", merged=True, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    expected = compute_run_logits(runs[name] / "checkpoints" / "sft-final")
    assert expected.abs().max() > 1
    assert_same_logits(model, expected, atol)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([2, 3]) == "01"
    tied = name == "full"
    assert result.untied != tied and model.config.tie_word_embeddings == tied
    assert ("separate matrix" in describe_export(result)) == result.untied


def test_an_adapter_stays_one_and_another_run_goes_on_with_it(runs, tmp_path):
    from peft import AutoPeftModelForCausalLM

    export_weights(str(runs["on_folder"]), tmp_path / "out")
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_logits(model, compute_run_logits(runs["on_folder"] / "checkpoints/sft-final"))
    words = (
        "grpo --steps 1 --batch-size 4 --group-size 2 --learning-rate 1e-9 --eval-every 0 "
        "--max-tokens 4"
    )
    train(f"{words} --base-model {tmp_path / 'out'}", tmp_path / "next")
    assert_same_logits(model, compute_run_logits(tmp_path / "next/checkpoints/grpo-final"))
    (origin,) = json.loads((tmp_path / "next/config.json").read_text())["origins"]
    assert "is continued" in origin["how"]


def test_an_adapter_that_nobody_could_use_alone_is_merged_and_says_why(runs, tmp_path):
    text = describe_export(export_weights(str(runs["lora"]), tmp_path / "out"))
    assert "merged, since its base tiny:addition is built at run time" in text
    expected = compute_run_logits(runs["lora"] / "checkpoints/sft-final")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), expected)
    words = "sft --steps 1 --batch-size 4 --max-tokens 4 --eval-every 0 --base-model"
    train(f"{words} {tmp_path / 'out'}", tmp_path / "next")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_the_config_names_the_class_of_the_weights(tmp_path):
    """A folder of an embedding model has the weights of a causal model with a tied head, too."""
    model = model_loading.load_model("tiny:addition").model
    learner_checkpoint.write_model(model, None, tmp_path / "start")
    file = tmp_path / "start" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["Qwen3Model"]}))
    loaded = model_loading.load_model(str(file.parent))
    learner_checkpoint.write_model(loaded.model, None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]  # vLLM chooses its class by it


@pytest.mark.filterwarnings("ignore:LoRA:UserWarning", "ignore:.*pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    "kind",
    ["qwen3_moe", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mixtral", "deepseek_v3"))],
)
def test_experts_are_written_as_they_are_published(kind, tmp_path):
    """vLLM reads a matrix of each expert. transformers joins them at load, and so did the folders
    that older versions wrote.
    """
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    published = read_tensors(tmp_path / "published")
    assert any(".experts.3." in name for name in published)
    assert not any(".experts.3." in name for name in read_tensors(tmp_path / "joined"))
    for start in ("published", "joined"):
        loaded = model_loading.load_model(str(tmp_path / start))
        adapted = add_lora(copy.deepcopy(loaded), LoraConfig(rank=2, train_unembed=False))
        for name, merged in ((f"{start}-full", loaded), (f"{start}-merged", adapted)):
            folder = tmp_path / name
            learner_checkpoint.write_model(merged.model, None, folder, merged=True)
            check_weight_names_and_shapes(folder)
            written = read_tensors(folder)
            assert written.keys() == published.keys(), name
            assert all(torch.equal(written[key], published[key]) for key in published), name


def test_the_card_has_recipe_data_and_figures(runs, tmp_path):
    name = "best" if (runs["lora"] / "sampler_weights").is_dir() else None
    export_weights(str(runs["lora"]), tmp_path / "out", name=name)
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name") and "| held-out accuracy |" in text
    assert "| sft | sft | 4 | `addition` | exact_match |" in text
    assert "lora_rank: 4" in text and "learning_rate: 0.03" in text


def test_a_card_that_cannot_be_made_leaves_nothing_behind(runs, tmp_path):
    shutil.copytree(runs["full"], tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": "three"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl line 1: its step is 'three'"):
        export_weights(str(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_names_the_model_with_which_the_first_of_several_runs_began(
    runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(runs["full"].parent)
    first = f"runs/{runs['full'].name}"
    small = "--steps 1 --batch-size 4 --eval-every 0 --max-tokens 4"
    train(f"sft {small} --base-model {first}", tmp_path / "second")
    export_weights("second", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "from `tiny:addition`, a small model with random weights" in text
    assert "base_model:" not in text.split("---")[1]


@pytest.mark.parametrize("what", ["is there", "a file", "base model", "checkpoint"])
def test_what_cannot_be_exported_is_said_and_nothing_is_written(runs, what, tmp_path):
    out, target, name = tmp_path / "out", str(runs["lora"]), None
    if what == "is there":
        out.mkdir()
        (out / "mine").touch()
    elif what == "a file":
        out.write_text("mine")
    elif what == "base model":
        target = "tiny:addition"
    else:
        name = "sft-000099"
    with pytest.raises(UserError):
        export_weights(target, out, name=name)
    assert what in ("is there", "a file") or not out.exists()


def test_only_an_earlier_export_is_replaced_and_only_where_that_is_asked_for(runs, tmp_path):
    out = tmp_path / "out"
    export_weights(str(runs["full"]), out)
    refused = "not empty: .* or replace the earlier export with --overwrite"
    with pytest.raises(UserError, match=refused):
        export_weights(str(runs["lora"]), out, merged=True)
    export_weights(str(runs["lora"]), out, merged=True, overwrite=True)
    expected = compute_run_logits(runs["lora"] / "checkpoints" / "sft-final")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(out), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UserError, match="from itself"):
        export_weights(str(out), out, overwrite=True)
    saved = runs["full"] / "checkpoints" / "sft-final"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").touch()
    for other in (saved, runs["full"], runs["base"], tmp_path / "mine"):
        before = sorted(path.name for path in other.rglob("*"))
        with pytest.raises(UserError, match="no earlier export, and --overwrite replaces only"):
            export_weights(str(runs["lora"]), other, overwrite=True)
        assert sorted(path.name for path in other.rglob("*")) == before


def test_pushing_makes_a_private_repository_and_says_what_went_wrong(runs, tmp_path, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, repository, **options):
            calls.append((repository, options))
            return type("Url", (str,), {"repo_id": f"me/{repository}"})("https://hub/me/mine")

        def upload_folder(self, **options):
            calls.append(options)

    export_weights(str(runs["full"]), tmp_path / "out")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert push_to_hub(tmp_path / "out", "mine") == "https://hub/me/mine"
    assert calls[0] == ("mine", {"private": True, "exist_ok": True})
    assert calls[1]["repo_id"] == "me/mine"

    def fail(self, **options):
        raise OSError("no way")

    monkeypatch.setattr(Api, "upload_folder", fail)
    with pytest.raises(UserError, match="is written, but could not be pushed to mine: no way"):
        push_to_hub(tmp_path / "out", "mine")


def test_a_push_without_a_login_ends_before_the_export(tmp_path, monkeypatch):
    def whoami(self):
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", whoami)
    exported: list[Path] = []
    args = export.parser.parse_args(["runs/none", str(tmp_path / "out"), "--push", "mine"])
    with pytest.raises(UserError, match="needs a login at the hub.*no token"):
        export.main(args, exported)
    assert not exported


@pytest.mark.slow
def test_the_script_exports_and_says_what_to_do_next(runs, tmp_path):
    words = [runs["lora"], tmp_path / "my out", "--merge", "--dtype", "bf16"]
    done = run_script("export.py", *words, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert f"python {REPO / 'sample.py'} '{tmp_path / 'my out'}'" in done.stdout


# ------------------------------------------------------------------------------- every architecture


def make_adapted_model(name: str):
    model = model_loading._disable_randomness(tiny_model(name))
    loaded = model_loading.LoadedModel(model, None, f"tiny {name}", ())
    return add_lora(loaded, LoraConfig(rank=2, seed=0)).model


def merged_as_trained(name: str, folder: Path) -> float:
    """Return the error of the logits of merged and reloaded weights against the adapted model,
    relative to its largest logit.
    """
    model = make_adapted_model(name)
    before = logits(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.1, generator=generator)
    expected = logits(model)
    assert (expected - before).abs().max() > 1e-4, "the adapter does nothing"
    merged = merge_adapter(copy.deepcopy(model))
    learner_checkpoint.write_model(merged, None, folder)
    reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    errors = [float((logits(m) - expected).abs().max()) for m in (merged, reloaded)]
    return max(errors) / max(1.0, float(expected.abs().max()))


BERTS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("bert-generation", "big_bird", "camembert")
]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3", "bert", "prophetnet", *BERTS])
def test_merging_is_right_for_a_tied_head(name, tmp_path):
    """In BERT's relatives the head's bias is tied as well; in ProphetNet the matrix has a third
    name.
    """
    assert tiny_model(name).config.tie_word_embeddings or name == "qwen3"
    assert merged_as_trained(name, tmp_path / "out") < 1e-5


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_adapters_of_layers_that_share_a_matrix_are_not_merged(name):
    """PEFT would add all adapters to the shared matrix. The adapter can be exported unmerged."""
    model = make_adapted_model(name)
    shared = r"layers\.1\.shared.* and model\.layers\.3\.shared.* are the same matrix"
    with pytest.raises(UserError, match=f"{shared}.*export without --merge"):
        merge_adapter(model)


def test_a_layer_of_groups_is_left_without_an_adapter_and_named(tmp_path):
    """DeepSeek V4's o_a_proj is an nn.Linear that reads groups of rows, so the shapes of its output
    and the adapter's do not match.
    """
    assert merged_as_trained("deepseek_v4", tmp_path / "out") < 1e-5
    model, lora = tiny_model("deepseek_v4"), LoraConfig(rank=2)
    missed = {name for name in find_unadaptable(model, lora) if "o_a_proj" in name}
    assert len(missed) == model.config.num_hidden_layers
    assert not [name for name in find_lora_targets(model, lora) if "o_a_proj" in name]


@pytest.mark.parametrize(
    "name,layer",
    [("longcat_flash", "classifier"), ("gemma3n_text", "correction_coefs"), ("mamba", "x_proj")],
)
def test_a_layer_whose_weight_is_read_past_it_is_left_without_an_adapter(name, layer, tmp_path):
    """The model reads the weight without calling the layer, so an adapter would act only after
    merging: LongCat's logits moved by 0.03 of the largest.
    """
    model, lora = tiny_model(name), LoraConfig(rank=2)
    present = {place for place, _ in model.named_modules() if place.endswith(f".{layer}")}
    assert present and not present & set(find_lora_targets(model, lora))
    assert {f"{place}.weight" for place in present} <= set(find_unadaptable(model, lora))
    assert merged_as_trained(name, tmp_path / "out") < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,tied",
    [
        ("qwen3", True),
        ("llama", False),
        *(
            pytest.param(name, tied, marks=pytest.mark.campaign)
            for name in CHAINED
            for tied in (True, False)
            if (name, tied) not in (("qwen3", True), ("llama", False))
        ),
    ],
)
def test_a_chain_of_runs_under_lora_leaves_as_its_own_weights(name, tied, tmp_path):
    """sft -> dpo with the same adapter -> grpo with a second adapter on the merged model."""
    of_run, exact = chain(name, tied, tmp_path)
    assert of_run < 1e-5 and exact < 1e-5


SPAN = """afmoe apertus bart bloom codegen cohere2 deepseek_v3 falcon falcon_h1 gemma gemma3_text glm4 gpt_neo gpt_neox gptj granite
          lfm2 llama mamba mistral mixtral mpt nemotron olmo2 opt phi phi3 qwen2 qwen2_moe qwen3_moe qwen3_next rwkv smollm3 stablelm
          starcoder2""".split()


@pytest.mark.slow
def test_merging_is_right_over_the_span_of_architectures(tmp_path):
    """Cover attention and recurrences, experts, Conv1D, biases, tied and untied heads."""
    wrong, refused = {}, []
    for name in SPAN:
        try:
            off = merged_as_trained(name, tmp_path / name)
        except UserError as error:
            assert "cannot have a LoRA adapter" in str(error)
            refused.append(name)
            continue
        if not off < 1e-5:
            wrong[name] = off
    assert not wrong and set(refused) <= {"falcon_h1", "mamba"}, (wrong, refused)


# git takes no adapter. Layers of Zamba share a matrix but have separate adapters.
UNMERGEABLE = {"git", "zamba", "zamba2"}


def list_built_architectures() -> list[str]:
    with (REPO / "bench" / "results" / "architectures.csv").open() as file:
        rows = csv.DictReader(file)
        return [row["architecture"] for row in rows if not row["class"].startswith("not ")]


@pytest.mark.campaign
@pytest.mark.parametrize("name", list_built_architectures())
def test_merging_is_right_for_every_architecture(name, tmp_path):
    if name in UNMERGEABLE:
        with pytest.raises(UserError):
            merged_as_trained(name, tmp_path / "out")
    else:
        assert merged_as_trained(name, tmp_path / "out") < 1e-5
