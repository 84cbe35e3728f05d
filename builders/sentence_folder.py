"""Folders that sentence-transformers wrote, read as the library itself reads them.

`modules.json` lists the modules and their folders. An encoder is a Transformer, a Pooling and whatever of Dense,
Normalize and Dropout follows, in any order; a cross-encoder is a Transformer alone. Checked against the source of
sentence-transformers 6.2 (`base/model.py`, `sentence_transformer/modules/pooling.py`, `base/modules/dense.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

from builders.documents import read_json, read_object, read_object_if_there
from builders.errors import SourceError
from builders.tasks import Dense, Normalize, PoolingMode, Shorten, Step

_REMEDY = "save the model with sentence-transformers again"
# The library's names, in the order in which it joins the vectors of the old boolean keys.
_MODES: Mapping[str, PoolingMode] = MappingProxyType({
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt", "weightedmean": "weighted",
    "lasttoken": "last",
})  # fmt: skip
_OLD_KEYS = MappingProxyType({
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
})  # fmt: skip
# Files that the library tries, in its order; the first one that says anything counts.
_LIMITS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
ACTIVATIONS = (
    "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish", "ReLU",
    "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip
"""Activations of a Dense module: classes of torch.nn that need no arguments and that ONNX has or can spell."""


@dataclass(frozen=True)
class SentenceFolder:
    """What a sentence-transformers folder says beside its transformer's config.json."""

    kind: Literal["encoder", "cross-encoder"]
    """One vector for a text, or one score for a pair."""
    transformer: str
    """Folder of config.json, weights and tokeniser, relative to the model's; empty for the model's own."""
    pooling: tuple[PoolingMode, ...]
    """How token vectors become one vector."""
    steps: tuple[Step, ...]
    """What follows the pooling."""
    prompts: Mapping[str, str]
    """Texts put before a text, by name."""
    default_prompt: str | None
    """Name of the prompt that the library takes when none is named."""
    activation: str | None
    """Import path of a cross-encoder's activation."""
    files: tuple[str, ...]
    """Files that decide the answer, relative to the model's folder; the transformer's own are not among them."""


@dataclass(frozen=True)
class Limits:
    """What the Transformer module's own file says of texts."""

    max_tokens: int | None
    """Longest text, tokens; longer ones are cut."""
    lower_case: bool
    """Texts are lower-cased before the tokeniser's own steps."""


def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """Read modules.json and the modules' own files; None where there is no modules.json.

    Raises:
        SourceError: a file is missing or unreadable, or a module is of a kind that is not served.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = _modules(folder)
    own = read_object_if_there(folder / "config_sentence_transformers.json")
    prompts, default = _prompts(own)
    names = [name for name, _ in modules]
    transformer = modules[0][1] if modules else ""
    files = ["modules.json"]
    if names == ["Transformer"]:
        if own.get("model_type") != "CrossEncoder":
            raise SourceError(
                "modules.json names a Transformer alone", value=str(folder),
                limit="a Pooling behind it, or a CrossEncoder",
                remedy="add a Pooling module, or remove modules.json and set model.pooling",
            )  # fmt: skip
        if default is not None and prompts[default]:
            raise SourceError(
                "the cross-encoder has a default prompt", value=default, limit="pairs are read as they are sent",
                remedy="set default_prompt_name of config_sentence_transformers.json to null",
            )  # fmt: skip
        activation = own.get("activation_fn")
        return SentenceFolder("cross-encoder", transformer, (), (), {}, None, activation, tuple(files))
    if names[:2] != ["Transformer", "Pooling"] or not set(names[2:]) <= {"Dense", "Normalize", "Dropout"}:
        raise SourceError(
            f"the modules of {folder / 'modules.json'} are not served", value=names,
            limit="Transformer, Pooling, then Dense, Normalize and Dropout in any order", remedy="use another model",
        )  # fmt: skip
    files.append(f"{modules[1][1]}/config.json")
    pooling = _pooling(folder / modules[1][1] / "config.json", any(prompts.values()))
    steps: list[Step] = []
    for name, inner in modules[2:]:
        if name == "Dense":
            steps.append(_dense(folder, inner))
            files += [f"{inner}/config.json", f"{inner}/model.safetensors"]
        elif name == "Normalize":
            _check_tensor(read_object_if_there(folder / inner / "config.json"), folder / inner)
            steps.append(Normalize())
    if (size := own.get("truncate_dim")) is not None:
        steps.append(Shorten(_positive(size, "truncate_dim of config_sentence_transformers.json")))
    return SentenceFolder("encoder", transformer, pooling, tuple(steps), prompts, default, None, tuple(files))


def read_limits(transformer: Path) -> Limits:
    """Read `sentence_bert_config.json` (or its older names) of the transformer's folder.

    Raises:
        SourceError: the file cannot be read, or its limit is no positive integer.
    """
    found = (read_object_if_there(transformer / name) for name in _LIMITS)
    config = next((config for config in found if config), {})
    longest = config.get("max_seq_length")
    if longest is not None:
        longest = _positive(longest, "max_seq_length", "set model.max_tokens")
    return Limits(longest, bool(config.get("do_lower_case")))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class names and folders, the classes being the library's own."""
    path = folder / "modules.json"
    listed = read_json(path, _REMEDY)
    try:
        entries = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (TypeError, KeyError):
        raise SourceError("modules.json is no list of modules", value=str(path), remedy=_REMEDY) from None
    modules = []
    for kind, inner in entries:
        # sentence_transformers.models.Pooling and, since version 5.4, longer module paths: the class name stays.
        if not kind.startswith("sentence_transformers."):
            raise SourceError(
                "modules.json names a module that is not sentence-transformers' own", value=kind,
                limit="trust_remote_code is never on", remedy="use a model without it",
            )  # fmt: skip
        place = PurePosixPath(inner)
        if place.is_absolute() or ".." in place.parts:
            raise SourceError("a module lies outside the model's folder", value=inner, remedy=_REMEDY)
        modules.append((kind.rpartition(".")[2], "" if inner == "." else inner.rstrip("/")))
    return modules


def _prompts(config: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    found = config.get("prompts") or {}
    if not isinstance(found, dict):
        raise SourceError("prompts of config_sentence_transformers.json are no mapping", value=found, remedy=_REMEDY)
    prompts = {str(name): str(text) for name, text in found.items() if text is not None}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise SourceError(
            "default_prompt_name of config_sentence_transformers.json is none of its prompts", value=default,
            limit=f"prompts: {', '.join(prompts) or 'none'}", remedy="correct it",
        )  # fmt: skip
    return prompts, default


def _pooling(path: Path, prompted: bool) -> tuple[PoolingMode, ...]:
    config = read_object(path, "restore it, or remove modules.json and set model.pooling")
    if config.get("include_prompt") is False and prompted:
        raise SourceError(
            f"{path} leaves the prompt out of the pooling (include_prompt: false)", value=False,
            limit="a prompt is a part of the text here: the lanes do not know where it ends",
            remedy="use a model whose pooling includes the prompt",
        )  # fmt: skip
    found = config.get("pooling_mode")
    if found is None:
        found = [mode for key, mode in _OLD_KEYS.items() if config.get(key)] or ["mean"]
    modes = [found] if isinstance(found, str) else found
    if not isinstance(modes, list) or not modes or not all(mode in _MODES for mode in modes):
        raise SourceError(
            f"the pooling of {path} is not served", value=found, limit=", ".join(_MODES),
            remedy="use another model, or set model.pooling and remove modules.json",
        )  # fmt: skip
    return tuple(_MODES[mode] for mode in modes)


def _dense(folder: Path, inner: str) -> Dense:
    place = folder / inner
    config = read_object(place / "config.json", _REMEDY)
    _check_tensor(config, place)
    if not (place / "model.safetensors").is_file():
        found = sorted(path.name for path in place.iterdir() if path.suffix in (".bin", ".pt"))
        raise SourceError(
            f"no model.safetensors in {place}", value=found, limit="pickled weights can run code", remedy=_REMEDY
        )
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    # What is not torch's own needs trust_remote_code in the library, which takes Tanh without it.
    name = str(named).rpartition(".")[2] if str(named).startswith("torch.") else "Tanh"
    if name not in ACTIVATIONS:
        raise SourceError(
            f"the activation of {place} is not served", value=named, limit=f"torch.nn: {', '.join(ACTIVATIONS)}",
            remedy="use another model",
        )  # fmt: skip
    return Dense(
        folder=inner,
        inputs=_positive(config.get("in_features"), f"in_features of {place}"),
        outputs=_positive(config.get("out_features"), f"out_features of {place}"),
        bias=bool(config.get("bias", True)),
        activation=name,
        residual=bool(config.get("use_residual", False)),
    )


def _check_tensor(config: dict[str, Any], place: Path) -> None:
    """Refuse a module that reads or writes something else than the text's vector."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise SourceError(
                f"{key} of {place} is not served", value=config[key], limit="sentence_embedding: the text's one vector",
                remedy="use another model",
            )  # fmt: skip


def _positive(value: object, what: str, remedy: str = _REMEDY) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SourceError(f"{what} is no positive integer", value=value, remedy=remedy)
    return value
