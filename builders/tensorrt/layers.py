"""The layers of a plan, and which places of the graph each of them fuses.

Two sources give the same listing: the engine inspector's JSON, where the plan can be deserialised, and the builder's
verbose log under `ProfilingVerbosity.DETAILED`, where there is no driver (TensorRT-RTX builds on a CPU). A layer names
the ONNX nodes it computes in its metadata (`[ONNX Layer: NAME]`); a place is fused when one layer names all its nodes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from builders.errors import CompileError
from builders.tensorrt.sites import Site, Sites

_START = re.compile(r"^(?:VERBOSE: )?Layers:\s*$")
_LINE = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*),(?P<rest>.*)$")
_TACTIC = re.compile(r"TacticName: ([^,]*)")
# The entries are joined by a unit separator (RTX 1.7) or a record separator (10.x).
_METADATA = re.compile(r"\[ONNX Layer: (.*?)\](?=\[|[\x1e\x1f]|\s*$)")
# Weights, and the factors alpha and beta of a product, which are FP32 always.
_CONSTANTS = re.compile(r"Constants: \[.*?\], (?=Outputs: )")
_DATATYPE = re.compile(r"Datatype: (\w+)")
# Myelin numbers its graphs by profile (`_myl1_14`); other layers carry the words.
_PROFILE = re.compile(r"\[profile (\d+)\]|_myl(\d+)_\d+$")
# `_gemm_mha_v2`, `fused_mha`, `fmha`: how TensorRT's attention kernels are called.
_ATTENTION = re.compile(r"mha", re.IGNORECASE)
# A part of the graph that 8.6 hands to its second compiler and does not look into.
_OPAQUE = "Myelin"
# Streams of one plan wait for each other in these; they compute nothing.
_IDLE = frozenset({"signal", "wait", "shape_call"})


@dataclass(frozen=True)
class Layer:
    """One layer (kernel) of a plan."""

    name: str
    """Its name in the plan; a generated kernel's lists its operations (`__myl_AddAddCastMean...`)."""
    kind: str
    """TensorRT's layer type: gemm, kgen, runtime_fusion, ..."""
    profile: int
    """Optimisation profile it belongs to."""
    nodes: tuple[str, ...]
    """Names of the ONNX nodes it computes."""
    types: tuple[str, ...]
    """Types of its inputs and outputs: Half, Float, BFloat16, Int32, ...; sorted, each once."""
    tactic: str
    """The kernel that was chosen; empty where none was."""


@dataclass(frozen=True)
class Fused:
    """How many places of one sort a plan fuses."""

    found: int
    """Places that one layer computes, in the profile that has the fewest."""
    sites: int
    """Places in the graph."""


@dataclass(frozen=True)
class LayerCounts:
    """What a plan fuses, per profile (all profiles of one plan were equal so far; the least counts)."""

    layers: int
    """Layers that compute, in the first profile."""
    opaque: int
    """Layers that do not say which nodes they compute. 8.6 gives nearly all of an encoder as one such (`Myelin`): what
    is found is then only what is shown, and the kernels have to be read with a profiler."""
    attention: Fused
    """Attention cores that are one kernel."""
    layer_norm_residual: Fused
    """LayerNormalization together with the residual addition before it."""
    gelu_bias: Fused
    """GELU together with the bias before it."""
    qkv: Fused
    """Query, key and value projections that are one product."""


@dataclass(frozen=True)
class LayerListing:
    """All layers of a plan, in order of execution."""

    layers: tuple[Layer, ...]

    @property
    def profiles(self) -> tuple[int, ...]:
        """Optimisation profiles with layers of their own, rising."""
        return tuple(sorted({layer.profile for layer in self.layers}))

    def kinds(self) -> dict[str, int]:
        """Layers by type, most frequent first."""
        return dict(Counter(layer.kind for layer in self.layers).most_common())

    def counts(self, sites: Sites) -> LayerCounts:
        """Compare the listing with the places of the graph it was built from."""
        first = self.profiles[0] if self.layers else 0
        return LayerCounts(
            layers=sum(layer.profile == first for layer in self.layers),
            opaque=sum(layer.kind == _OPAQUE and not layer.nodes for layer in self.layers),
            attention=self._fused(sites.attention),
            layer_norm_residual=self._fused(sites.layer_norm_residual),
            gelu_bias=self._fused(sites.gelu_bias),
            qkv=self._fused(sites.qkv),
        )

    def unfused(self, places: Iterable[Site]) -> list[Site]:
        """The places that no single layer of every profile computes."""
        return [site for site in places if not all(self._covers(site, profile) for profile in self.profiles)]

    def to_json(self) -> str:
        """The listing as JSON, for the report."""
        return json.dumps([asdict(layer) for layer in self.layers], indent=1)

    def _fused(self, places: tuple[Site, ...]) -> Fused:
        found = [sum(self._covers(site, profile) for site in places) for profile in self.profiles]
        return Fused(min(found, default=0), len(places))

    def _covers(self, site: Site, profile: int) -> bool:
        candidates = (layer for layer in self.layers if layer.profile == profile and site.nodes.issubset(layer.nodes))
        return any(not site.operator or _ATTENTION.search(f"{layer.name} {layer.tactic}") for layer in candidates)


def parse_log(lines: Iterable[str]) -> LayerListing:
    """Read the listing from the builder's verbose log.

    Args:
        lines: what the logger was told, one message may hold several lines.

    Raises:
        CompileError: no listing in it.
    """
    layers: list[Layer] = []
    inside = False
    # Not splitlines(): it takes TensorRT's record separators for line ends.
    for line in (part for message in lines for part in message.split("\n")):
        if _START.match(line):
            inside = True
        elif inside and (match := _LINE.match(line)):
            layers.append(_layer(match["name"], match["kind"], match["rest"]))
        elif inside:  # the listing ends at its first other line
            inside = False
    if not layers:
        raise CompileError(
            "the builder's log holds no layer listing",
            limit="a verbose log with DETAILED profiling verbosity",
            remedy="name the TensorRT version in a report to this project",
        )
    return _listing(layers)


def parse_inspector(text: str) -> LayerListing:
    """Read the listing from `EngineInspector.get_engine_information(JSON)`.

    Raises:
        CompileError: no JSON, or no detailed layers in it (the plan was built without DETAILED verbosity).
    """
    try:
        # Not strict: 8.6 writes its record separators as they are.
        entries = json.loads(text, strict=False)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise CompileError(f"the engine inspector's answer cannot be read: {error}", value=text[:80]) from error
    if not entries or not isinstance(entries[0], dict):
        raise CompileError(
            "the plan has layer names only", limit="ProfilingVerbosity.DETAILED", remedy="compile the plan again"
        )
    return _listing([_entry(entry) for entry in entries])


def _listing(layers: list[Layer]) -> LayerListing:
    return LayerListing(tuple(layer for layer in layers if layer.kind not in _IDLE))


def _entry(entry: dict[str, Any]) -> Layer:
    # The same names as the log's, so that one function reads both.
    tensors = [*entry.get("Inputs", []), *entry.get("Outputs", [])]
    types = "".join(f"Datatype: {_plain_type(tensor)} " for tensor in tensors)
    rest = f"{types}TacticName: {entry.get('TacticName', '')}, Metadata: {entry.get('Metadata', '')}"
    return _layer(str(entry.get("Name", "")), str(entry.get("LayerType", "")), rest)


def _plain_type(tensor: dict[str, Any]) -> str:
    """TensorRT 8.6 puts the type into words: `Format/Datatype: Row major linear FP16 format`.

    With a free batch it says `N/A due to dynamic shapes`: no type then.
    """
    words = str(tensor.get("Datatype") or tensor.get("Format/Datatype", ""))
    if words.startswith("N/A"):
        return ""
    known = {"FP16": "Half", "FP32": "Float", "BF16": "BFloat16", "INT32": "Int32", "INT8": "Int8", "BOOL": "Bool"}
    return next((name for word, name in known.items() if word in words), words.split(" ")[0])


def _layer(name: str, kind: str, rest: str) -> Layer:
    head, _, metadata = rest.partition("Metadata:")
    profile = _PROFILE.search(name)
    tactic = _TACTIC.search(head)
    return Layer(
        name=name,
        kind=kind.strip(),
        profile=int(profile[1] or profile[2]) if profile else 0,
        nodes=tuple(dict.fromkeys(_METADATA.findall(metadata.strip()))),
        types=tuple(sorted(set(_DATATYPE.findall(_CONSTANTS.sub("", head))))),
        tactic=tactic[1].strip() if tactic else "",
    )
