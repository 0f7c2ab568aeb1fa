"""Test misspelled hub names: the error suggests the nearest known name, without network access."""

import socketserver
import threading
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from rl.data.row_readers import read_hub
from rl.errors import UserError, suggest_hub_name
from rl.models import load_model, load_skeleton
from rl.models.info import KNOWN_MODELS

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Disable the network and provide a cache with one model and one data set."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("models--someone--Small-1B", "datasets--someone--riddles"):
        (tmp_path / name).mkdir()


def test_the_nearest_name_is_named_from_this_project_and_from_the_cache():
    assert suggest_hub_name("opnai/gsm8k", ["openai/gsm8k"], "dataset") == (
        " (did you mean openai/gsm8k?)"
    )
    assert "someone/Small-1B?" in suggest_hub_name("someone/small-1b", [], "model")
    assert "someone/riddles?" in suggest_hub_name("somone/riddles", [], "dataset")
    assert suggest_hub_name("someone/riddles", [], "model") == ""
    assert suggest_hub_name("openai/gsm8k", ["openai/gsm8k"], "dataset") == ""
    assert suggest_hub_name("far/away", ["openai/gsm8k"], "dataset") == ""


def test_a_misspelled_model_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mymodel", "exports/v1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    assert suggest_hub_name("mymodle", [], "model") == " (did you mean mymodel?)"
    for name in ("exports/w1", "./exports/ww1/"):
        assert suggest_hub_name(name, [], "model") == " (did you mean exports/v1?)"
    assert suggest_hub_name("exports/v2", [], "model") == ""  # another version, no typing mistake
    assert suggest_hub_name("mymodle", [], "dataset") == ""


def test_a_correct_name_of_another_size_or_kind_gets_no_hint(tmp_path, monkeypatch):
    """Offline and gated models fail to load too, so a failure does not imply a misspelled name."""
    known = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-0.5B-Instruct"]
    for name in ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.8B"):
        assert suggest_hub_name(name, known, "model") == ""
    assert "Qwen/Qwen3-8B?" in suggest_hub_name("Qwen/Qewn3-8B", known, "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-8b").mkdir(parents=True)
    assert suggest_hub_name("Qwen/Qwen3-8b", known, "model") == ""


def test_a_data_set_and_a_model_with_a_mistake_in_the_name_are_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"did you mean openai/gsm8k\?"):
        list(read_hub("opnai/gsm8k", "main", "train"))
    with pytest.raises(UserError, match=r"did you mean Qwen/Qwen2.5-0.5B-Instruct\?"):
        load_model("Qwen/Qwen2.5-0.5B-Instrct")
    with pytest.raises(UserError, match=r"did you mean Qwen/Qwen3-0.6B\?"):
        load_skeleton("qwen/Qwen3-0.6")


class _ClosingServer(socketserver.BaseRequestHandler):
    """Close each connection without a response and count it."""

    count = 0

    def handle(self) -> None:
        type(self).count += 1


def test_an_unreachable_hub_is_tried_once_and_the_error_names_what_works_without(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socketserver.TCPServer(("127.0.0.1", 0), _ClosingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        for load in (load_model, load_skeleton):
            with pytest.raises(UserError, match=r"cannot be reached .*local folder, or tiny:ascii"):
                load("Qwen/Qwen3-0.6B")
        with pytest.raises(UserError, match=r"did you mean openai/gsm8k\?.*a local file .*HF_HOME"):
            list(read_hub("opnai/gsm8k", "main", "train"))
        server.shutdown()
    assert _ClosingServer.count == 1


def test_every_model_of_the_recipes_is_known():
    named = set()
    for path in (REPO / "recipes").glob("*.yaml"):
        recipe = yaml.safe_load(path.read_text())
        for holder in (recipe, *recipe.get("stages", ())):
            base = holder.get("base_model", "")
            named |= {base} if base.count("/") == 1 else set()
    assert named and named <= {*KNOWN_MODELS}
