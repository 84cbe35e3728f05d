"""The queue with two levels that the entry has, and the queued lane of an ensemble with it (docs/queue.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as proto

if TYPE_CHECKING:
    from builders.settings import EntrySettings, LevelSettings

INTERACTIVE, BACKGROUND = 1, 2


def set_queue_policy(config: Any, entry: EntrySettings) -> None:
    """Give a model configuration a dynamic batcher with the entry's window, levels, timeouts and sizes."""
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = round(entry.window_ms * 1000)
    batching.priority_levels = BACKGROUND
    batching.default_priority_level = BACKGROUND
    # An entry per level: a level without one falls back to no timeout and no bound.
    for level, policy in ((INTERACTIVE, entry.interactive), (BACKGROUND, entry.background)):
        batching.priority_queue_policy[level].CopyFrom(_queue_policy(policy))
    batching.default_queue_policy.CopyFrom(_queue_policy(entry.background))


def _queue_policy(level: LevelSettings) -> Any:
    return proto.ModelQueuePolicy(
        timeout_action=proto.ModelQueuePolicy.REJECT,
        default_timeout_microseconds=round(level.timeout_ms * 1000),
        allow_timeout_override=True,
        max_queue_size=level.queue_size,
    )
