"""Steps `layer_norm` and `gelu`: one operator each, so that TensorRT fuses them with the residual add and the bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from builders.fuse.clean import sweep
from builders.fuse.graph import constant
from builders.fuse.step import Context


@dataclass(frozen=True)
class LayerNorm:
    """ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul, Add -> LayerNormalization (onnxscript's own rule)."""

    name: str = "layer_norm"
    about: str = "each LayerNorm one LayerNormalization operator"
    sites: tuple[str, ...] = ("layer_norm",)

    def apply(self, model: ir.Model, context: Context) -> int:
        """Returns the LayerNorms that were decomposed and are one operator now."""
        before = _count(model, "LayerNormalization")
        if _norm_rules().apply_to_model(model):
            sweep(model)
        return _count(model, "LayerNormalization") - before


@dataclass(frozen=True)
class Gelu:
    """x Phi(x), with Erf or as the tanh approximation, -> Gelu (opset 20).

    onnxscript's own rules make ONNX Runtime's com.microsoft::Gelu, which TensorRT does not take; hence these.
    """

    name: str = "gelu"
    about: str = "each GELU one Gelu operator, Erf and tanh form"
    sites: tuple[str, ...] = ("gelu",)

    def apply(self, model: ir.Model, context: Context) -> int:
        """Returns the GELUs that were decomposed and are one operator now."""
        from onnxscript.rewriter import RewriteRule, RewriteRuleSet

        before = _count(model, "Gelu")
        # The rules and their mirror images take seconds to look for what one glance rules out.
        if not _count(model, "Erf") + _count(model, "Tanh"):
            return 0
        rules = [RewriteRule(pattern, _erf) for pattern in _erf_forms()]
        rules += [RewriteRule(pattern, _tanh) for pattern in _tanh_forms()]
        if RewriteRuleSet(rules, commute=True).apply_to_model(model):
            sweep(model)
        return _count(model, "Gelu") - before


def _norm_rules() -> Any:
    """onnxscript's two rules, kept to a learned scale and bias.

    As they come they take anything for the scale and for the bias: a gate behind a norm without scale, or a residual
    added to a norm without bias, would become part of the operator.
    """
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules.fusion import _layer_norm

    class Scaled(_layer_norm.LayerNormFusion):  # type: ignore[misc]
        def check(self, context: Any, x: ir.Value, epsilon: ir.Value, scale: ir.Value, **rest: Any) -> Any:
            if not _is_learned(scale):
                return False
            return super().check(context, x=x, epsilon=epsilon, scale=scale, **rest)

    class Biased(_layer_norm.LayerNormBiasFusion):  # type: ignore[misc]
        def check(self, context: Any, bias: ir.Value, **rest: Any) -> bool:
            return _is_learned(bias)

    # Without commute the rules want the scale and the bias at the right, where older exporters do not put them.
    return RewriteRuleSet([Scaled.rule(), Biased.rule()], commute=True)


def _is_learned(value: ir.Value) -> bool:
    """One constant number per channel, [hidden]."""
    array = constant(value)
    return array is not None and array.ndim == 1


def _count(model: ir.Model, operator: str) -> int:
    return sum(node.op_type == operator for node in model.graph)


def _erf(op: Any, x: ir.Value) -> Any:
    return op.Gelu(x, approximate="none")


def _tanh(op: Any, x: ir.Value) -> Any:
    return op.Gelu(x, approximate="tanh")


def _halved(gate: Callable[[Any, Any], Any]) -> list[Callable[[Any, Any], Any]]:
    """0.5 x g(x) with the half at each of its three places."""
    return [
        lambda op, x: op.Mul(op.Mul(x, gate(op, x)), 0.5),
        lambda op, x: op.Mul(x, op.Mul(gate(op, x), 0.5)),
        lambda op, x: op.Mul(op.Mul(x, 0.5), gate(op, x)),
    ]


def _erf_forms() -> list[Callable[[Any, Any], Any]]:
    """g = 1 + erf(x / sqrt 2)."""
    return [
        *_halved(lambda op, x: op.Add(op.Erf(op.Div(x, math.sqrt(2.0))), 1.0)),
        *_halved(lambda op, x: op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0)),
    ]


def _tanh_forms() -> list[Callable[[Any, Any], Any]]:
    """g = 1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)), and as transformers' gelu_fast groups it."""

    def gate(cube: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def make(op: Any, x: Any) -> Any:
            inner = op.Add(x, op.Mul(cube(op, x), 0.044715))
            return op.Add(op.Tanh(op.Mul(inner, math.sqrt(2.0 / math.pi))), 1.0)

        return make

    def fast(op: Any, x: Any) -> Any:
        outer = op.Mul(x, math.sqrt(2.0 / math.pi))
        inner = op.Add(op.Mul(op.Mul(x, 0.044715), x), 1.0)
        return op.Add(op.Tanh(op.Mul(outer, inner)), 1.0)

    return [
        *_halved(fast),
        *_halved(gate(lambda op, x: op.Pow(x, 3.0))),
        *_halved(gate(lambda op, x: op.Mul(op.Mul(x, x), x))),
    ]
