"""What an engine tells the lane when a batch cannot be computed."""

from __future__ import annotations


class EngineError(RuntimeError):
    """A batch failed, or the engine cannot be opened; the message says what, the value, the limit and what to do."""


class EngineBrokenError(EngineError):
    """The engine can compute nothing any more; the lane answers UNAVAILABLE until it is loaded again."""
