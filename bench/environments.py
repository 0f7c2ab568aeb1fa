"""Train tiny models on the built-in games: a warm-up on games played by an imperfect rule, then
GRPO in the environment.

    python bench/environments.py [--only guess_number] [--seeds 0 1 2]
        [--output bench/results/environments.csv]

A row for each game and seed holds the metric over held-out episodes (with seeds not used in
training), sampled: for the untrained model, after the warm-up and after GRPO. The row also records
whether GRPO passes the bar and the untrained model misses it. An existing row of the same game and
seed is replaced.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import REPO, RESULTS, SEEDS, make_parser, replace_rows, show, train  # noqa: E402


@dataclass(frozen=True)
class GameConfig:
    """Hold the settings of a game. `player`: the rule that plays the games of the warm-up.
    `metric`, `bar`: on held-out episodes the metric must be at least the bar (or at most, if
    `at_most`).
    """

    settings: dict
    player: str
    metric: str
    bar: float
    max_tokens: int
    at_most: bool = False
    episodes: int = 4000  # played by the rule
    warm_up: int = 800  # sft steps; the next fields: GRPO steps, and groups of a step
    steps: int = 60
    groups: int = 8
    members: int = 16
    held_out: int = 128
    rows: int = 1000
    model: str = "tiny:ascii-small"
    warm_up_batch: int = 64
    rate: float = 1e-3  # learning rate of GRPO
    file: str = ""  # address of a game that is not built in

    def passed(self, value: float) -> bool:
        return value <= self.bar if self.at_most else value >= self.bar


GAMES = {
    # solvable within floor(log2 8) + 1 guesses, the environment's limit
    "guess_number": GameConfig({"high": 8}, "careless", "correct", 0.95, 3, steps=250),
    # Three operators and two tries: exclusion is enough for the rule's 0.93; reading the failing
    # test is better.
    "debugging": GameConfig(
        {}, "careful", "correct", 0.95, 18, episodes=5000, warm_up=1200, warm_up_batch=32, steps=60,
        held_out=256, model="tiny:ascii", rate=5e-4, file="examples/games/debugging.py:DebuggingEnv",
    ),
    # The rule plays a move of ten imperfectly (it loses 0.03), so that GRPO can still improve on
    # it.
    "tic_tac_toe": GameConfig(
        {"opponent": "random", "instructions": "False"}, "careful", "lost", 0.05, 3, True, 40000,
        warm_up=1400, steps=120, groups=16, held_out=512, rows=2000, model="tiny:ascii", rate=2e-4,
    ),
}  # fmt: skip


def format_recipe(name: str, game: GameConfig, data: Path) -> str:
    """Return the two stages as the text of a recipe."""
    environment = json.dumps({"name": game.file or name, **game.settings})
    return f"""
stages:
  - {{method: sft, base_model: "{game.model}", dataset: "{data}", learning_rate: 3e-3, schedule: cosine, warmup_steps: 20, beta2: 0.99,
     steps: {game.warm_up}, batch_size: {game.warm_up_batch}, eval_every: 0, save_every: 0}}
  - {{method: grpo, environment: {environment}, environment_rows: {game.rows}, advantage: mean_std, rollout_mode: async,
     learning_rate: {game.rate}, schedule: linear, warmup_steps: 5, steps: {game.steps}, batch_size: {game.groups},
     group_size: {game.members}, eval_every: {game.steps}, eval_limit: {game.held_out}, save_every: 0, rollouts_every: 0}}
max_tokens: {game.max_tokens}
temperature: 1.0
"""


def evaluate_untrained(name: str, game: GameConfig, seed: int) -> float:
    """Return the metric of the model as it is built, over 64 episodes."""
    from rl import ServiceClient
    from rl.envs import EnvironmentGroup, EpisodeLimits, resolve_environment
    from rl.renderers import get_renderer
    from rl.rollout import compute_group_metrics, rollout
    from rl.types import Problem, SamplingParams

    words = {"True": True, "False": False}
    settings = {key: words.get(value, value) for key, value in game.settings.items()}
    spec, limits = resolve_environment(name, **settings), EpisodeLimits(turns=100)
    rows = spec.make().rows("test", 64)
    with ServiceClient(seed=seed) as service:
        client = service.create_full_training_client(game.model, seed=seed)
        renderer = get_renderer("plain", client.get_tokenizer())
        problems = [Problem((), {"seed": 10**6 + i, **row}, index=i) for i, row in enumerate(rows)]
        builders = [EnvironmentGroup(spec, p, 1, renderer, limits=limits) for p in problems]
        sampler = client.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=game.max_tokens)
        groups = rollout(builders, sampler, params, seed=seed).groups
    return compute_group_metrics(groups)[f"env/all/{game.metric}"]


def learn(name: str, game: GameConfig, seed: int, folder: Path) -> dict:
    """Run the warm-up and GRPO for a game and a seed, and return the row."""
    before = evaluate_untrained(game.file or name, game, seed)
    data = folder / f"{name}.jsonl"
    words = [game.file or name, game.player, "--episodes", str(game.episodes), "--seed", str(seed)]
    for key, value in game.settings.items():
        words += [f"--environment.{key}", str(value)]
    command = [sys.executable, "-m", "rl.envs.demo_generator", *words]
    data.write_text(subprocess.check_output(command, text=True, cwd=REPO))
    (folder / "recipe.yaml").write_text(format_recipe(name, game, data))
    run = train([str(folder / "recipe.yaml"), "--seed", str(seed)], folder / "run")
    measured = run.values(f"test/env/all/{game.metric}")
    return {
        "environment": name,
        "settings": " ".join(f"{key}={value}" for key, value in game.settings.items()),
        "seed": seed,
        "metric": game.metric,
        "untrained": round(before, 4),
        "after warm-up": round(measured[0], 4),
        "after grpo": round(measured[-1], 4),
        "bar": f"{'at most' if game.at_most else 'at least'} {game.bar}",
        "passed": game.passed(measured[-1]) and not game.passed(before),
        "held-out episodes": game.held_out,
        "grpo steps": game.steps,
        "seconds": round(run.seconds),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(GAMES), default=list(GAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--output", type=Path, default=RESULTS / "environments.csv")
    args = parser.parse_args()
    for name in args.only:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                row = learn(name, GAMES[name], seed, Path(folder))
            show(row)
            order = lambda row: (row["environment"], int(row["seed"]))  # noqa: E731
            replace_rows(args.output, [row], ("environment", "seed"), order)


if __name__ == "__main__":
    main()
