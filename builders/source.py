"""Where the model is and what its own files say of it; nothing is downloaded, imported or executed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from builders.errors import SourceError
from builders.hub import HUB, fetch
from builders.tiling import check_tiling

if TYPE_CHECKING:
    from builders.settings import ModelSettings

Pooling = Literal["mean", "cls"]

_PACKAGE = "package:"
_LFS_POINTER = b"version https://git-lfs"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# sentence-transformers' old boolean keys and the modes they stand for; none of them set means "mean".
_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Family:
    """What differs between encoder families as far as the graph's inputs are concerned."""

    positions_after_pad: bool
    """Positions start at pad_id + 1 (RoBERTa's numbering) instead of at 0."""
    token_types: bool
    """The model takes token type ids."""
    pad_id: int
    """Padding token when config.json names none."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": Family(positions_after_pad=False, token_types=True, pad_id=0),
        "mpnet": Family(positions_after_pad=True, token_types=False, pad_id=1),
        # RoBERTa's own token types are one row of zeros' type: looked up once, at export, like BERT's.
        "roberta": Family(positions_after_pad=True, token_types=True, pad_id=1),
        "xlm-roberta": Family(positions_after_pad=True, token_types=True, pad_id=1),
    }
)
"""Families whose export is proven against sentence-transformers, by `model_type` of config.json."""


@dataclass(frozen=True)
class EncoderSource:
    """An encoder on disk: what the graph, the tokeniser and the rendered configuration need to know of it."""

    folder: Path
    """Folder with config.json, tokenizer.json and the safetensors weights."""
    family: str
    """`model_type` of config.json, a key of `FAMILIES`."""
    hidden_size: int
    """Width of a token vector."""
    dim: int
    """Width of EMBEDDING."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads of a block."""
    positions: int
    """Longest text the graph takes, tokens, after tiling."""
    table_positions: int
    """Rows of the position table as stored, unusable ones included."""
    pad_id: int
    """Padding token."""
    pooling: Pooling
    """How token vectors become one vector."""
    normalize: bool
    """EMBEDDING is scaled to length 1."""
    max_tokens: int
    """Longest text that is not cut, tokens, special tokens included; at most `positions`."""
    sha256: str
    """Hash of every file and setting that decides the result: equal hashes give equal vectors."""

    @property
    def first_position(self) -> int:
        """Row of the position table that the first token takes."""
        return self.pad_id + 1 if FAMILIES[self.family].positions_after_pad else 0

    @property
    def token_types(self) -> bool:
        """The model takes token type ids."""
        return FAMILIES[self.family].token_types

    @property
    def tiled(self) -> bool:
        """The position table is longer than the stored one."""
        return self.positions > self.table_positions - self.first_position


def open_source(settings: ModelSettings) -> EncoderSource:
    """Find the model of the settings and read what its files say; weights are hashed, not loaded.

    Pooling and normalisation are those of sentence-transformers (modules.json, 1_Pooling/config.json); a folder
    without modules.json is pooled by the mean and not normalised. The settings override both.

    Args:
        settings: the `model` section of deploy.yaml.

    Raises:
        SourceError: the folder or a file of it is missing or unreadable, or the model is of a kind that is not served.
    """
    folder = _resolve(settings.source)
    config = _read_json(folder / "config.json", "point model.source at the folder that holds config.json")
    name, family = _check_config(config, folder)
    _check_files(folder)
    modules = _read_modules(folder)
    pooling = _pooling(folder, modules) if settings.pooling == "auto" else settings.pooling
    normalize = "Normalize" in modules if settings.normalize is None else settings.normalize

    found_pad = config.get("pad_token_id")
    pad_id = found_pad if isinstance(found_pad, int) else family.pad_id
    table = _integer(config, "max_position_embeddings", folder)
    first = pad_id + 1 if family.positions_after_pad else 0
    if settings.tile_positions is not None:
        check_tiling(table - first, settings.tile_positions)
    positions = settings.tile_positions or table - first
    hidden = _integer(config, "hidden_size", folder)
    return EncoderSource(
        folder=folder,
        family=name,
        hidden_size=hidden,
        dim=hidden,
        layers=_integer(config, "num_hidden_layers", folder),
        heads=_integer(config, "num_attention_heads", folder),
        positions=positions,
        table_positions=table,
        pad_id=pad_id,
        pooling=pooling,
        normalize=normalize,
        max_tokens=_max_tokens(folder, settings.max_tokens, positions),
        sha256=_hash(folder, modules, {"tile": settings.tile_positions, "pooling": pooling, "normalize": normalize}),
    )


def _resolve(source: str) -> Path:
    """The folder behind `model.source`, absolute."""
    if source.startswith(_PACKAGE):
        return _resolve_package(source)
    if source.startswith(HUB):
        return fetch(source)
    folder = Path(source).expanduser().resolve()
    if not folder.is_dir():
        raise SourceError("model.source is no folder", value=source, limit=_there(folder), remedy="correct the path")
    return folder


def _resolve_package(source: str) -> Path:
    name, _, inner = source.removeprefix(_PACKAGE).partition("/")
    if not name.isidentifier():
        raise SourceError(
            "model.source names no package", value=source, limit="package:NAME/PATH", remedy="write the import name"
        )
    # find_spec of a top-level name only locates it: the package's own code does not run.
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    if spec is None:
        raise SourceError(
            "the package of model.source is not installed", value=name, remedy=f"pip install {name.replace('_', '-')}"
        )
    roots = [Path(root).resolve() for root in spec.submodule_search_locations or ()]
    if not roots:
        raise SourceError("model.source names a single module", value=name, limit="a package: it holds a folder")
    folders = [(root / inner).resolve() for root in roots]
    for root, folder in zip(roots, folders, strict=True):
        if folder.is_dir() and folder.is_relative_to(root):
            return folder
    raise SourceError(
        "no such folder in the package of model.source",
        value=source,
        limit=_there(folders[0]),
        remedy="write one of the folders that are there",
    )


def _there(missing: Path) -> str:
    """The folders at the deepest level of `missing` that exists."""
    parent = next(path for path in missing.parents if path.is_dir())
    found = sorted(path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    more = ", ..." if len(found) > 12 else ""
    return f"folders in {parent}: {', '.join(found[:12]) or 'none'}{more}"


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    document = _parse(path, remedy)
    if not isinstance(document, dict):
        raise SourceError(f"{path.name} is no JSON object", value=str(path), remedy=remedy)
    return document


def _parse(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"the model has no {path.name}", value=str(path), remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path.name} cannot be read ({error})", value=str(path), remedy=remedy) from None


def _integer(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SourceError(
            f"{key} of {folder / 'config.json'} is no positive integer",
            value=value,
            remedy="save the model's config again",
        )
    return value


def _check_config(config: dict[str, Any], folder: Path) -> tuple[str, Family]:
    """The family's name and entry, after everything in config.json that this project does not serve was refused."""
    where = str(folder / "config.json")
    if "auto_map" in config:
        raise SourceError(
            "config.json names custom code (auto_map)",
            value=config["auto_map"],
            limit="trust_remote_code is never on",
            remedy="use a model whose architecture is part of transformers",
        )
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise SourceError(
            f"model_type of {where} is not served",
            value=name,
            limit=f"supported: {', '.join(sorted(FAMILIES))}",
            remedy="use a model of a supported family",
        )
    odd = {
        "is_decoder": config.get("is_decoder", False) is not False,
        "add_cross_attention": config.get("add_cross_attention", False) is not False,
        "quantization_config": config.get("quantization_config") is not None,
        "position_embedding_type": config.get("position_embedding_type", "absolute") != "absolute",
    }
    for key in (key for key, refused in odd.items() if refused):
        raise SourceError(
            f"{key} of {where} is not served",
            value=config[key],
            limit="bidirectional encoders with learned absolute positions and plain weights",
            remedy="use another model",
        )
    return name, FAMILIES[name]


def _check_files(folder: Path) -> None:
    weights = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if not weights:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".safetensors", ".h5"})
        raise SourceError(
            f"no safetensors weights in {folder}",
            value=found,
            limit=f"{_WEIGHTS[0]}: pickled weights can run code",
            remedy="convert them: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    if not (folder / "tokenizer.json").is_file():
        raise SourceError(
            f"no tokenizer.json in {folder}",
            limit="a fast tokenizer's file",
            remedy="write it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise SourceError("the weights are a Git LFS pointer", value=str(path), remedy="run `git lfs pull`")


def _read_modules(folder: Path) -> dict[str, str]:
    """sentence-transformers' pipeline as module name -> folder; empty without modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    _check_prompt(folder)
    remedy = "save the model with sentence-transformers again"
    listed = _parse(path, remedy)
    try:
        entries = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (TypeError, KeyError):
        raise SourceError("modules.json is no list of modules", value=str(path), remedy=remedy) from None
    # sentence_transformers.models.Pooling and, since version 5.4, longer module paths: the class name is what stays.
    names = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind, _ in entries]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise SourceError(
            f"the modules of {path} are not served",
            value=[kind for kind, _ in entries],
            limit="Transformer, Pooling and, at most, Normalize",
            remedy="use a model without other modules",
        )
    modules = {name: inner for name, (_, inner) in zip(names, entries, strict=True)}
    if modules["Transformer"] not in ("", "."):
        raise SourceError(
            f"{path} keeps the transformer in a folder of its own",
            value=modules["Transformer"],
            limit="beside modules.json",
            remedy="save the model with a current sentence-transformers",
        )
    return modules


def _check_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    prompt = _read_json(path, "remove or correct the file").get("default_prompt_name") if path.is_file() else None
    if prompt is not None:
        # Served without it, every vector would silently differ from sentence-transformers' own.
        raise SourceError(
            f"{path.name} sets a default prompt",
            value=prompt,
            limit="texts are encoded as they are sent",
            remedy="set default_prompt_name to null there and let the client put the prompt before its texts",
        )


def _pooling(folder: Path, modules: dict[str, str]) -> Pooling:
    if not modules:
        return "mean"
    path = folder / modules["Pooling"] / "config.json"
    config = _read_json(path, "restore it, or set model.pooling")
    found = config.get("pooling_mode")
    if found is None:
        found = [mode for key, mode in _OLD_POOLING_KEYS.items() if config.get(key)] or "mean"
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if found == "mean":
        return "mean"
    if found == "cls":
        return "cls"
    raise SourceError(
        f"the pooling of {path} is not served",
        value=found,
        limit="mean or cls",
        remedy="use another model, or set model.pooling",
    )


def _max_tokens(folder: Path, wanted: int | None, positions: int) -> int:
    """The limit of the settings, else the model's own as sentence-transformers reads it."""
    if wanted is None:
        path = folder / "sentence_bert_config.json"
        config = _read_json(path, "remove or correct the file") if path.is_file() else {}
        _check_lower_case(folder, config)
        wanted = config.get("max_seq_length")
    if wanted is None:
        path = folder / "tokenizer_config.json"
        config = _read_json(path, "remove or correct the file") if path.is_file() else {}
        # "No limit" is written as 1e30 there; sentence-transformers takes the smaller of the two as well.
        return min(int(config.get("model_max_length") or positions), positions)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise SourceError("max_seq_length is no positive integer", value=wanted, remedy="set model.max_tokens")
    if wanted > positions:
        raise SourceError(
            "model.max_tokens is above the model's positions",
            value=wanted,
            limit=f"{positions} positions",
            remedy=f"lower model.max_tokens to {positions}, or raise model.tile_positions",
        )
    return wanted


def _check_lower_case(folder: Path, config: dict[str, Any]) -> None:
    if not config.get("do_lower_case"):
        return
    normalizer = _read_json(folder / "tokenizer.json", "save the tokenizer again").get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if not any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps):
        raise SourceError(
            "do_lower_case is set but tokenizer.json does not lower-case",
            value=str(folder),
            remedy='put {"type": "Lowercase"} first among the normalizers of tokenizer.json',
        )


def _hash(folder: Path, modules: dict[str, str], graph: dict[str, object]) -> str:
    total = hashlib.sha256(json.dumps(graph, sort_keys=True).encode())
    for name, path in _hashed_files(folder, modules):
        with path.open("rb") as file:
            total.update(f"\n{name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return total.hexdigest()


def _hashed_files(folder: Path, modules: dict[str, str]) -> Iterator[tuple[str, Path]]:
    names = ["config.json", "tokenizer.json", "modules.json", _WEIGHTS[1]]
    if "Pooling" in modules:
        names.append(f"{modules['Pooling']}/config.json")
    names += sorted(path.name for path in folder.glob("*.safetensors"))
    for name in names:
        if (folder / name).is_file():
            yield name, folder / name
