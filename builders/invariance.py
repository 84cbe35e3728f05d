"""Checks on the torch model itself: the lanes' inputs mean what the model's own mean, and padding does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from builders.errors import SourceError

if TYPE_CHECKING:
    import torch

    from builders.backbone import Backbone

_WIDTH = 24
_LENGTHS = (24, 9, 1, 17)
# One longer text, for windows of attention that a short one does not leave.
_LONG = 1024
# Of FP32 sums in another order; relative to the largest value of the output.
_TOLERANCE = 1e-4


def check_backbone(backbone: Backbone, folder: Path) -> None:
    """Run a few random tokens through a model and refuse it where it is no encoder that can be padded.

    * Each row of a padded batch equals the row alone, whatever tokens the padding holds.
    * The result equals that of the model's own forward with its own mask, [b, L], up to 1024 tokens.
    * A token sees the tokens behind it.

    Args:
        backbone: the model as the lanes call it.
        folder: its folder, for messages.

    Raises:
        SourceError: one of them does not hold; the message says which, and by how much.
    """
    import torch

    architecture = backbone.architecture
    width = min(_WIDTH, architecture.positions)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, architecture.vocab_size, (len(_LENGTHS), width), generator=random, dtype=torch.int32)
    # Models that find their padding by its number must not find any in the text.
    tokens = torch.where(tokens == architecture.pad_id, (architecture.pad_id + 1) % architecture.vocab_size, tokens)
    length = torch.tensor(_LENGTHS, dtype=torch.int32)[:, None].clamp_max(width)
    together = _run(backbone, tokens, length, folder)
    if not torch.isfinite(together).all():
        _refuse("its output is not finite", None, folder)
    per_token = together.ndim == 3 and together.shape[1] == width
    scale = float(together.abs().max()) or 1.0
    for row, count in enumerate(length[:, 0].tolist()):
        alone = _run(backbone, tokens[row : row + 1, :count], length[row : row + 1], folder)
        got = together[row : row + 1, :count] if per_token else together[row : row + 1]
        if got.shape != alone.shape:
            _refuse("its output has another shape when it is padded", list(got.shape), folder)
        if (difference := float((got - alone).abs().max()) / scale) > _TOLERANCE:
            _refuse(f"a text of {count} tokens changes when it is padded to {width}", difference, folder)
        own = _own(backbone, tokens[row : row + 1, :count], folder)
        if (difference := float((own - alone).abs().max()) / scale) > _TOLERANCE:
            _refuse("it differs from its own forward with its own mask", difference, folder)
    longest = min(_LONG, architecture.positions)
    if longest > width:
        text = tokens[:1, torch.arange(longest) % width]
        alone = _run(backbone, text, torch.tensor([[longest]], dtype=torch.int32), folder)
        if (difference := float((_own(backbone, text, folder) - alone).abs().max()) / scale) > _TOLERANCE:
            _refuse(f"a text of {longest} tokens differs from its own forward with its own mask", difference, folder)
    if per_token and width > 1:
        changed = tokens[:1].clone()
        changed[0, 1] = (changed[0, 1] + 7) % architecture.vocab_size
        if torch.equal(_run(backbone, changed, length[:1], folder)[:, 0], together[:1, 0]):
            _refuse("its first token does not see its second: it is no bidirectional encoder", None, folder)


def _run(backbone: Backbone, tokens: torch.Tensor, length: torch.Tensor, folder: Path) -> torch.Tensor:
    with _tried("it does not run on the lanes' inputs", folder):
        output: torch.Tensor = backbone(tokens, length)[0]
    return output


@contextmanager
def _tried(reason: str, folder: Path) -> Iterator[None]:
    import torch

    try:
        with torch.no_grad():
            yield
    except SourceError:
        raise
    except Exception as error:  # each model raises its own kinds
        text = str(error).partition("\n")[0]
        _refuse(f"{reason} ({type(error).__name__}: {text})", None, folder)


def _own(backbone: Backbone, tokens: torch.Tensor, folder: Path) -> torch.Tensor:
    """The same texts through the model as transformers calls it."""
    import torch

    from builders.backbone import output_of

    mask = torch.ones(tokens.shape, dtype=torch.int64)
    with _tried("its own forward fails", folder):
        return output_of(backbone.model(input_ids=tokens.long(), attention_mask=mask))


def _refuse(reason: str, value: object, folder: Path) -> NoReturn:
    raise SourceError(
        f"the model in {folder} is not served: {reason}",
        value=f"{value:.2g} of its largest number" if isinstance(value, float) else value,
        limit=f"{_TOLERANCE:g}" if isinstance(value, float) else "an encoder whose texts can be padded",
        remedy="use a model of another family",
    )
