"""A small client of Triton's model control API (gRPC), with errors that say what to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from builders.access import ClientTls
from builders.errors import AnswerError, ControlError, LoadError, RestrictedError, UnreachableError

#: Triton's own prefix for the keys of `--grpc-restricted-protocol`.
_KEY_PREFIX = "triton-grpc-protocol-"
_POLL_S = 0.05


class ModelControl:
    """Loads and unloads the models of a running server.

    Quick start::

        with ModelControl("localhost:8001") as control:
            control.load("encode")
            control.ready_versions("encode")  # (2,)

    Args:
        url: the server's gRPC address, host and port.
        key: name and value where the server restricts the API
            (`--grpc-restricted-protocol=model-repository:NAME=VALUE`).
        tls: what a server with TLS is checked against; None speaks without.
        load_timeout_s: the longest load, warm-up included, seconds.
        timeout_s: the longest other call, seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        key: tuple[str, str] | None = None,
        tls: ClientTls | None = None,
        load_timeout_s: float = 600.0,
        timeout_s: float = 10.0,
    ) -> None:
        """Nothing is sent yet."""
        self.url = url
        self._headers = {f"{_KEY_PREFIX}{key[0]}": key[1]} if key else None
        self._load_timeout_s, self._timeout_s = load_timeout_s, timeout_s
        files = tls.files() if tls else {}
        self._client = triton.InferenceServerClient(url, ssl=tls is not None, **files)

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self._client.close()

    def load(self, model: str) -> None:
        """Load a model, or bring it to what its configuration says now; returns when that is done.

        Raises:
            LoadError: it could not be loaded; Triton serves on what it served before.
            ControlError: as any call.
        """
        try:
            self._client.load_model(model, headers=self._headers, client_timeout=self._load_timeout_s)
        except InferenceServerException as error:
            raise self._error(error, LoadError, f"{model} could not be loaded") from error

    def unload(self, model: str) -> None:
        """Unload every version of a model; requests in flight are answered first.

        Raises:
            ControlError: as any call.
        """
        try:
            self._client.unload_model(model, headers=self._headers, client_timeout=self._timeout_s)
        except InferenceServerException as error:
            raise self._error(error, ControlError, f"{model} could not be unloaded") from error

    def index(self) -> Mapping[str, tuple[int, ...]]:
        """Model name -> versions that are ready, rising; a model that is not loaded has none.

        Raises:
            ControlError: as any call.
        """
        try:
            answer: Any = self._client.get_model_repository_index(headers=self._headers, client_timeout=self._timeout_s)
        except InferenceServerException as error:
            raise self._error(error, ControlError, "the server's model index could not be read") from error
        found: dict[str, list[int]] = {}
        for model in answer.models:
            ready = found.setdefault(str(model.name), [])
            if model.state == "READY" and str(model.version).isdigit():
                ready.append(int(model.version))
        return {name: tuple(sorted(versions)) for name, versions in found.items()}

    def ready_versions(self, model: str) -> tuple[int, ...]:
        """Versions of a model that are ready, rising.

        Raises:
            ControlError: as any call.
        """
        return self.index().get(model, ())

    def ready(self, model: str, version: int) -> bool:
        """Whether one version answers.

        Raises:
            ControlError: as any call.
        """
        try:
            return bool(self._client.is_model_ready(model, str(version), client_timeout=self._timeout_s))
        except InferenceServerException as error:
            raise self._error(error, ControlError, f"{model} version {version} could not be asked for") from error

    def wait_served(self, model: str, versions: tuple[int, ...], wait_s: float = 30.0) -> None:
        """Wait until these versions are ready: all of them have been loaded and warmed up.

        Raises:
            LoadError: one is not.
            ControlError: as any call.
        """
        deadline = time.monotonic() + wait_s
        while missing := [version for version in versions if not self.ready(model, version)]:
            if time.monotonic() > deadline:
                raise LoadError(
                    f"{model} is loaded, but not every version of it is ready", value=missing, limit=f"{wait_s:g} s",
                    remedy=f"see the server's log, and that {self.url} serves this repository",
                )  # fmt: skip
            time.sleep(_POLL_S)

    def ask_lane(self, model: str, version: int, widths: Mapping[str, int], output: str) -> NDArray[Any]:
        """Run one text of one token through a lane.

        Args:
            model: the lane.
            version: which one.
            widths: name of each input -> its last axis (`Contract.widths`).
            output: name of the output that is returned, with its batch axis.

        Raises:
            AnswerError: the lane answers with an error.
        """
        inputs = []
        for name, width in widths.items():
            tensor = triton.InferInput(name, [1, width], "INT32")
            # One token, and a second text that begins behind it: none.
            value = 0 if name == "input_ids" else 1
            tensor.set_data_from_numpy(np.full((1, width), value, dtype=np.int32))
            inputs.append(tensor)
        return self._ask(model, version, inputs, output, {})

    def ask_entry(
        self, model: str, version: int, texts: Mapping[str, str], output: str, request_id: str = ""
    ) -> NDArray[Any]:
        """Ask one version of the entry for one row, ahead of all background work.

        Args:
            model: the entry.
            version: which one.
            texts: name of each input (`TEXT`, `TEXT_PAIR`) -> its text.
            output: name of the output that is returned, with its batch axis.
            request_id: decides who answers during a trial (`place_of`).

        Raises:
            AnswerError: it answers with an error.
        """
        inputs = []
        for name, text in texts.items():
            tensor = triton.InferInput(name, [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
            inputs.append(tensor)
        return self._ask(model, version, inputs, output, {"priority": 1, "request_id": request_id})

    def _ask(
        self, model: str, version: int, inputs: list[Any], output: str, options: dict[str, Any], wait_s: float = 30.0
    ) -> NDArray[Any]:
        """A busy server may reject: it is asked again for `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                answer = self._client.infer(
                    model, inputs, model_version=str(version), client_timeout=self._timeout_s, **options
                )
            except InferenceServerException as error:
                if "UNAVAILABLE" not in str(error.status()) or time.monotonic() > deadline:
                    raise self._error(error, AnswerError, f"{model} version {version} does not answer") from error
                time.sleep(_POLL_S)
                continue
            found: NDArray[Any] | None = answer.as_numpy(output)
            if found is None:
                raise AnswerError(f"{model} version {version} gives no {output}", remedy="make build-engines")
            return found

    def _error(self, error: Any, kind: type[ControlError], what: str) -> ControlError:
        message = str(error.message())
        if "is restricted, expecting header" in message:
            name = message.rpartition(_KEY_PREFIX)[2].strip("' ")
            return RestrictedError(
                f"{what}: the server restricts this API", remedy=f"give its key: --control-key {name}=VALUE"
            )
        if "failed to connect" in message or "Connection refused" in message:
            return UnreachableError(
                f"{what}: no server answers", value=self.url,
                remedy="start it (make serve), correct --url (the gRPC address), or use --offline",
            )  # fmt: skip
        return kind(f"{what}: {message}", remedy="see the server's log")
