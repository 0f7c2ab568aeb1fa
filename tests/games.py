"""Play games with samplers that generate scripted replies, so that the tokens of each player and
the text that each seat read are known.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from scripted import make_future

from rl.envs import EnvironmentGroup, EpisodeLimits, resolve_environment
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.rewards import load_file
from rl.rollout import rollout
from rl.types import Problem, SampledSequence, SampleResponse, SamplingParams

PARAMS = SamplingParams(max_tokens=12)
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "games"
CLASSES = {
    "debate": "DebateEnv",
    "debugging": "DebuggingEnv",
    "twenty_questions": "TwentyQuestionsEnv",
}


def example_address(name: str) -> str:
    """Return the address of a game of examples/games, or the name of a built-in game."""
    return f"{EXAMPLES / name}.py:{CLASSES[name]}" if name in CLASSES else name


def load_example(name: str):
    """Return the module of a game of examples/games, loaded as the registry loads it."""
    return load_file(str(EXAMPLES / f"{name}.py"), "environment")


@dataclass
class MadeUp:
    """A sampler that replies with `words(prompt text, random generator)`. `drawn` records every
    prompt and sample.
    """

    tokenizer: object
    words: object
    version: int = 0
    logprob: float = -1.0
    cut_off: float = 0.1  # share of samples that end without an end mark
    drawn: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # number of requests in each batch

    @property
    def info(self):
        return {"max_context": 2000}

    def sample_many(self, requests):
        self.calls.append(len(requests))
        responses = []
        for item in requests:
            sequences = []
            for i in range(item.num_samples):
                draw = random.Random(
                    f"{item.seed} {item.problem} {item.first_index + i} {self.version}"
                )
                text = self.words(self.tokenizer.decode(list(item.prompt)), draw)
                tokens = self.tokenizer.encode(text)[: PARAMS.max_tokens - 1]
                ended = draw.random() >= self.cut_off
                tokens = [*tokens, self.tokenizer.eos_token_id] if ended else tokens or [5]
                sequence = SampledSequence(
                    tokens,
                    [self.logprob] * len(tokens),
                    "stop" if ended else "length",
                    version=self.version,
                )
                self.drawn.append((list(item.prompt), list(tokens)))
                sequences.append(sequence)
            responses.append(SampleResponse(sequences))
        return make_future(responses)


def tokenizer():
    return load_tokenizer("tiny:ascii")


def play(
    name,
    policy,
    *,
    groups=3,
    members=4,
    renderer="plain",
    players=None,
    renderers=None,
    turns=40,
    seed=0,
    **settings,
):
    """Play groups of an environment to their ends and return the rollouts."""
    spec = resolve_environment(example_address(name), **settings)
    rendered = get_renderer(renderer, policy.tokenizer)
    problems = [Problem((), {"seed": 100 * seed + i}, tag=name, index=i) for i in range(groups)]
    builders = [
        EnvironmentGroup(
            spec, item, members, rendered, limits=EpisodeLimits(turns=turns), renderers=renderers
        )
        for item in problems
    ]
    return rollout(builders, policy, PARAMS, seed=seed, players=players)
