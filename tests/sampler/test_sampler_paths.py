"""Test properties of every sampling path: all EOS tokens of a model are used, and random streams
depend on the identity of a sample.
"""

from __future__ import annotations

import itertools

import pytest
from sampler_models import make_request, one_thread, random_prompts  # noqa: F401

from rl import ServiceClient
from rl.algorithms import Distillation
from rl.algorithms.distillation import DistillationSettings, DistillSettings
from rl.config import SamplingSettings
from rl.distributed import collectives
from rl.learner import learner_checkpoint
from rl.models import load_model
from rl.rollout import Env, EnvGroupBuilder, StepResult, rollout
from rl.runtime import WorkerSettings
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.verb_table import VERBS
from rl.seed import derive_seed
from rl.types import ModelInput, Problem, SamplingParams

ENDS = {
    1: "the tokenizer",
    4: "the model's config",
    6: "the generation config",
    8: "the generation config",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a model with three sources (tokenizer, config, generation config) that
    each name another EOS token.
    """
    loaded = load_model("tiny:addition", seed=0)
    loaded.model.config.eos_token_id, loaded.model.generation_config.eos_token_id = 4, [6, 8]
    assert loaded.tokenizer.eos_token_id == 1
    path = tmp_path_factory.mktemp("base")
    loaded.model.save_pretrained(str(path))
    loaded.tokenizer.save_pretrained(str(path))
    return path


def check_ends(client) -> None:
    """Check that each EOS token ends samples with the reason "stop" and none is inside a sample,
    also if the caller passes a stop.
    """
    for stop in (None, [12]):
        params, ends = SamplingParams(max_tokens=40, stop=stop, seed=1), {*ENDS, *(stop or [])}
        sequences = client.sample(ModelInput.from_ints([3, 5]), 128, params).result().sequences
        assert ends <= {s.tokens[-1] for s in sequences if s.stop_reason == "stop"}, ENDS
        for sequence in sequences:
            assert not ends & set(sequence.tokens[:-1])
            assert (sequence.stop_reason == "stop") == (sequence.tokens[-1] in ends)


def test_every_end_of_sequence_ends_a_sample_on_every_path(folder, tmp_path):
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        check_ends(service.create_sampling_client(base_model=str(folder)))
        full = service.create_full_training_client(str(folder))
        lora = service.create_lora_training_client(str(folder), rank=2)
        for client in (full, lora):
            check_ends(client.save_weights_and_get_sampling_client())
            path = client.save_weights_for_sampler(f"weights-{client is full}").result().path
            check_ends(service.create_sampling_client(model_path=path))
            state = client.save_state(f"state-{client is full}").result().path
            check_ends(service.create_sampling_client(model_path=state))


# ----------------------------------------------------------------------------------- random streams


class SameAgain(Env):
    """Return the same observation at every turn, whatever the action."""

    requests_seen = ModelInput.from_ints([3, 4, 12])

    def __init__(self, turns: int):
        self.remaining = turns

    def initial_observation(self):
        return self.requests_seen, []

    def step(self, action):
        self.remaining -= 1
        return StepResult(0.0, self.remaining == 0, self.requests_seen, [], {}, {}, False)


class QuestionGroupBuilder(EnvGroupBuilder):
    tag = "again"

    def __init__(self, index: int, members: int, turns: int):
        self.problem_index, self.members, self.turns = index, members, turns

    def make_envs(self):
        return [SameAgain(self.turns) for _ in range(self.members)]


def test_each_turn_of_an_episode_has_a_random_stream_of_its_own(tmp_path):
    params = SamplingParams(max_tokens=6)
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        sampler = service.create_sampling_client(base_model="tiny:addition")
        (group,) = rollout([QuestionGroupBuilder(5, 4, 3)], sampler, params, seed=9).groups
        text = [
            [turn.ac.tokens for turn in episode.transitions] for episode in group.trajectories_G
        ]
        # a single prompt, twelve different answers
        assert len({tuple(tokens) for episode in text for tokens in episode}) == 12
        for turn, member in itertools.product(range(3), range(4)):
            # the answers depend on the identity, not on earlier samples
            fields = dict(seed=derive_seed(9, turn), problem=5, first_index=member)
            request = make_request([3, 4, 12], max_tokens=6, stop=[], **fields)
            (response,), _ = sampler.sample_many([request]).result()
            assert response.sequences[0].tokens == text[member][turn]


class DigitRenderer:
    """The renderer for the teacher's prompts."""

    def get_stop_sequences(self):
        return []

    def build_generation_prompt(self, messages):
        return ModelInput.from_ints([3, 4 + int(messages[0]["content"]), 12])


def test_a_teachers_answers_do_not_depend_on_the_batch_around_them(tmp_path):
    rows = [
        Problem([{"role": "user", "content": str(i)}], tag=tag, index=i)
        for i in range(3)
        for tag in ("sums", "words")
    ]
    method = Distillation(
        DistillSettings(
            distillation=DistillationSettings(teacher=("t",), learn_from="teacher", group_size=3),
            sampling=SamplingSettings(temperature=1.0, max_tokens=16),
        )
    )

    def answers(teacher, chosen, seed=7):
        datums = method._sample_teacher(chosen, DigitRenderer(), teacher, seed)
        return [
            [d.loss_fn_inputs["target_tokens"].array.tolist() for d in datums[i : i + 3]]
            for i in range(0, len(datums), 3)
        ]

    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        teacher = service.create_sampling_client(base_model="tiny:addition")
        together = answers(teacher, rows)
        assert [answers(teacher, [row])[0] for row in rows] == together
        assert answers(teacher, rows[::-1])[::-1] == together
        assert together[0] != together[1]  # problem 0 of a data set is not problem 0 of another
        assert together != answers(teacher, rows, seed=8)
        first, second = answers(teacher, [rows[0], rows[0]])  # twice in a batch: two streams
        assert first == together[0] != second


def test_a_loaded_sampler_holds_only_the_decoders_copy_of_its_weights(monkeypatch):
    """The fp32 model would take twice the decoder's memory again."""
    models, load = [], learner_checkpoint.load_for_sampling

    def record(*arguments):
        result = load(*arguments)
        models.append(result[0].model)
        return result

    monkeypatch.setattr(learner_checkpoint, "load_for_sampling", record)
    worker = TrainingWorker(WorkerSettings())
    worker.load_sampler(1, None, "tiny:addition")
    assert all(parameter.is_meta for parameter in models[0].parameters())
    responses, _ = worker.sample(1, [make_request([3, 4], 1, max_tokens=2, seed=3, problem=0)])
    assert responses[0].sequences


def test_samples_do_not_depend_on_the_number_of_ranks(monkeypatch):
    """Run the sampling verb of both ranks in sequence in this process, and compare with a single
    rank.
    """
    worker = TrainingWorker(WorkerSettings())
    worker.load_sampler(1, None, "tiny:addition")
    requests = [
        make_request(prompt, 1 + i % 3, max_tokens=5 + i, seed=3, problem=i)
        for i, prompt in enumerate(random_prompts([3, 9, 4, 12, 5, 7, 3], 14))
    ]
    single, _ = VERBS["sample"].reduce([worker.sample(1, requests)])
    for world in (2, 3):
        parts = []
        for rank in range(world):
            monkeypatch.setattr(collectives, "world", lambda world=world: world)
            monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
            parts.append(worker.sample(1, requests))
        assert all(0 < len(responses) < len(requests) for responses, _ in parts)
        merged, counters = VERBS["sample"].reduce(parts)
        tokens = [[s.tokens for s in response.sequences] for response in merged]
        assert tokens == [[s.tokens for s in response.sequences] for response in single]
        assert counters["finished_samples"] == sum(r.num_samples for r in requests)
