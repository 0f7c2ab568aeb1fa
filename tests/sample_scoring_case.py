"""Run train.py on ranks that record in files each answer that they sample. Rank 0 records the size
of each message with answers that it receives, and the answers whose text it can read there.
"""

import copy
import json
import os
import runpy
import sys
from pathlib import Path

from rl.distributed import collectives
from rl.rollout import parse_answer
from rl.runtime.sampling_worker import SamplingWorker
from rl.types import SampleResponse

LEGIBLE = 8  # characters of an answer that a message does not contain by chance
renderers = []


def record(name: str, *values) -> None:
    """Append a line to a file of this rank in the run's folder."""
    with open(f"{name}-{os.environ['LC_MACHINE']}.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")


def list_sequences(result) -> list:
    """Return the sequences in what `sample` or `run_steps` returns."""
    responses = result.finished if hasattr(result, "finished") else result[0]
    answers = [r for r in responses.values() if isinstance(r, SampleResponse)]
    return [sequence for answer in answers for sequence in answer.sequences]


def wrap(name: str) -> None:
    method = getattr(SamplingWorker, name)

    def call(worker, *arguments):
        result = method(worker, *arguments)
        for scorer in worker.sample_scorers.values():
            renderers[:] = [scorer._renderer]
            for sequence in list_sequences(result):
                record("sampled", parse_answer(scorer._renderer, sequence)[0])
        return result

    setattr(SamplingWorker, name, call)


def unpack(payload, original=collectives.unpack_message):
    message = original(payload)
    result = message[0] if isinstance(message, tuple) and len(message) == 2 else None
    if hasattr(result, "finished") or (isinstance(result, tuple) and isinstance(result[0], dict)):
        sequences = copy.deepcopy(list_sequences(result))
        texts = [parse_answer(renderer, s)[0] for renderer in renderers for s in sequences]
        raw = payload.numpy().tobytes()
        legible = [text for text in texts if len(text) >= LEGIBLE and text.encode() in raw]
        tokens = sum(sequence.num_tokens for sequence in sequences)
        record("received", payload.nbytes, len(sequences), tokens, legible)
    return message


os.environ["LC_MACHINE"] = os.environ["RANK"]  # reward workers inherit LC_*
wrap("sample")
wrap("run_steps")
collectives.unpack_message = unpack
sys.argv[0] = str(Path(__file__).parent.parent / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
