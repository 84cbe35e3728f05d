"""Finite masks for models that make their own: no number in the graph is below -1e4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

# Far below any attention score, so that exp() of it is 0, and still finite in FP16 (largest value 65504). The
# usual -3.4e38 turns to -inf there and a row of nothing but padding to NaN.
MASKED = -1e4
# Numbers below this are masks and nothing else.
_LOWEST = -1e6
# Here a very negative number is a bound that nothing reaches, no value of the result.
_BOUNDS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "nan_to_num"})


class FiniteMasks(TorchFunctionMode):
    """Within it, a Python number below -1e6 (torch.finfo(...).min, -inf) given to a torch function is -1e4.

    For families whose attention fills in the number by itself (DeBERTa's masked_fill), out of reach of an argument.
    Works on plain tensors and while torch.export traces.
    """

    def __torch_function__(  # noqa: D105 - torch's protocol
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _BOUNDS:
            return func(*args, **kwargs)
        return func(*(_finite(value) for value in args), **{key: _finite(value) for key, value in kwargs.items()})


def _finite(value: Any) -> Any:
    return MASKED if isinstance(value, float) and value < _LOWEST else value
