"""Call one vLLM server: check how it was started, sample, score prompts, load weights."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.vllm.transfer_validation import FolderManifest, find_transfer_error

SUPPORTED_VERSIONS = ("0.32",)  # major.minor of vLLM releases whose API this package calls
API_KEY_VARIABLE = "VLLM_API_KEY"
_CHECK_SECONDS = 20.0  # time limit of a request that does no work on the model
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no http_proxy
_TEXT_LIMIT = 400  # characters of a server's error that are shown
START_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
)


class VllmServerError(Exception):
    """Raised if a server does not answer, or answers with an error or with wrong data.

    `rejected`: the server refuses this request, so that another attempt is useless.
    `has_wrong_weights`: it holds other weights than it was told to load. `timed_out`: it did not
    answer within the time limit.
    """

    def __init__(
        self,
        url: str,
        text: str,
        *,
        rejected: bool = False,
        has_wrong_weights: bool = False,
        timed_out: bool = False,
    ):
        super().__init__(f"the vLLM server {url} {text}")
        self.rejected, self.has_wrong_weights = rejected, has_wrong_weights
        self.timed_out = timed_out


class VllmServer:
    """Hold the address of a server and what is known of it.

    `request_seconds`: time limit of a sample. `num_running`: samples that the server is working on.
    `loaded_weights_id`: of the weights that it loaded last, "" if the last load failed. `is_lost`:
    the server failed, and gets no samples until it has loaded weights again. `max_logprobs`: most
    logprobs of a position that it returns, -1 for all. `num_failures`: times that it was seen to be
    down, or with other weights. `remedy`: what to do after an error.
    """

    remedy = "look at the server's log, start it again, and continue a run with --resume"

    def __init__(self, url: str, request_seconds: float):
        self.url, self.request_seconds = url.rstrip("/").removesuffix("/v1"), request_seconds
        self.num_running, self.loaded_weights_id, self.is_lost = 0, "", False
        self.max_context, self.num_failures = 0, 0
        self.max_logprobs = 20  # vLLM's default
        self.dtype, self.tied_head, self.tensor_parallel = "torch.float32", True, 1
        # of the weights loaded last: the manifest of the folder, and the digests in the server
        self._last_transfer: tuple[FolderManifest, dict[str, str]] | None = None

    def check(self) -> None:
        """Check version and settings of the server. Raises UserError with the remedy."""
        try:
            version = str(self.call("/version")["version"])
            if not version.startswith(tuple(f"{known}." for known in SUPPORTED_VERSIONS)):
                raise UserError(
                    f"{self.url} runs vLLM {version}; supported: "
                    f"{', '.join(f'{known}.x' for known in SUPPORTED_VERSIONS)}. Install such a "
                    "version on the server"
                )
            config = self.call("/server_info?config_format=json")["vllm_config"]
            model, parallel = config["model_config"], config["parallel_config"]
            self.max_context = int(model["max_model_len"])
            self.dtype = str(model["dtype"])
            self.max_logprobs = int(model.get("max_logprobs", self.max_logprobs))
            self.tied_head = (model.get("hf_overrides") or {}).get("tie_word_embeddings", True)
            self.tensor_parallel = int(parallel["tensor_parallel_size"])
        except VllmServerError as error:
            raise UserError(
                f"{error}. Start a server that answers before the run starts: "
                f"{START_COMMAND} (docs/vllm.md)"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.url} does not answer as a vLLM server ({type(error).__name__}: {error}): "
                "correct sampler_url"
            ) from error
        self._check_settings(config)
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
                f"supported version of vLLM ({', '.join(SUPPORTED_VERSIONS)})"
            )

    def sample(self, prompt: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request of one sample. Raises VllmServerError."""
        reply = self.call(
            "/inference/v1/generate",
            {"token_ids": prompt, "sampling_params": sampling_params},
            self.request_seconds,
        )
        if not isinstance(reply, dict):
            raise VllmServerError(self.url, f"returned {type(reply).__name__}, not an object")
        return reply

    def load_weights(self, folder: Path, weights_id: str, manifest: FolderManifest) -> None:
        """Load the weights of a folder that the server sees under the same path, and compare them
        with `manifest`.

        Running samples are paused, and continue with the new weights. Raises VllmServerError if
        the server fails, or did not take over some tensor. The version of its weights is then one
        that `read_sample` refuses.
        """
        seconds = self.request_seconds
        try:
            self.call("/pause?mode=keep&clear_cache=false", {}, seconds)
            self.call("/update_weight_version", {"new_version": f"{weights_id}-incomplete"})
            arguments = {"weights_path": str(folder)}
            self.call("/collective_rpc", {"method": "reload_weights", "kwargs": arguments}, seconds)
            self._reset_prefix_cache()
            self._compare_weights(manifest)
            self.call("/update_weight_version", {"new_version": weights_id})
            shown = self.call("/weight_info").get("weight_version")
            if shown != weights_id:
                raise VllmServerError(self.url, f"has weights {shown!r} after loading {weights_id}")
        except (KeyError, TypeError, AttributeError) as error:
            raise VllmServerError(
                self.url,
                "answered a load of weights in another form than vLLM "
                f"{', '.join(f'{known}.x' for known in SUPPORTED_VERSIONS)} "
                f"({type(error).__name__}: {error})",
            ) from error
        finally:
            self.call("/resume", {}, seconds)

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

    def close(self) -> None:
        """End the server. Does nothing for a server that the user started."""

    def call(
        self, path: str, body: dict[str, Any] | None = None, seconds: float = _CHECK_SECONDS
    ) -> Any:
        """Return the JSON reply of a GET, or of a POST of `body`. Raises VllmServerError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with _OPENER.open(request, timeout=seconds) as reply:
                content = reply.read()
            return json.loads(content) if content else {}
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
