"""A transformers model behind the lanes' inputs: mask, positions and token types are computed inside the graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from builders.errors import SourceError
from builders.families import FAMILIES, Architecture, Family, MaskForm
from builders.finite import MASKED, FiniteMasks
from builders.invariance import check_backbone
from builders.tiling import tile_positions


class Backbone(torch.nn.Module):
    """A transformers encoder, with or without a task head, behind the inputs of a lane.

    Args:
        model: a transformers model in eval mode with eager attention.
        architecture: what its config says.
        wide: call the model as its own users do: INT64, [b, L] for every input, and the padding's tokens replaced by
            the padding token. For models without a row of their own that take nothing less.
    """

    def __init__(self, model: torch.nn.Module, architecture: Architecture, *, wide: bool = False):
        """Wrap `model`; see the class."""
        super().__init__()
        self.model = model
        self.architecture = architecture
        self.wide = wide
        family = FAMILIES.get(architecture.family, Family())
        self.mask: MaskForm = "own" if wide else family.mask
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._takes_types = architecture.segments > 0 and "token_type_ids" in taken

    def forward(
        self, input_ids: torch.Tensor, length: torch.Tensor, segment_start: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a padded batch.

        Args:
            input_ids: INT32 [b, L], token numbers; what lies beyond a row's length does not matter.
            length: INT32 [b, 1], tokens of each row, 0 to L; a row of length 0 gives finite numbers of no meaning.
            segment_start: INT32 [b, 1], first token of the second segment; None or `length`: one segment.

        Returns:
            The model's output and which tokens are real, BOOL [b, L]. The output is `last_hidden_state`
            [b, L, hidden], or `logits` of a model with a head, [b, labels] or [b, L, labels] (answering: start and
            end as [b, L, 2]), in the model's dtype.
        """
        steps = torch.arange(input_ids.shape[1], dtype=torch.int32, device=input_ids.device)[None]
        real = steps < length
        extra: dict[str, torch.Tensor] = {}
        if self._takes_positions:
            positions = steps + self.architecture.first_position
            extra["position_ids"] = positions.long().expand(input_ids.shape) if self.wide else positions
        if self._takes_types:
            extra["token_type_ids"] = self._token_types(steps, real, segment_start)
        # A head that pools by the mask divides by the number of its tokens, so that an empty row needs one.
        plain = (steps < length.clamp_min(1)).to(torch.int64)
        if self.wide:
            # Some look at the neighbours of a token without a mask (MobileBERT): the padding token's row is zero there.
            input_ids = torch.where(real, input_ids, self.architecture.pad_id).long()
        with self._masks(real):
            result = self.model(input_ids=input_ids, attention_mask=plain, **extra)
        return output_of(result), real

    def _token_types(self, steps: torch.Tensor, real: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
        """INT32 [b, L], or [1, 1] where all are 0: it broadcasts, and the lookup folds into one constant row."""
        if start is not None and self.architecture.segments > 1:
            types = ((steps >= start) & real).to(torch.int32)
        elif self.wide:
            types = torch.zeros_like(real, dtype=torch.int32)
        else:
            types = torch.zeros(1, 1, dtype=torch.int32, device=steps.device)
        return types.long() if self.wide else types

    @contextmanager
    def _masks(self, real: torch.Tensor) -> Iterator[None]:
        """Let the encoder inside the model see a finite mask; a head around it keeps the plain one, [b, L]."""
        base: torch.nn.Module = self.model.base_model  # type: ignore[assignment]
        handle = None
        if self.mask != "own":
            mask = self._additive(real)

            def hand_over(
                module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                return args, kwargs | {"attention_mask": mask}

            handle = base.register_forward_pre_hook(hand_over, with_kwargs=True)
        try:
            with FiniteMasks() if self.mask == "own" else nullcontext():
                yield
        finally:
            if handle is not None:
                handle.remove()

    def _additive(self, real: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask as numbers: [b, 1, 1, L], and [b, 1, L, L] for layers that see a window only.

        transformers takes a 4-D mask as it is and adds it to the scores; a 2-D one it rebuilds with -3.4e38.
        """
        # In the model's own type: an FP32 mask would lift the scores of an FP16 model to FP32.
        dtype = next(self.model.parameters()).dtype
        keys = real[:, None, None, :]
        everywhere = torch.where(keys, 0.0, MASKED).to(dtype)
        if self.mask == "additive":
            return everywhere
        masks = {"full_attention": everywhere}
        if self.architecture.local_window is not None:
            half = self.architecture.local_window // 2
            steps = torch.arange(real.shape[1], dtype=torch.int32, device=real.device)
            near = (steps[None, :] - steps[:, None]).abs() <= half
            # One choice, not a sum of two masks: -2e4 would still do, but the two are one Where in the graph.
            masks["sliding_attention"] = torch.where(keys & near[None, None], 0.0, MASKED).to(dtype)
        return masks


def output_of(result: object) -> torch.Tensor:
    """The one tensor of a transformers output: logits (start and end stacked, [b, L, 2]) or last_hidden_state.

    Raises:
        SourceError: it has neither.
    """
    start, end = getattr(result, "start_logits", None), getattr(result, "end_logits", None)
    if start is not None and end is not None:
        return torch.stack((start, end), dim=-1)
    logits = getattr(result, "logits", None)
    found = logits if logits is not None else getattr(result, "last_hidden_state", None)
    if not isinstance(found, torch.Tensor):
        raise SourceError(
            "the model gives neither last_hidden_state nor logits",
            value=type(result).__name__,
            remedy="use a model with one of the heads that are served",
        )
    return found


def load_backbone(
    folder: Path, architecture: Architecture, *, auto_class: str = "AutoModel", tile: int | None = None
) -> Backbone:
    """Load the weights of a folder in FP32, eval mode and eager attention.

    Eager, because it exports to plain MatMul, Add and Softmax nodes that TensorRT and the fuse step recognise.
    A family without a row of its own is checked here (builders/invariance.py).

    Args:
        folder: config.json and safetensors weights.
        architecture: what config.json says.
        auto_class: the class of transformers that loads it: `AutoModel`, `AutoModelForSequenceClassification`, ...
        tile: usable positions after tiling, tokens; None: as stored.

    Raises:
        SourceError: the weights cannot be read or lack tensors, the positions cannot be tiled, or the checks fail.
    """
    import transformers

    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "dtype": torch.float32,
        "local_files_only": True,
        "output_loading_info": True,
        "trust_remote_code": False,
        "use_safetensors": True,
    }
    loader = getattr(transformers, auto_class)
    try:
        with quiet_transformers():
            kind = loader._model_mapping[type(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))]
            if auto_class == "AutoModel" and "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
                options["add_pooling_layer"] = False  # BertPooler's tanh layer is no part of an embedding
            model, loading = loader.from_pretrained(str(folder), **options)
    except Exception as error:  # safetensors, transformers and torch each raise their own kinds
        raise SourceError(
            f"the weights cannot be loaded: {error}", value=str(folder), remedy="fetch or save the model again"
        ) from error
    # transformers fills a missing tensor with random numbers and only warns.
    if missing := sorted(loading["missing_keys"]):
        raise SourceError(
            "the weights lack tensors",
            value=missing[:5],
            limit=f"{len(missing)} missing",
            remedy="save the whole model again",
        )
    if tile is not None and tile != architecture.positions:
        tile_positions(model.base_model, tile, first=architecture.first_position)
    # On the wrapper: a module starts in training mode, and an exported dropout would stay.
    backbone = Backbone(model, architecture).eval().requires_grad_(False)
    return _checked(backbone, folder) if architecture.generic else backbone


def _checked(backbone: Backbone, folder: Path) -> Backbone:
    """The form of the inputs that passes the checks; the lean one gives the smaller graph."""
    try:
        check_backbone(backbone, folder)
    except SourceError:
        backbone = Backbone(backbone.model, backbone.architecture, wide=True).eval()
        check_backbone(backbone, folder)
    return backbone


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar and no report on unused tensors; missing ones are refused by `load_backbone`."""
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
