"""What is typed wrong about one's own files, and about flags that scripts share with training: one box, no traceback."""

from pathlib import Path

import pytest

from rl.methods import METHODS
from rl.settings import DataSettings, RunSettings, SettingsError, parse
from rl.settings.cli import override

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "addition.yaml"


@pytest.mark.parametrize(
    ("name", "says"),
    [("Nope", "has no class Nope; it has Method"), ("Method", "has no learn"), ("nofile.py:Method", "there is no such file")],
)
def test_a_method_that_is_none(name, says, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("class Method:\n    pass\n")
    address = f"{tmp_path}/{name}" if ":" in name else f"{file}:{name}"
    with pytest.raises(SystemExit) as ended:
        parse([address, "--steps", "2"], METHODS, RECIPE, options=RunSettings)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and says.split()[-1] in said and "Traceback" not in said, said


def test_a_mistyped_flag_of_a_script_is_recognised():
    with pytest.raises(SettingsError) as error:
        override((DataSettings(dataset="addition"),), ["--limt", "5", "--evl-limit", "3"], {"limit": 1, "samples": 1})
    meant = {"--limt": "--limit", "--evl-limit": "--eval-limit"}
    assert error.value.problems == [f"{typed}: no such setting; did you mean {flag}?" for typed, flag in meant.items()]
