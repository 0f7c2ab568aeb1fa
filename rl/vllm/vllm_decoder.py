"""Hold a version of the weights for vLLM servers: a folder with a model or a LoRA adapter."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.sampler import Decoder
from rl.vllm.server_pool import ServerPool
from rl.vllm.transfer_validation import AdapterCheck, ServerWeights

_HEAD_FILE, _INDEX = "model-untied-head.safetensors", "model.safetensors.index.json"


class VllmDecoder(Decoder):
    """Hold a version of the weights that the servers of `pool` can load.

    `weights_id` names the weights, and changes with them. `weights`: on rank 0. Their folder is
    removed with the decoder. `learner_id`: of the model whose version it is. `base`: of the model
    below a LoRA adapter, if the servers get adapters as adapters. Images are not sent to servers
    yet.
    """

    name = "the sampler vllm"

    def __init__(
        self,
        pool: ServerPool,
        vocab_size: int,
        max_positions: int | None,
        learner_id: Hashable,
        base: VllmDecoder | None = None,
    ):
        self.pool, self.vocab_size, self.max_positions = pool, vocab_size, max_positions
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.weights_id, self.weights, self.base_decoder = "", None, base
        # samples of adapters on the same base may be labelled with each other's versions
        self.learner_id: Hashable = learner_id if base is None else base.learner_id
        self._finalizer: weakref.finalize | None = None

    weights_id: str
    weights: ServerWeights | None

    @property
    def adapter(self) -> str | None:
        """Return the name of the adapter on the servers, None for a whole model."""
        return None if self.base_decoder is None else self.weights_id

    def replace_weights(
        self,
        write: Callable[[Path], None] | None,
        version: int,
        check: AdapterCheck | None = None,
    ) -> None:
        """Replace the weights by those of `version` that `write(folder)` writes; None on ranks that
        write none. `check`: of an adapter. All ranks call it together.
        """
        if self._finalizer is not None:
            self._finalizer()
        self.weights_id = self.pool.add_weights(self.learner_id, version)
        if self.base_decoder is not None:
            self.pool.adapters.add(self)
        if write is None:
            return
        folder = self.pool.root / self.weights_id
        base = None if self.base_decoder is None else self.base_decoder.weights
        self._finalizer = weakref.finalize(self, self.pool.release_folder, folder)
        try:
            write(folder)
            if self.pool.unties_head and base is None:
                add_head(folder)
        except Exception as error:
            if not checkpoint_folder.is_disk_full(error):
                raise
            raise UserError(
                f"{folder.parent} has no room for the weights that vLLM servers load ({error}): "
                "set sampler_folder to a folder with more"
            ) from error
        self.weights = ServerWeights(self.weights_id, folder, base, check)

    def load_(self, named_tensors: object) -> None:
        """Refuse: a server loads whole folders (`replace_weights`)."""
        raise NotImplementedError("vLLM loads folders of weights, not single tensors")

    def fork(self) -> Self:
        """Return a decoder for another version of the weights, which has none yet."""
        sizes = self.vocab_size, self.max_positions
        return type(self)(self.pool, *sizes, self.learner_id, self.base_decoder)

    def new_state(self, kv_cache_tokens: int) -> object:  # type: ignore[override]
        """Refuse: the server decodes."""
        raise NotImplementedError("vLLM decodes on its server")

    def read_prompts(self, prompts: object) -> None:
        """Refuse: a server returns no logits."""
        raise NotImplementedError("vLLM returns no logits: use ServerPool.score")


def add_head(folder: Path) -> None:
    """Write the output head of a model that ties it to the embedding as a separate matrix."""
    name, head = "", None
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if "lm_head.weight" in names:
                return
            matches = [key for key in names if key.endswith("embed_tokens.weight")]
            if matches:
                name = matches[0]
                head = file.get_tensor(name)
    if head is None:
        return
    save_file({"lm_head.weight": head}, folder / _HEAD_FILE, {"format": "pt"})
    index = folder / _INDEX
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.weight"] = _HEAD_FILE
        index.write_text(json.dumps(content))
