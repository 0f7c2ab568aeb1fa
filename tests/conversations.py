"""Helper: random conversations of an environment with any text and a policy with any tokens."""

from __future__ import annotations

import json
import random

import numpy as np
from scripted import make_future

from rl.envs import (
    Environment,
    EnvironmentGroup,
    EpisodeLimits,
    TurnResult,
    resolve_environment,
    tool,
)
from rl.renderers import Renderer, get_renderer
from rl.rollout import EnvGroupBuilder, rollout, trajectory_to_datums
from rl.types import Problem, SampledSequence, SampleResponse, SamplingParams

WORDS = (
    "yes", "no", "12", "the answer is", "(a+b)*c", "what?", "maybe so", "x = 1", "5",
    "hello there", "-3.5e2", "0", "a: b", "go on",
)  # fmt: skip
ODD = (
    "<|im_end|>", "<|im_start|>user", "\n\nUser:", "<eos>", "</tool_call>", "<think>", "é 数", "  ",
    "\n", "\t", "<|endoftext|>",
)  # fmt: skip
RENDERERS = {
    "plain, characters": ("plain", "tiny:ascii", {}),
    "role_colon, characters": ("role_colon", "tiny:ascii", {}),
    "plain, gpt2": ("plain", "gpt2", {}),
    "role_colon, gpt2": ("role_colon", "gpt2", {}),
    "qwen2.5": ("chat_template", "qwen2.5", {}),
    "qwen3": ("chat_template", "qwen3", {}),
    "qwen3, no thinking": ("qwen3_disable_thinking", "qwen3", {}),
    "minimind": ("chat_template", "minimind_6400", {}),
}
NEVER_REWRITES = ("plain, characters", "plain, gpt2", "qwen2.5")
PARAMS = SamplingParams(max_tokens=40, temperature=1.0)


def load(name: str, tokenizers) -> Renderer:
    """Return the renderer of that name. `tokenizers`: the folder of tokenizers, or None for the
    renderer without tokenizer files.
    """
    kind, which, settings = RENDERERS[name]
    if which == "tiny:ascii":
        from rl.models import load_tokenizer

        return get_renderer(kind, load_tokenizer(which), **settings)
    from transformers import AutoTokenizer, GPT2TokenizerFast

    loaded = GPT2TokenizerFast if which == "gpt2" else AutoTokenizer
    return get_renderer(kind, loaded.from_pretrained(tokenizers / which), **settings)


def text(rng: random.Random, ascii_only: bool, odd: bool = True) -> str:
    """Return a few words, some of which control a conversation."""
    pool = [*WORDS, *WORDS, *(ODD if odd else ())]
    output = " ".join(rng.choice(pool) for _ in range(rng.randrange(1, 6))).strip() or "a"
    return output.replace("é 数", "e").replace("\t", " ") if ascii_only else output


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: a number
        b: another
    """
    return a + b


class ConversationEnvironment(Environment):
    """An environment that returns any text for a random number of turns. Its prompt contains
    few-shot answers, and some of its episodes have a tool.
    """

    needs_rows = True  # only the row's seed

    def __init__(self, ascii_only: bool, tools: bool, odd: bool):
        self.ascii_only, self.odd = ascii_only, odd
        self.tools = (tool(add),) if tools else ()

    def say(self) -> str:
        return text(self.rng, self.ascii_only, self.odd)

    def start(self):
        self.turns = self.rng.randrange(1, 6)
        shots = []
        for _ in range(self.rng.randrange(3)):
            shots.append({"role": "user", "content": self.say()})
            shot = "shot " + text(self.rng, True, False)
            shots.append({"role": "assistant", "content": shot})
        system = [{"role": "system", "content": self.say()}] if self.rng.random() < 0.5 else []
        return [*system, *shots, {"role": "user", "content": self.say()}]

    def step(self, answer):
        self.turns -= 1
        reward = self.rng.random()
        if self.turns <= 0:
            return TurnResult(reward=reward, done=True, truncated=self.rng.random() < 0.3)
        return TurnResult(self.say(), reward=reward)


class Writer:
    """A sampler that draws random tokens: ordinary tokens in sequences that no tokenizer would
    produce, texts, tool calls, thoughts.

    `canonical`: only texts as their tokenizer writes them, each ended by the renderer's end mark.
    """

    def __init__(
        self, renderer: Renderer, seed: int, *, canonical: bool = False, ascii_only: bool = False
    ):
        self.renderer, self.rng = renderer, random.Random(seed)
        self.canonical, self.ascii_only = canonical, ascii_only
        self.info = {"max_context": None}
        tokenizer = renderer.tokenizer
        special = {
            *tokenizer.all_special_ids,
            *getattr(tokenizer, "added_tokens_decoder", {}),
            *renderer.end_tokens,
        }
        self.ordinary = [i for i in range(len(tokenizer)) if i not in special]
        self.drawn: list[list[int]] = []

    def encode(self, output: str) -> list[int]:
        return list(self.renderer.tokenizer.encode(output, add_special_tokens=False))

    def answer(self) -> list[int]:
        rng, stops = self.rng, self.renderer.get_stop_sequences()
        mark = self.encode(stops[0]) if isinstance(stops[0], str) else [stops[0]]
        if self.canonical:
            output = text(rng, True, False)
            return [*self.encode(f" {output}" if isinstance(stops[0], str) else output), *mark]
        kind = rng.randrange(6)
        if kind == 0:
            tokens = [rng.choice(self.ordinary) for _ in range(rng.randrange(1, 12))]
        elif kind == 1:
            made = {"name": rng.choice(["add", "ad", "add"]), "arguments": {"a": rng.randrange(99)}}
            call = json.dumps(made, separators=rng.choice([(",", ":"), None]))
            tokens = self.encode(f"{text(rng, True, False)}\n<tool_call>\n{call}\n</tool_call>")
        elif kind == 2:
            thought, said = text(rng, True, False), text(rng, True, False)
            tokens = self.encode(f"<think>\n{thought}\n</think>\n\n{said}")
        else:
            tokens = self.encode(text(rng, self.ascii_only, odd=kind == 3))
        tokens = [t for t in tokens if t not in self.renderer.end_tokens] or self.ordinary[:1]
        ends = [mark] * 3 + [[end] for end in sorted(self.renderer.end_tokens)] + [[]]
        return [*tokens, *rng.choice(ends)]

    def sample_many(self, requests, /):
        responses = []
        for request in requests:
            sequences = []
            for _ in range(request.num_samples):
                tokens = self.answer()
                self.drawn.append(tokens)
                sequences.append(SampledSequence(tokens, [-self.rng.random() for _ in tokens]))
            responses.append(SampleResponse(sequences))
        return make_future(responses)


def groups(
    renderer: Renderer, name: str, count: int, *, odd: bool = True, first: int = 0
) -> list[EnvGroupBuilder]:
    """Return `count` conversations, half of them with a tool."""
    ascii_only = "characters" in name
    kinds = [
        resolve_environment(ConversationEnvironment, ascii_only=ascii_only, tools=tools, odd=odd)
        for tools in (False, True)
    ]
    limits = EpisodeLimits(turns=12, seconds=60)
    problems = [Problem((), {"seed": first + i}, index=first + i) for i in range(count)]
    return [EnvironmentGroup(kinds[p.index % 2], p, 1, renderer, limits=limits) for p in problems]


def at_actions(datums, field: str) -> list:
    """Return a field's values where the mask is 1, in order."""
    results = []
    for datum in datums:
        inputs = datum.loss_fn_inputs
        results += inputs[field].array[inputs["mask"].array > 0].tolist()
    return results


def check(name: str, renderer: Renderer, count: int, seed: int = 0) -> dict[str, int]:
    """Play `count` conversations and check that exactly the sampled tokens are trained.

    Returns the number of conversations, turns, datums, and rewritten prompts.
    """
    sampler = Writer(renderer, seed, ascii_only="characters" in name)
    result = rollout(groups(renderer, name, count, first=1000 * seed), sampler, PARAMS, seed=seed)
    assert not result.errors, result.errors[:3]
    turns = datums = restarted = 0
    drawn = {tuple(tokens) for tokens in sampler.drawn}
    assert len(result.groups) == count
    for group in result.groups:
        (episode,) = group.trajectories_G
        episode.advantage = 0.5
        made = trajectory_to_datums(episode)
        trained, logprobs = at_actions(made, "target_tokens"), at_actions(made, "logprobs")
        sampled = [t for turn in episode.transitions for t in turn.ac.tokens]
        assert trained == sampled, (name, group.problem_index)
        drawn_logprobs = [p for turn in episode.transitions for p in turn.ac.logprobs]
        np.testing.assert_array_equal(np.float32(logprobs), np.float32(drawn_logprobs))
        assert all(tuple(turn.ac.tokens) in drawn for turn in episode.transitions)
        breaks, so_far = 0, []
        for turn in episode.transitions:
            observation = turn.ob.to_ints()
            breaks += bool(so_far) and observation[: len(so_far)] != so_far
            so_far = [*observation, *turn.ac.tokens]
        assert len(made) == breaks + 1, (name, group.problem_index, len(made), breaks)
        # a datum is a contiguous stretch of read and written tokens
        last_token = made[-1].loss_fn_inputs["target_tokens"].array.tolist()[-1]
        assert [*made[-1].model_input.to_ints(), last_token] == so_far
        turns += len(episode.transitions)
        datums += len(made)
        restarted += breaks
    if name in NEVER_REWRITES:
        assert restarted == 0, name
    return {"conversations": count, "turns": turns, "datums": datums, "written anew": restarted}


def check_canonical(name: str, renderer: Renderer, count: int, seed: int = 0) -> int:
    """Check that a continued prompt equals the template's rendering of the whole conversation, if
    the policy writes texts as the tokenizer does.

    Returns the number of compared prompts.
    """
    sampler = Writer(renderer, seed, canonical=True, ascii_only="characters" in name)
    builders = groups(renderer, name, count, odd=False, first=10_000)
    result = rollout(builders, sampler, PARAMS, seed=seed)
    assert not result.errors, result.errors[:3]
    compared = 0
    for group in result.groups:
        tools = [] if group.problem_index % 2 == 0 else [dict(tool(add).schema)]
        made = renderer.with_tools(tools)
        (episode,) = group.trajectories_G
        messages: list = []
        for turn in episode.transitions:
            messages += turn.logs["new_messages"]
            expected = made.build_generation_prompt(messages).to_ints()
            shown = [made.tokenizer.decode(tokens) for tokens in (turn.ob.to_ints(), expected)]
            assert turn.ob.to_ints() == expected, (name, group.problem_index, shown)
            messages.append({"role": "assistant", "content": turn.logs["response"]})
            compared += 1
    return compared
