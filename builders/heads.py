"""The end of the graph: from token vectors or logits to what a lane answers, always computed in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from builders.errors import SourceError
from builders.finite import MASKED
from builders.tasks import Activation, Dense, Normalize, PoolingMode, Shorten, Step, TaskFacts

# torch's own 1e-12 is 0 in FP16, where an all-zero vector would then become 0 / 0.
_SMALLEST_NORM = 1e-6


class EmbeddingHead(torch.nn.Module):
    """Token vectors to one vector: pooling, then Dense, Normalize and the like.

    Args:
        pooling: the modes, whose vectors are put one behind the other.
        steps: what follows; each takes and gives FP32 [b, n].
    """

    def __init__(self, pooling: Sequence[PoolingMode], steps: Sequence[torch.nn.Module] = ()):
        """Keep the parts; see the class."""
        super().__init__()
        self.pooling = tuple(pooling)
        self.steps = torch.nn.ModuleList(steps)

    def forward(self, hidden: torch.Tensor, real: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Pool a batch.

        Args:
            hidden: [b, L, hidden], any float.
            real: BOOL [b, L].
            length: INT32 [b, 1].

        Returns:
            FP32 [b, size]; finite for a row of length 0.
        """
        pooled = [pool(mode, hidden, real, length) for mode in self.pooling]
        vector = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)
        for step in self.steps:
            vector = step(vector)
        return vector


def pool(mode: PoolingMode, hidden: torch.Tensor, real: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """[b, L, hidden] to FP32 [b, hidden]. A sum over 2048 tokens overflows or loses digits in FP16.

    Modes as sentence-transformers' Pooling; texts are padded at their end, so the weights of `weighted` (the place of
    the token, from 1) begin at the row's first one.
    """
    if mode == "cls":
        return hidden[:, 0].to(torch.float32)
    wide = hidden.to(torch.float32)
    if mode == "max":
        return torch.where(real[:, :, None], wide, MASKED).amax(1)
    weights, tokens = real.to(torch.float32), length.clamp_min(1).to(torch.float32)
    places = torch.arange(hidden.shape[1], dtype=torch.int32, device=hidden.device)[None]
    if mode == "last":
        # A sum with one weight, exact: no gather, whose indices would be INT64.
        return (wide * (places == length - 1)[:, :, None].to(torch.float32)).sum(1)
    if mode == "weighted":
        weights = weights * (places + 1).to(torch.float32)
        tokens = tokens * (tokens + 1) / 2
    elif mode == "mean_sqrt":
        tokens = tokens.sqrt()
    return (wide * weights[:, :, None]).sum(1) / tokens


class DenseStep(torch.nn.Module):
    """A linear layer with its activation and, where the module has one, its residual connection."""

    def __init__(self, facts: Dense, weights: dict[str, torch.Tensor]):
        """Take the weights over.

        Args:
            facts: the module's config.
            weights: `linear.weight` [outputs, inputs], `linear.bias` [outputs], `residual.weight` [outputs, inputs].

        Raises:
            SourceError: weights are missing, too many or of another shape.
        """
        super().__init__()
        self.linear = torch.nn.Linear(facts.inputs, facts.outputs, bias=facts.bias)
        self.activation: torch.nn.Module = getattr(torch.nn, facts.activation)()
        self.add_input = facts.residual
        if facts.residual and facts.inputs != facts.outputs:
            self.residual = torch.nn.Linear(facts.inputs, facts.outputs, bias=False)
        try:
            self.load_state_dict({name: tensor.to(torch.float32) for name, tensor in weights.items()})
        except RuntimeError as error:
            raise SourceError(
                f"the weights of the Dense module do not fit its config: {' '.join(str(error).split())}",
                value=facts.folder,
                remedy="save the model with sentence-transformers again",
            ) from None  # fmt: skip

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        """FP32 [b, inputs] to FP32 [b, outputs]."""
        narrow = vector.to(self.linear.weight.dtype)
        out: torch.Tensor = self.activation(self.linear(narrow))
        if self.add_input:
            out = out + (self.residual(narrow) if hasattr(self, "residual") else narrow)
        wide: torch.Tensor = out.to(torch.float32)
        return wide


class NormalizeStep(torch.nn.Module):
    """Scales each vector to length 1."""

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        """FP32 [b, n] to the same shape."""
        norm: torch.Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        return vector / norm.clamp_min(_SMALLEST_NORM)


class ShortenStep(torch.nn.Module):
    """Keeps the first `size` numbers of each vector."""

    def __init__(self, size: int):
        """Keep the size."""
        super().__init__()
        self.size = size

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        """FP32 [b, n] to FP32 [b, min(n, size)]."""
        return vector[:, : self.size]


class LogitsHead(torch.nn.Module):
    """Logits to scores.

    Args:
        activation: `softmax` over the last axis, `sigmoid`, or `none`.
    """

    def __init__(self, activation: Activation):
        """Keep it; see the class."""
        super().__init__()
        self.activation = activation

    def forward(self, logits: torch.Tensor, real: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Compute the scores.

        Args:
            logits: [b, labels] or [b, L, labels], any float.
            real: BOOL [b, L]; not used.
            length: INT32 [b, 1]; not used.

        Returns:
            FP32 of the same shape. What a per-token output holds beyond a row's length has no meaning.
        """
        wide = logits.to(torch.float32)
        if self.activation == "softmax":
            return torch.softmax(wide, dim=-1)
        return torch.sigmoid(wide) if self.activation == "sigmoid" else wide


def make_head(task: TaskFacts, folder: Path) -> torch.nn.Module:
    """The head of a task.

    Args:
        task: what to compute.
        folder: the model's, for the weights of Dense modules.

    Raises:
        SourceError: the weights of a Dense module cannot be read.
    """
    if task.name == "embedding":
        return EmbeddingHead(task.pooling, [_step(step, folder) for step in task.steps])
    return LogitsHead(task.activation)


def _step(step: Step, folder: Path) -> torch.nn.Module:
    if isinstance(step, Normalize):
        return NormalizeStep()
    if isinstance(step, Shorten):
        return ShortenStep(step.size)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / step.folder / "model.safetensors"
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SourceError(
            f"the weights of a Dense module cannot be read: {error}", value=str(path), remedy="fetch the model again"
        ) from None
    return DenseStep(step, weights)
