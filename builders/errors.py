"""Errors of the builders: what happened, the value, the limit, what to do."""

from __future__ import annotations


class BuilderError(Exception):
    """A user's mistake or an environment that cannot do the work; printed without a traceback.

    Args:
        what: what is wrong, one clause.
        value: the offending value, shown as given (None when there is none).
        limit: the bound or the form that was expected.
        remedy: what to do about it, an imperative clause.
    """

    def __init__(self, what: str, *, value: object = None, limit: str | None = None, remedy: str | None = None):
        """Keep the parts and join them to one line."""
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        parts = [what if value is None else f"{what}: {value!r}"]
        if limit:
            parts.append(f"limit: {limit}")
        if remedy:
            parts.append(f"to do: {remedy}")
        super().__init__("; ".join(parts))


class SettingsError(BuilderError):
    """deploy.yaml (or a file that extends it) cannot be used. One line per problem."""


class SourceError(BuilderError):
    """The model cannot be found or read, or is of a kind this project does not serve."""


class ExportError(BuilderError):
    """The model could not be turned into an ONNX graph with the lanes' contract."""


class FuseError(BuilderError):
    """The graph lacks sites of a fusion, or a step was asked for that does not exist or cannot run for the target."""


class PublishError(BuilderError):
    """A version could not be written; the repository is as it was."""


class ServerError(BuilderError):
    """tritonserver cannot be started, or did not become ready."""


class PrecisionError(BuilderError):
    """The graph's arithmetic cannot be what was asked for."""


class CompileError(BuilderError):
    """No TensorRT to compile with, or it made no plan; the plan file is as it was."""


class ManifestError(BuilderError):
    """A version is missing, damaged, another model or made for another machine."""


class StateError(BuilderError):
    """The file that says what is served cannot be used."""


class ControlError(BuilderError):
    """The server did not do what its model control API was asked for."""


class UnreachableError(ControlError):
    """No server answers at the address."""


class RestrictedError(ControlError):
    """The server restricts the API, and the key was missing or wrong."""


class LoadError(ControlError):
    """A model or a version of it could not be loaded, or is not ready after its load."""


class AnswerError(ControlError):
    """A version that was loaded does not answer, or answers wrongly."""


class PromoteError(BuilderError):
    """Promote or rollback cannot be done; what was served is served on."""
