"""The encoder with the lanes' contract: token numbers and lengths in, finished answers out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from builders.backbone import Backbone, load_backbone
from builders.heads import make_head

if TYPE_CHECKING:
    from builders.source import EncoderSource


class ContractEncoder(torch.nn.Module):
    """A backbone and a head behind the inputs of a lane; everything else is computed inside the graph.

    Args:
        backbone: a transformers model that takes a lane's inputs.
        head: takes its output, BOOL [b, L] and `length`, and gives the lane's output.
    """

    def __init__(self, backbone: Backbone, head: torch.nn.Module):
        """Join the two; see the class."""
        super().__init__()
        self.backbone = backbone
        self.head = head

    @property
    def model(self) -> torch.nn.Module:
        """The transformers model."""
        return self.backbone.model

    def forward(
        self, input_ids: torch.Tensor, length: torch.Tensor, segment_start: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode a padded batch.

        Args:
            input_ids: INT32 [b, L], token numbers; what lies beyond a row's length does not matter.
            length: INT32 [b, 1], tokens of each row, 0 to L; a row of length 0 gives finite numbers of no meaning.
            segment_start: INT32 [b, 1], first token of the second text; `length` or None where there is none.

        Returns:
            FP32 [b, size], or [b, L, size] of a task that answers for each token.
        """
        output, real = self.backbone(input_ids, length, segment_start)
        answer: torch.Tensor = self.head(output, real, length)
        return answer


def load_encoder(source: EncoderSource) -> ContractEncoder:
    """Load the weights of a source, tiled if it says so, in FP32, eval mode and eager attention.

    Raises:
        SourceError: the weights cannot be read, or lack tensors that the model needs.
    """
    backbone = load_backbone(
        source.transformer,
        source.architecture,
        auto_class=source.task.auto_class,
        tile=source.positions if source.tiled else None,
    )
    encoder = ContractEncoder(backbone, make_head(source.task, source.folder))
    # On the wrapper: a module starts in training mode, and an exported dropout would stay.
    return encoder.eval().requires_grad_(False)
