"""Measure what rank 0 does for each answer of a GRPO step on several machines: from the messages of
the ranks, with samples and scores, to the messages with each rank's share of the batch, and from
the ranks' outputs to the metrics.

    python tools/answer_path.py      # results/answer_path.csv: about a minute

32 ranks have sampled and scored 64 answers of 1,024 tokens each, in groups of 8, to prompts of 512
tokens. Their messages are made here, and nothing is sent. `us_per_answer` is the CPU time of rank
0's thread, the median of five rounds; `bytes_per_answer` the size of the messages. tools/scaling.py
takes both from here. The last row is work of a rank, which reads its share.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.harness import RESULTS, make_parser, show, write_table  # noqa: E402
from rl.algorithms import METHODS  # noqa: E402
from rl.client.check_arguments import check_call  # noqa: E402
from rl.client.training_client import _to_output  # noqa: E402
from rl.distributed import collectives  # noqa: E402
from rl.envs import ProblemGroupBuilder  # noqa: E402
from rl.learner.microbatches import MicroBatchPlanner  # noqa: E402
from rl.rewards import SampleScore, Score, Scorer, hash_beginning  # noqa: E402
from rl.rollout import (  # noqa: E402
    RolloutBatch,
    compute_credited_share,
    compute_group_metrics,
    compute_sample_metrics,
    rollout,
)
from rl.runtime.sample_temperatures import SampleTemperatures  # noqa: E402
from rl.runtime.verb_table import merge_by_index  # noqa: E402
from rl.types import (  # noqa: E402
    Datum,
    ModelInput,
    Problem,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)
from rl.types.number_checks import validate_target_ids  # noqa: E402

RANKS, ANSWERS, GROUP, PROMPT, ANSWER, VOCABULARY = 32, 64, 8, 512, 1024, 152_064
ROUNDS, BUDGET, HIDDEN = 5, 16_384, 3584
T = TypeVar("T")
INFO = {"vocab_size": VOCABULARY, "max_context": 32_768, "value_head": False, "lora_rank": None}


class Stopwatch:
    """Sum the CPU seconds of the calling thread by part, and keep the size of messages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_bytes: dict[str, int] = {}

    def run(self, part: str, function: Callable[[], T]) -> T:
        begin = time.thread_time()
        result = function()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - begin
        return result


class PromptRenderer:
    """Render a prompt of PROMPT random tokens."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def build_generation_prompt(self, messages: Sequence[Any]) -> ModelInput:
        return ModelInput.from_ints(self.rng.integers(0, VOCABULARY, PROMPT).tolist())

    def get_stop_sequences(self) -> list[int]:
        return [0]


def make_sample(rng: np.random.Generator, index: int) -> SampledSequence:
    """Return an answer as its rank has scored it."""
    tokens, reward = rng.integers(0, VOCABULARY, ANSWER).tolist(), float(index % 3)
    logprobs = rng.standard_exponential(ANSWER).astype(np.float32)
    score = Score(reward, {"correct": reward, "format": 1.0}, seconds={"math_correctness": 0.005})
    return SampledSequence(
        tokens,
        (-logprobs).tolist(),
        version=3,
        temperature=1.0,
        score=SampleScore(True, hash_beginning(str(index)), score),
    )


class Samplers:
    """Stand in for the ranks that sample: `sample_many` reads their messages."""

    info = INFO

    def __init__(self, rng: np.random.Generator, watch: Stopwatch):
        self.watch, self.temperatures = watch, SampleTemperatures()
        groups = RANKS * ANSWERS // GROUP
        results = [
            (
                {
                    i: SampleResponse([make_sample(rng, GROUP * i + j) for j in range(GROUP)])
                    for i in range(rank, groups, RANKS)
                },
                {"emitted_tokens": ANSWERS * ANSWER},
            )
            for rank in range(RANKS)
        ]
        self.messages = [collectives.pack_message((result, None)) for result in results]

    def sample_many(self, requests: Sequence[Any]) -> Any:
        def read() -> list[SampleResponse]:
            results = [collectives.unpack_message(message)[0] for message in self.messages]
            responses = merge_by_index([result[0] for result in results])
            for i, sequence in enumerate(s for r in responses for s in r.sequences):
                sequence.sequence_id = f"service:{i}"
                self.temperatures.record(sequence)
            return responses

        responses = self.watch.run("read samples", read)
        self.watch.num_bytes["read samples"] = sum(message.nbytes for message in self.messages)
        counters = {"emitted_tokens": RANKS * ANSWERS * ANSWER}
        return SimpleNamespace(result=lambda: (responses, counters))


class Policy:
    """Stand in for a training client and the ranks that learn."""

    version, info = 3, INFO

    def __init__(self, watch: Stopwatch, temperatures: SampleTemperatures):
        self.watch, self.temperatures = watch, temperatures
        self.planner = MicroBatchPlanner(
            token_budget=BUDGET,
            requested_layout="padded",
            exact_layouts=frozenset({"padded"}),
            hidden_size=HIDDEN,
            device=torch.device("cpu"),
            rope_switch=None,
            reads_images=False,
            sharing=None,
            varlen=False,
        )
        context = SimpleNamespace(sample_temperatures=temperatures)
        self.context: Any = context

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: dict[str, Any], divisor: float
    ) -> Any:
        watch = self.watch

        def plan() -> list[Any]:
            _, datums = check_call(data, loss, config, INFO, self.context)
            for i, datum in enumerate(datums):
                self.temperatures.find_temperature(datum)
                validate_target_ids(str(i), datum.loss_fn_inputs["target_tokens"].array, VOCABULARY)
            return self.planner.split(datums, 1, [1.0] * len(datums))

        shares = watch.run("check and plan", plan)
        messages = watch.run(
            "pack shares", lambda: [collectives.pack_message(s) for s in shares[1:]]
        )
        watch.num_bytes["pack shares"] = sum(message.nbytes for message in messages)
        watch.run("a rank reads its share", lambda: collectives.unpack_message(messages[0]))
        results = [
            ({i: {"logprobs": read_logprobs(datum)} for i, datum in share.datums.items()}, {})
            for share in shares
        ]
        outputs = watch.run(
            "ranks", lambda: [collectives.pack_message(result) for result in results]
        )
        watch.num_bytes["read outputs"] = sum(message.nbytes for message in outputs)

        def read() -> Any:
            results = [collectives.unpack_message(message) for message in outputs]
            return _to_output((merge_by_index([r[0] for r in results]), {"loss:sum": 0.0}))

        return SimpleNamespace(result=lambda: watch.run("read outputs", read))

    def train_step(self, calls: Sequence[Any], params: Any) -> tuple[list[Any], Any]:
        update = SimpleNamespace(result=lambda: SimpleNamespace(metrics={"grad_norm": 1.0}))
        return [self.forward_backward(*call) for call in calls], update


def read_logprobs(datum: Datum) -> np.ndarray:
    return datum.loss_fn_inputs["logprobs"].array


def run_step(samplers: Samplers, policy: Policy, method: Any, scorer: Scorer) -> RolloutBatch:
    """Do rank 0's work of a step."""
    rng, watch = np.random.default_rng(1), samplers.watch
    renderer: Any = PromptRenderer(rng)
    models: Any = SimpleNamespace(policy=policy, trainable={})
    builders = [
        ProblemGroupBuilder(
            Problem([{"role": "user", "content": str(i)}], {}, index=i), GROUP, renderer, scorer
        )
        for i in range(RANKS * ANSWERS // GROUP)
    ]
    params = SamplingParams(max_tokens=ANSWER)
    batch = watch.run("episodes", lambda: rollout(builders, samplers, params, seed=0))
    datums = watch.run("datums", lambda: method.compute_advantages(batch.groups, models))
    progress: Any = SimpleNamespace(batch=0, done=0.0)
    watch.run("update", lambda: method.update(models, datums, progress))

    def measure() -> None:
        compute_group_metrics(batch.groups)
        compute_sample_metrics(batch.groups)
        compute_credited_share(batch.groups, datums)

    watch.run("metrics", measure)
    return batch


def measure_parts() -> dict[str, tuple[float, int]]:
    """Return by part its seconds in a step, the median of ROUNDS, and the bytes of its messages."""
    collectives.world = lambda: RANKS  # type: ignore[assignment]  # the planner asks for it
    gc.freeze()  # as the training loop does
    rng, rounds, num_bytes = np.random.default_rng(0), [], {}
    method = METHODS["grpo"](METHODS["grpo"].Settings())
    for _ in range(ROUNDS):
        watch = Stopwatch()
        samplers = Samplers(rng, watch)
        with Scorer("math_correctness") as scorer:
            run_step(samplers, Policy(watch, samplers.temperatures), method, scorer)
        seconds, num_bytes = watch.seconds, watch.num_bytes
        seconds["episodes"] -= seconds["read samples"]
        inner = ("check and plan", "pack shares", "a rank reads its share", "read outputs", "ranks")
        seconds["update"] -= sum(seconds[part] for part in inner)
        del seconds["ranks"]
        rounds.append(seconds)
    return {
        part: (statistics.median(seconds[part] for seconds in rounds), num_bytes.get(part, 0))
        for part in rounds[0]
    }


def main() -> None:
    args = make_parser(__doc__, output=RESULTS / "answer_path.csv").parse_args()
    torch.set_num_threads(1)
    rows = []
    parts = measure_parts()
    share = parts.pop("a rank reads its share")
    for part, (seconds, num_bytes) in [*parts.items(), ("a rank reads its share", share)]:
        answers = ANSWERS if part.startswith("a rank") else RANKS * ANSWERS
        row = {
            "part": part,
            "us_per_answer": round(1e6 * seconds / answers, 1),
            "bytes_per_answer": round(num_bytes / answers),
        }
        rows.append(row)
        show(row)
    write_table(args.output, rows)


if __name__ == "__main__":
    main()
