"""Test trajectories to datums on examples computed by hand, the prefix-merge rule, and the errors
for malformed datums.
"""

import numpy as np
import pytest

from rl.rollout import (
    Trajectory,
    Transition,
    check_datum,
    count_action_tokens,
    supervised_datum,
    trajectory_to_datums,
)
from rl.types import Datum, EncodedTextChunk, ModelInput, SampledSequence, TensorData


def turn(observation: list[int], action: list[int], logprobs: list[float]) -> Transition:
    return Transition(
        ModelInput.from_ints(observation), SampledSequence(action, logprobs, "stop"), 0.0, False
    )


def fields(datum: Datum) -> dict[str, list]:
    return {name: data.tolist() for name, data in datum.loss_fn_inputs.items()}


def test_one_turn_by_hand():
    (datum,) = trajectory_to_datums(
        Trajectory([turn([5, 6, 7], [8, 9], [-0.5, -0.25])], advantage=2.0)
    )
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert fields(datum) == {
        "target_tokens": [6, 7, 8, 9],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "advantages": [0.0, 0.0, 2.0, 2.0],
        "mask": [0.0, 0.0, 1.0, 1.0],
    }


def test_turns_that_continue_merge_into_one_datum_whatever_holds_their_advantages():
    turns = [turn([1, 2], [3], [-1.0]), turn([1, 2, 3, 4], [5, 6], [-2.0, -3.0])]
    for advantages in ([0.5, 1.5], np.array([0.5, 1.5]), (0.5, 1.5)):
        (datum,) = trajectory_to_datums(Trajectory(turns), advantages)
        assert fields(datum)["advantages"] == [0.0, 0.5, 0.0, 1.5, 1.5]
    for advantage in (2, np.float64(2.0), np.array(2.0)):
        (datum,) = trajectory_to_datums(Trajectory(turns), advantage)
        assert fields(datum)["advantages"] == [0.0, 2.0, 0.0, 2.0, 2.0]
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    assert fields(datum)["mask"] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert fields(datum)["logprobs"] == [0.0, -1.0, 0.0, -2.0, -3.0]


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("at", range(5))
def test_one_differing_token_anywhere_starts_a_new_datum(at, more):
    """The token may be in the observation or the action, at any position, for any length of the
    next observation.
    """
    so_far, first_turn = [1, 2, 3, 4, 5], turn([1, 2, 3], [4, 5], [-1.0, -2.0])
    same = [*so_far, *[7] * more]
    changed = [*same[:at], 9, *same[at + 1 :]]
    turns = [first_turn, turn(changed, [8], [-3.0])]
    first, second = trajectory_to_datums(Trajectory(turns, advantage=1.0))
    assert first.model_input.to_ints() == [1, 2, 3, 4]
    assert fields(first)["target_tokens"] == [2, 3, 4, 5]
    assert second.model_input.to_ints() == changed
    assert fields(second)["mask"] == [0.0] * (len(changed) - 1) + [1.0]
    assert (first.episode_share, second.episode_share) == (2 / 3, 1 / 3)
    turns = [first_turn, turn(same, [8], [-3.0])]
    (item,) = trajectory_to_datums(Trajectory(turns, advantage=1.0))
    assert item.model_input.to_ints() == same and item.episode_share == 1.0


@pytest.mark.parametrize("following", [[6], [1, 6], [1, 2, 3, 4, 6], [1, 2, 3, 4]])
def test_an_observation_that_is_shorter_than_what_came_before_starts_a_new_datum(following):
    """The shorter observation may be a prefix of the previous tokens, as in an episode that was
    rolled back.
    """
    turns = [turn([1, 2, 3], [4, 5], [-1.0, -2.0]), turn(following, [8, 9], [-3.0, -4.0])]
    first, second = trajectory_to_datums(Trajectory(turns, advantage=1.0))
    assert first.model_input.to_ints() == [1, 2, 3, 4]
    assert second.model_input.to_ints() == [*following, 8]


def test_inputs_keep_tokens_of_their_own():
    """Changing the caller's lists later changes no input, for every way to build an input."""
    tokens, chunks = [1, 2, 3], [EncodedTextChunk([7])]
    made = [
        ModelInput.from_ints(tokens),
        ModelInput((EncodedTextChunk(tokens),)),
        ModelInput.empty().append(EncodedTextChunk(tokens)),
    ]
    of_chunks, datum = (
        ModelInput(chunks),
        Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens}),
    )
    tokens.clear()
    chunks.clear()
    assert [item.to_ints() for item in made] == [[1, 2, 3]] * 3 and of_chunks.to_ints() == [7]
    assert datum.model_input.length == 3
    made[0].to_ints().clear()
    assert made[0].to_ints() == [1, 2, 3]
    assert made[0] == ModelInput.from_ints((1, 2, 3)) == ModelInput.from_ints(np.array([1, 2, 3]))


@pytest.mark.parametrize("seed", range(20))
def test_property_every_action_token_is_trained_once_in_its_place(seed):
    """Reading the masked targets of all datums returns the actions in order with their logprobs,
    for any turns.
    """
    rng = np.random.default_rng(seed)
    turns, context = [], [0]
    for _ in range(int(rng.integers(1, 6))):
        observation = [*context, *rng.integers(1, 9, rng.integers(0, 3)).tolist()]
        if rng.random() < 0.3:
            observation = [99, *rng.integers(1, 9, 2).tolist()]
        action = rng.integers(1, 9, rng.integers(1, 4)).tolist()
        turns.append(turn(observation, action, (-rng.random(len(action))).tolist()))
        context = observation + action
    datums = trajectory_to_datums(Trajectory(turns, advantage=1.0))
    tokens, logprobs = [], []
    for datum in datums:
        mask = datum.loss_fn_inputs["mask"].array != 0
        # targets are shifted exactly once
        assert datum.model_input.to_ints()[1:] == fields(datum)["target_tokens"][:-1]
        tokens += datum.loss_fn_inputs["target_tokens"].array[mask].tolist()
        logprobs += datum.loss_fn_inputs["logprobs"].array[mask].tolist()
        assert not datum.loss_fn_inputs["logprobs"].array[~mask].any()
    assert tokens == [t for transition in turns for t in transition.ac.tokens]
    np.testing.assert_allclose(
        logprobs, [p for transition in turns for p in transition.ac.logprobs], rtol=1e-6
    )
    assert count_action_tokens(datums) == len(tokens)


def test_supervised_by_hand():
    datum = supervised_datum([1, 2, 3], [0.0, 0.0, 1.0])
    assert datum.model_input.to_ints() == [1, 2]
    assert fields(datum) == {"target_tokens": [2, 3], "weights": [0.0, 1.0]}


def check(
    datum: Datum, required=("target_tokens", "advantages", "logprobs"), known=None, soft=False
):
    check_datum(3, datum, required=required, accepted=known, soft_targets=soft, vocab_size=10)


def datum_of(n: int = 4, **fields_) -> Datum:
    base = {"target_tokens": [1] * n, "advantages": [0.5] * n, "logprobs": [-1.0] * n}
    return Datum(ModelInput.from_ints(list(range(n))), base | fields_)


def test_one_number_for_all_tokens_is_refused_where_the_datum_is_made():
    with pytest.raises(ValueError, match=r"one value a token.*\[0.5\] \* n"):
        datum_of(advantages=0.5)


KNOWN = ("target_tokens", "advantages", "logprobs")


@pytest.mark.parametrize(("changes", "options", "message"), [
    ({"logprobs": [-1.0, -2.0]}, {},  # how to pad
     r"datum 3: 'logprobs' has 2 values, the model_input has 4 tokens.*\[0\.0\] \* 2 \+ logprobs"),
    ({"target_tokens": [1, 2, 3, 10]}, {}, "holds the id 10; the model's ids are 0 to 9"),
    ({"target_tokens": [1, 2, 3, -100]}, {}, "target_tokens holds the id -100"),
    ({"advantages": [0.0, float("nan"), 0.0, 0.0]}, {}, "NaN"),
    ({"advantages": [[0.0]] * 4}, {}, "shape"),
    ({}, {"required": ("reward",)}, r"lacks loss_fn_inputs\['reward'\]"),
    ({"extra": [1.0] * 4}, {"known": KNOWN}, "'extra', which this loss does not use"),
])  # fmt: skip
def test_malformed_datums_are_named(changes, options, message):
    with pytest.raises(ValueError, match=message):
        check(datum_of(**changes), **options)


def test_soft_targets_need_weights_of_their_shape():
    soft = Datum(
        ModelInput.from_ints([1, 2]),
        {"target_tokens": [[1, 2], [3, 4]], "weights": [[0.5, 0.5], [1.0, 0.0]]},
    )
    check(soft, required=("target_tokens",), soft=True)
    bad = Datum(
        ModelInput.from_ints([1, 2]), {"target_tokens": [[1, 2], [3, 4]], "weights": [1.0, 1.0]}
    )
    with pytest.raises(ValueError, match="'weights' of shape"):
        check(bad, required=("target_tokens",), soft=True)


def test_tensor_data_round_trips():
    import torch

    data = TensorData([[1, 2], [3, 4]], "int64")
    assert (data.shape, data.dtype, data.data) == ([2, 2], "int64", [1, 2, 3, 4])
    assert TensorData(data=[1.0, 2.0, 3.0, 4.0], dtype="float32", shape=[2, 2]).tolist() == [
        [1.0, 2.0],
        [3.0, 4.0],
    ]
    assert torch.equal(
        TensorData.from_torch(torch.tensor([1.5, 2.5])).to_torch(), torch.tensor([1.5, 2.5])
    )
    assert TensorData.from_torch(torch.tensor([1, 2], dtype=torch.int32)).dtype == "int64"
    assert TensorData.from_torch(torch.tensor([1.5], dtype=torch.bfloat16)).tolist() == [1.5]
    buffer = np.full(2, 7.0, np.float32)  # a caller may reuse it before a verb has read the data
    makers = TensorData, TensorData.from_numpy, lambda a: TensorData.from_torch(torch.from_numpy(a))
    held = [make(buffer) for make in makers]
    datum = Datum(ModelInput.from_ints([1, 2]), {"weights": buffer})
    buffer[:] = 0.0
    assert [data.tolist() for data in (*held, datum.loss_fn_inputs["weights"])] == [[7.0, 7.0]] * 4
    with pytest.raises(ValueError, match="int64"):
        TensorData([1], "int32")


@pytest.mark.parametrize("dtype", ["int64", "float32", None])
def test_tensor_data_holds_a_copy(dtype):
    array = np.zeros(3, dtype or np.float32)
    data = TensorData(array, dtype)
    array[0] = 7
    assert data.tolist() == [0, 0, 0]
    assert TensorData(np.array(7, dtype or np.float32), dtype).shape == [1]


def test_the_arrays_of_a_rollout_are_writable_and_no_views_of_each_other():
    (datum,) = trajectory_to_datums(
        Trajectory([turn([5, 6, 7], [8, 9], [-0.5, -0.25])], advantage=2.0)
    )
    for data in datum.loss_fn_inputs.values():
        data.array[:] = 1
    assert datum.model_input.to_ints() == [5, 6, 7, 8]


@pytest.mark.parametrize("observation, versions, version", [
    ([], [1, 2, 2], 2),  # the first token is no target
    ([], [2, 2, 2], 2),
    ([5], [-1, 2, 2], 2),
    ([5], [-1, -1, -1], None),
    ([], [1, -1, -1], None),
])  # fmt: skip
def test_the_version_of_a_datum_is_that_of_its_sampled_targets(observation, versions, version):
    """A version of -1 marks a token that was not sampled."""
    action = SampledSequence([7, 8, 9], [-1.0] * 3, version=1, versions=versions)
    step = Transition(ModelInput.from_ints(observation), action, 0.0, True)
    (datum,) = trajectory_to_datums(Trajectory([step], advantage=1.0))
    assert datum.version == version and "versions" not in datum.loss_fn_inputs
