"""The encoder with the lanes' contract: token numbers and lengths in, finished vectors out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from builders.errors import SourceError
from builders.source import EncoderSource, Pooling
from builders.tiling import tile_positions

# Far below any attention score, so that exp() of it is 0, and still finite in FP16 (largest value 65504). The
# usual -3.4e38 turns to -inf there and a row of nothing but padding to NaN.
MASKED = -1e4
# torch's own 1e-12 is 0 in FP16, where an all-zero vector would then become 0 / 0.
_SMALLEST_NORM = 1e-6


class ContractEncoder(torch.nn.Module):
    """A transformers encoder behind the two inputs of a lane; everything else is computed inside the graph.

    Args:
        model: a transformers encoder in eval mode with eager attention.
        pooling: `mean` over the real tokens, or `cls`, the first token.
        normalize: scale each vector to length 1.
        first_position: row of the position table that the first token takes.
        token_types: the model takes token type ids (all zero here).
    """

    def __init__(
        self, model: torch.nn.Module, *, pooling: Pooling, normalize: bool, first_position: int = 0, token_types: bool
    ):
        """Wrap `model`; see the class."""
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.first_position = first_position
        self.token_types = token_types

    def forward(self, input_ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Encode a padded batch.

        Args:
            input_ids: INT32 [b, L], token numbers; what lies beyond a row's length does not matter.
            length: INT32 [b, 1], tokens of each row, 0 to L; a row of length 0 gives a finite vector of no meaning.

        Returns:
            FP32 [b, dim].
        """
        steps = torch.arange(input_ids.shape[1], dtype=torch.int32, device=input_ids.device)[None]
        real = steps < length
        # A 4-D mask is taken as it is and added to the scores; a 2-D one would be rebuilt with -3.4e38.
        # In the model's own type: an FP32 mask would lift the scores of an FP16 model to FP32.
        bias = torch.where(real, 0.0, MASKED)[:, None, None, :].to(next(self.model.parameters()).dtype)
        extra: dict[str, torch.Tensor] = {}
        if self.token_types:
            # [1, 1] broadcasts: the lookup folds into one constant row instead of a [b, L, hidden] gather.
            extra["token_type_ids"] = torch.zeros(1, 1, dtype=torch.int32, device=input_ids.device)
        hidden = self.model(
            input_ids=input_ids, attention_mask=bias, position_ids=steps + self.first_position, **extra
        ).last_hidden_state
        vector = self._pool(hidden, real, length)
        if self.normalize:
            vector = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True).clamp_min(_SMALLEST_NORM)
        return vector

    def _pool(self, hidden: torch.Tensor, real: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """[b, L, hidden] to FP32 [b, hidden]. A sum over 2048 tokens overflows or loses digits in FP16."""
        if self.pooling == "cls":
            return hidden[:, 0].to(torch.float32)
        weights = real[:, :, None].to(torch.float32)
        return (hidden.to(torch.float32) * weights).sum(1) / length.clamp_min(1).to(torch.float32)


def load_encoder(source: EncoderSource) -> ContractEncoder:
    """Load the weights of a source, tiled if it says so, in FP32, eval mode and eager attention.

    Eager, because it exports to plain MatMul, Add and Softmax nodes that TensorRT and the fuse step recognise.

    Raises:
        SourceError: the weights cannot be read, or lack tensors that the model needs.
    """
    from transformers import AutoModel

    try:
        with _quiet_transformers():
            model, loading = AutoModel.from_pretrained(
                str(source.folder),
                add_pooling_layer=False,  # BertPooler's tanh layer is no part of an embedding
                attn_implementation="eager",
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds
        raise SourceError(
            f"the weights cannot be loaded: {error}", value=str(source.folder), remedy="fetch or save the model again"
        ) from error
    # transformers fills a missing tensor with random numbers and only warns.
    if missing := sorted(loading["missing_keys"]):
        raise SourceError(
            "the weights lack tensors",
            value=missing[:5],
            limit=f"{len(missing)} missing",
            remedy="save the whole model again",
        )
    if source.tiled:
        tile_positions(model, source.positions, first=source.first_position)
    encoder = ContractEncoder(
        model,
        pooling=source.pooling,
        normalize=source.normalize,
        first_position=source.first_position,
        token_types=source.token_types,
    )
    # On the wrapper: a module starts in training mode, and an exported dropout would stay.
    return encoder.eval().requires_grad_(False)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no report on unused tensors; missing ones are refused above."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
