"""Call one vLLM server: check how it was started, sample, score prompts, load weights."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from typing import Any

from rl.errors import UserError
from rl.vllm.nccl_transfer import LIBRARY_VARIABLE, NcclTransfer, load_library
from rl.vllm.sample_reply import (
    VllmServerError,
    check_form,
    read_prompt_logprobs,
)
from rl.vllm.transfer_validation import FolderManifest, ServerWeights, find_transfer_error

SUPPORTED_VERSIONS = ("0.32",)  # major.minor of vLLM releases whose API this package calls
SUPPORTED_RELEASES = ", ".join(f"{version}.x" for version in SUPPORTED_VERSIONS)
API_KEY_VARIABLE = "VLLM_API_KEY"
_CHECK_SECONDS = 20.0  # time limit of a request that does no work on the model
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no http_proxy
_TEXT_LIMIT = 400  # characters of a server's error that are shown
START_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
)


class VllmServer:
    """Hold the address of a server and what is known of it.

    `request_seconds`: time limit of a sample. `num_running`: samples that the server is working on.
    `last_loaded_id`: of the weights that it loaded last, "" if the last load failed.
    `needs_reload`: the server failed, and gets no samples until it has loaded weights again.
    `max_samples`: of a request. `max_logprobs`: most logprobs of a position that it returns, -1 for
    all. `max_lora_rank`: largest rank of an adapter that it loads, 0 without --enable-lora.
    `returns_experts`: samples hold the experts of their tokens. `num_failures`: times that it was
    seen to be down, or with other weights. `remedy`: what to do after an error.
    """

    remedy = "look at the server's log, start it again, and continue a run with --resume"

    def __init__(self, url: str, request_seconds: float):
        self.url, self.request_seconds = url.rstrip("/").removesuffix("/v1"), request_seconds
        self.num_running, self.last_loaded_id, self.needs_reload = 0, "", False
        self.max_context, self.max_samples, self.num_failures = 0, 1, 0
        self.max_logprobs = 20  # vLLM's default
        self.max_lora_rank, self.returns_experts = 0, False
        self.dtype, self.tied_head, self.tensor_parallel = "torch.float32", True, 1
        # of the model loaded last: the manifest of the folder, and the digests in the server
        self._last_transfer: tuple[FolderManifest, dict[str, str]] | None = None
        self._model_id = self._version_id = ""  # of the model, and of the weights loaded last
        self._transfer: NcclTransfer | None = None  # None: it loads models from their folders

    @property
    def reads_folders(self) -> bool:
        """Return whether it loads weights, or adapters, from folders."""
        return self._transfer is None or self.max_lora_rank > 0

    def check(self) -> None:
        """Check version and settings of the server. Raises UserError with the remedy."""
        try:
            version = str(self.call("/version")["version"])
            if not version.startswith(tuple(f"{known}." for known in SUPPORTED_VERSIONS)):
                raise UserError(
                    f"{self.url} runs vLLM {version}; supported: "
                    f"{SUPPORTED_RELEASES}. Install such a "
                    "version on the server"
                )
            config = self.call("/server_info?config_format=json")["vllm_config"]
            model, parallel = config["model_config"], config["parallel_config"]
            self.max_context = int(model["max_model_len"])
            self.max_samples = int(config["scheduler_config"]["max_num_seqs"])
            self.dtype = str(model["dtype"])
            self.max_logprobs = int(model.get("max_logprobs", self.max_logprobs))
            self.tied_head = (model.get("hf_overrides") or {}).get("tie_word_embeddings", True)
            self.tensor_parallel = int(parallel["tensor_parallel_size"])
            lora = config.get("lora_config") or {"max_lora_rank": 0}
            self.max_lora_rank = int(lora["max_lora_rank"])
            transfer = config.get("weight_transfer_config") or {}
            if transfer.get("backend") == "nccl":
                self._transfer = NcclTransfer(self.url, self.call, self.request_seconds)
            outputs = config.get("aux_output_config") or {}
            self.returns_experts = bool(outputs.get("enable_return_routed_experts"))
            self._check_settings(config)
        except UserError:
            raise
        except VllmServerError as error:
            raise UserError(
                f"{error}. Start a server that answers before the run starts: "
                f"{START_COMMAND} (docs/vllm.md)"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.url} does not answer as a vLLM server ({type(error).__name__}: {error}): "
                "correct sampler_url"
            ) from error
        self._check_sample()

    def _check_settings(self, config: dict[str, Any]) -> None:
        """Raise UserError if the server was started with settings that cannot work."""
        model, parallel = config["model_config"], config["parallel_config"]
        mode, runner = model["logprobs_mode"], config["scheduler_config"].get("runner_type")
        if mode != "processed_logprobs":
            raise UserError(
                f"{self.url} returns {mode}, which are not the logprobs at the sampling "
                "temperature: start it with --logprobs-mode processed_logprobs"
            )
        if runner != "generate":
            raise UserError(
                f"{self.url} serves a model that does not generate (runner "
                f"{runner}): start it with the model that is trained, or with --runner generate"
            )
        if model.get("quantization") is not None:
            raise UserError(
                f"{self.url} quantizes its weights ({model['quantization']}), so new weights "
                "cannot be compared with the learner's: start it without quantization"
            )
        if int(parallel.get("pipeline_parallel_size") or 1) > 1:
            raise UserError(
                f"{self.url} uses pipeline parallelism, which is not supported yet: use "
                "--tensor-parallel-size alone"
            )
        device = (config.get("device_config") or {}).get("device")
        if device == "cpu" and config["scheduler_config"].get("enable_chunked_prefill"):
            raise UserError(
                f"{self.url} splits prompts, and vLLM 0.32 on a CPU fails when it does so for a "
                "seeded sample: start it with --no-enable-chunked-prefill"
            )
        if self._transfer is not None:
            try:
                load_library()
            except OSError as error:
                raise UserError(
                    f"{self.url} gets weights over NCCL, which is missing here ({error}): start it "
                    "without --weight-transfer-config, so that it loads them from a folder, or "
                    f"train on a GPU ({LIBRARY_VARIABLE} names another library of NCCL)"
                ) from error
        if self.max_lora_rank:
            self._check_adapter_settings(config["lora_config"])

    def _check_adapter_settings(self, lora: dict[str, Any]) -> None:
        """Raise UserError if the server does not load adapters at run time, or only parts."""
        if lora.get("target_modules"):
            raise UserError(
                f"{self.url} restricts LoRA to {lora['target_modules']}, so it would leave parts "
                "of an adapter out: start it without --lora-target-modules"
            )
        try:
            self.call("/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        except VllmServerError as error:
            if not error.rejected:  # the route, if it exists, rejects the empty name
                raise UserError(
                    f"{error}. A server with --enable-lora gets LoRA adapters at run time: set "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for it, or start it without --enable-lora, "
                    "so that adapters are merged"
                ) from error

    def check_lora_rank(self, rank: int) -> None:
        """Raise UserError if the server does not load adapters of this rank."""
        if rank > self.max_lora_rank:
            raise UserError(
                f"{self.url} loads LoRA adapters of rank {self.max_lora_rank} at most, and this "
                f"adapter has rank {rank}: start it with a larger --max-lora-rank (vLLM allows 512 "
                "at most), or without --enable-lora, so that adapters are merged"
            )

    def _check_sample(self) -> None:
        """Raise UserError if the server does not sample by token ids."""
        try:
            params = {"max_tokens": 1, "logprobs": 0, "detokenize": False}
            choice = self.sample([0], params)["choices"][0]
            complete = choice["weight_versions"] and choice["logprobs"]["content"]
        except VllmServerError as error:
            raise UserError(
                f"{error}. Start it with --enable-scale-out, which samples by token ids: "
                f"{START_COMMAND}"
            ) from error
        except (KeyError, IndexError, TypeError):
            complete = None
        if not complete:
            raise UserError(
                f"{self.url} returns samples without logprobs or weight versions: install a "
                f"supported version of vLLM ({SUPPORTED_RELEASES})"
            )

    def sample(
        self, prompt: list[int], sampling_params: dict[str, Any], adapter: str | None = None
    ) -> dict[str, Any]:
        """Return the reply to a request of samples, of the model or of an adapter on it. Raises
        VllmServerError.
        """
        name = {} if adapter is None else {"model": adapter}
        reply = self.call(
            "/inference/v1/generate",
            {"token_ids": prompt, "sampling_params": sampling_params, **name},
            self.request_seconds,
        )
        if not isinstance(reply, dict):
            raise VllmServerError(self.url, f"returned {type(reply).__name__}, not an object")
        if adapter is not None and (shown := reply.get("model")) != adapter:
            raise VllmServerError(
                self.url, f"answered with the adapter {shown!r}, expected {adapter!r}"
            )
        return reply

    def score(
        self, tokens: Sequence[int], adapter: str | None = None
    ) -> tuple[list[float | None], list[str]]:
        """Return the logprob of each token of a sequence at temperature 1 (entry 0 is None), and
        the ids of the weights. Raises VllmServerError.

        With --enable-lora each token is scored by a request of its own: to the logits of a prompt's
        tokens vLLM 0.32 applies the adapters of the requests in the batch, row by row, and fails on
        a CPU if their numbers differ.
        """
        prompt = [int(token) for token in tokens]
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "detokenize": False}
        versions: list[str] = []
        logprobs: list[float | None] = [None]
        with check_form(self.url, "scored without logprobs or weight versions"):
            if not self.max_lora_rank:
                # a whole prompt may fill the context, and one token is sampled after it
                params |= {"prompt_logprobs": 0, "logprobs": 0}
                reply = self.sample(prompt, params, adapter)
                logprobs = read_prompt_logprobs(self.url, reply, prompt)[0]
                versions = [span["version"] for span in reply["choices"][0]["weight_versions"]]
            for i, token in enumerate(prompt[1:] if self.max_lora_rank else (), 1):
                # the reply shows the sampled token and the first of these
                tokens = [token, int(token == 0)]
                params |= {"logprobs": 2, "logprob_token_ids": tokens}
                choice = self.sample(prompt[:i], params, adapter)["choices"][0]
                entries = choice["logprobs"]["content"][0]["top_logprobs"]
                row = {entry["token_id"]: entry["logprob"] for entry in entries}
                logprobs.append(float(row[token]))
                versions += [span["version"] for span in choice["weight_versions"]]
        return logprobs, sorted(set(versions))

    def load_weights(self, weights: ServerWeights) -> None:
        """Load weights from a folder that the server sees under the same path, and check them.

        Samples that are being made of a model are paused, and continue with the new weights. Those
        of an adapter continue with the adapter that they began with. Raises VllmServerError if the
        server fails, or did not take over some tensor. The version of its weights is then one that
        `read_samples` refuses.
        """
        text = f"answered a load of weights in another form than vLLM {SUPPORTED_RELEASES}"
        with check_form(self.url, text):
            is_adapter = weights.base is not None
            has_model = is_adapter and self._model_id == weights.model.weights_id
            if not has_model or self._read_version() != self._version_id:
                # no version of a sample is that of a model without its adapter
                shown = f"{weights.model.weights_id}-base" if is_adapter else weights.weights_id
                self._load_model(weights.model, shown)
            if is_adapter:
                self._load_adapter(weights)

    def _load_model(self, model: ServerWeights, version_id: str) -> None:
        """Load all weights, compare them with those of the folder, and set the version."""
        seconds, self._model_id = self.request_seconds, ""
        if self._transfer is not None and self._read_version() != self._version_id:
            self._transfer.disconnect()  # it has been restarted
        try:
            self.call("/pause?mode=keep&clear_cache=false", {}, seconds)
            self.call("/update_weight_version", {"new_version": f"{model.weights_id}-incomplete"})
            if self._transfer is not None:
                self._transfer.send(model.folder)
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(model.folder)}}
                self.call("/collective_rpc", body, seconds)
            self._reset_prefix_cache()
            self._compare_weights(model.read_manifest(self.dtype))
            self._set_version(version_id)
            self._model_id = model.weights_id
        except BaseException:
            with contextlib.suppress(VllmServerError):  # the first error is raised
                self.call("/resume", {}, seconds)
            raise
        self.call("/resume", {}, seconds)

    def _load_adapter(self, adapter: ServerWeights) -> None:
        """Load an adapter under its id, and compare its logprobs with the learner's. Other adapters
        of the run are loaded too after a restart, and unloaded if their folders have been removed.
        """
        assert adapter.check is not None
        name, seconds = adapter.weights_id, self.request_seconds
        prefix = f"{name.partition('-')[0]}-"
        loaded = {str(item["id"]) for item in self.call("/v1/models")["data"]}
        loaded = {other for other in loaded if other.startswith(prefix)}
        configs = adapter.folder.parent.glob(f"{prefix}*/adapter_config.json")
        needed = {config.parent.name for config in configs}
        for other in sorted(needed - loaded):
            body = {"lora_name": other, "lora_path": str(adapter.folder.parent / other)}
            self.call("/v1/load_lora_adapter", body, seconds, reads_json=False)
        for other in sorted(loaded - needed):
            self.call("/v1/unload_lora_adapter", {"lora_name": other}, seconds, reads_json=False)
        logprobs, _ = self.score(adapter.check.tokens, name)
        if (error := adapter.check.find_error(logprobs, self.dtype)) is not None:
            raise VllmServerError(self.url, error, has_wrong_weights=True)
        self._set_version(name)

    def _read_version(self) -> Any:
        return self.call("/weight_info").get("weight_version")

    def _set_version(self, weights_id: str) -> None:
        """Set the version with which the server labels tokens from now on."""
        self.call("/update_weight_version", {"new_version": weights_id})
        if (shown := self._read_version()) != weights_id:
            raise VllmServerError(self.url, f"has weights {shown!r} after loading {weights_id}")
        self._version_id = weights_id

    def _reset_prefix_cache(self) -> None:
        """Drop the cached prompts of the old weights."""
        reply = self.call("/reset_prefix_cache", {}, self.request_seconds)
        if not reply.get("success"):  # running samples hold blocks: compute theirs again too
            reply = self.call(
                "/reset_prefix_cache?reset_running_requests=true", {}, self.request_seconds
            )
        if not reply.get("success"):
            raise VllmServerError(self.url, "did not drop its prefix cache of the old weights")

    def _compare_weights(self, manifest: FolderManifest) -> None:
        """Compare the tensors of the folder with those that the server holds."""
        reply = self.call("/weight_checker", {"action": "checksum"}, self.request_seconds)
        held = {str(name): str(digest) for name, digest in reply["checksums"].items()}
        error = find_transfer_error(manifest, held, self._last_transfer, self.tensor_parallel)
        if error is not None:
            raise VllmServerError(self.url, error, has_wrong_weights=True)
        self._last_transfer = manifest, held

    def wait_for_recovery(self, failure: VllmServerError, weights_ids: Collection[str]) -> None:
        """Wait for a restart after a failure. Does nothing for a server that the user started."""

    def sleep(self) -> None:
        """Free the server's memory. Does nothing for a server that the user started."""

    def close(self) -> None:
        """End the server. One that the user started is only disconnected."""
        if self._transfer is not None:
            self._transfer.disconnect()

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = _CHECK_SECONDS,
        reads_json: bool = True,
    ) -> Any:
        """Return the JSON reply of a GET, or of a POST of `body`. Raises VllmServerError, and
        UserError for a key that no header can hold.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise UserError(
                    f"{API_KEY_VARIABLE} holds characters that no key has, such as a line break or "
                    "an invisible space: set it to the key alone"
                )
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with _OPENER.open(request, timeout=seconds) as reply:
                content = reply.read()
            return json.loads(content) if content and reads_json else {}
        except urllib.error.HTTPError as error:
            raise VllmServerError(
                self.url,
                f"answered {path} with HTTP {error.code}: {_read_text(error)}",
                rejected=error.code in (400, 422),
            ) from error
        except TimeoutError as error:
            raise VllmServerError(
                self.url, f"did not answer {path} within {seconds:g} s", timed_out=True
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            timed_out = isinstance(reason, TimeoutError)
            if timed_out:
                reason = f"no answer within {seconds:g} s"
            raise VllmServerError(
                self.url,
                f"is not reachable at {path}: {reason or type(error).__name__}",
                timed_out=timed_out,
            ) from error
        except ValueError as error:
            raise VllmServerError(self.url, f"answered {path} without JSON: {error}") from error


def _read_text(error: urllib.error.HTTPError) -> str:
    """Return the first characters of an error's reply, which may be cut off."""
    try:
        return error.read(10_000).decode("utf-8", "replace")[:_TEXT_LIMIT]
    except (OSError, http.client.HTTPException):
        return str(error.reason)
