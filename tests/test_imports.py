"""Imports point down: the layers of the house, read from the files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# A module may import its own layer and lower ones. The longest matching prefix counts.
LAYERS = {
    0: ["rl.types", "rl.episodes", "rl.errors", "rl.distributed", "rl.futures", "rl.seeds", "rl.schedules", "rl.jsonl", "rl.interrupts"],
    1: ["rl.advantages", "rl.losses", "rl.loss_terms", "rl.kl", "rl.pair_losses", "rl.q_losses", "rl.datums", "rl.packing", "rl.metrics",
        "rl.renderers", "rl.rewards", "rl.data", "rl.model_presets", "rl.model_info", "rl.settings", "rl.setting_checks",
        "rl.training_config", "rl.fields", "rl.evaluation", "rl.shaping", "rl.curriculum", "rl.alarms", "rl.memory_plan"],
    2: ["rl.models", "rl.logprobs", "rl.sampler", "rl.environments", "rl.checkpoint"],
    3: ["rl.learner", "rl.backend", "rl.backend_deepspeed", "rl.backend_fsdp", "rl.launch", "rl.worker", "rl.saving", "rl.driver",
        "rl.training_client", "rl.sampling_client", "rl.service", "rl.rollout", "rl.scoring", "rl.comparison", "rl.learned_rewards",
        "rl.memory_trace"],
    4: ["rl.methods", "rl.plots", "rl.html", "rl.console", "rl.logbook", "rl.keeper", "rl.recipe", "rl.run_plan", "rl.cli",
        "rl.help_pages", "rl.rlvr"],
    5: ["rl.stage", "rl.held_out", "rl.hosts", "rl.online", "rl.offline", "rl.stored", "rl.prepare", "rl.reopen", "rl.run", "rl.entry",
        "rl.plan", "rl.plan_page"],
}  # fmt: skip


def layer_of(module: str) -> int:
    found = [(len(prefix), layer) for layer, names in LAYERS.items() for prefix in names if (module + ".").startswith(prefix + ".")]
    assert found, f"{module} has no layer: give it one in {Path(__file__).name}"
    return max(found)[1]


def modules() -> dict[str, Path]:
    paths = [*REPO.glob("rl/**/*.py"), *REPO.glob("kernels/**/*.py")]
    return {".".join(p.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, except for type checking alone."""
    known, found = modules(), set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in known else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name for name in found if name.split(".")[0] in ("rl", "kernels")}


@pytest.mark.parametrize("module", sorted(m for m in modules() if m.startswith("rl.")))
def test_imports_point_down(module):
    for name in imports(modules()[module]):
        if name.startswith("rl."):
            assert layer_of(name) <= layer_of(module), f"{module} (layer {layer_of(module)}) imports {name} (layer {layer_of(name)})"


def test_kernels_know_nothing_of_rl():
    for module, path in modules().items():
        if module.startswith("kernels"):
            assert not [name for name in imports(path) if name.startswith("rl")], module


def test_only_one_module_knows_torch_distributed():
    users = [m for m, p in modules().items() if "torch.distributed" in p.read_text() and m != "rl.distributed"]
    code = {m: [line for line in modules()[m].read_text().splitlines() if "import" in line and "torch.distributed" in line] for m in users}
    assert not any(code.values()), code


def test_help_needs_no_torch():
    """What the command line reads before there is something to run imports neither torch nor transformers."""
    heavy = ("torch", "transformers", "accelerate")
    code = f"import sys; import rl, rl.cli, rl.methods, rl.settings; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
