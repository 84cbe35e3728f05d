"""What the model's own files say of it, with the settings on top; nothing is downloaded, imported or executed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.documents import read_object, read_object_if_there
from builders.errors import SourceError
from builders.families import Architecture, read_architecture
from builders.place import find_model
from builders.sentence_folder import Limits, SentenceFolder, read_limits, read_sentence_folder
from builders.tasks import TaskFacts, read_task
from builders.tiling import check_tiling

if TYPE_CHECKING:
    from builders.settings import ModelSettings

_LFS_POINTER = b"version https://git-lfs"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Files that transformers makes a tokenizer.json of, and what it needs for that besides itself.
_SLOW_TOKENIZERS = {
    ("vocab.txt",): "",
    ("vocab.json", "merges.txt"): "",
    ("sentencepiece.bpe.model",): "sentencepiece protobuf",
    ("spiece.model",): "sentencepiece protobuf",
    ("spm.model",): "sentencepiece protobuf",
    ("tokenizer.model",): "sentencepiece protobuf",
}


@dataclass(frozen=True)
class EncoderSource:
    """An encoder on disk: what the graph, the tokeniser and the rendered configuration need to know of it."""

    folder: Path
    """The model's folder."""
    inner: str
    """Folder of config.json, tokenizer.json and the safetensors weights, relative to it; mostly empty."""
    architecture: Architecture
    """What config.json says."""
    task: TaskFacts
    """What it answers."""
    positions: int
    """Longest text the graph takes, tokens, after tiling."""
    max_tokens: int
    """Longest text that is not cut, tokens, special tokens included; at most `positions`."""
    lower_case: bool
    """Texts are lower-cased before the tokeniser's own steps."""
    sha256: str
    """Hash of every file and setting that decides the result: equal hashes give equal answers."""

    @property
    def transformer(self) -> Path:
        """Folder with config.json, tokenizer.json and the safetensors weights."""
        return self.folder / self.inner

    @property
    def family(self) -> str:
        """`model_type` of config.json."""
        return self.architecture.family

    @property
    def size(self) -> int:
        """Last axis of the output."""
        return self.task.size

    @property
    def layers(self) -> int:
        """Transformer blocks."""
        return self.architecture.layers

    @property
    def heads(self) -> int:
        """Attention heads of a block."""
        return self.architecture.heads

    @property
    def pad_id(self) -> int:
        """Padding token."""
        return self.architecture.pad_id

    @property
    def tiled(self) -> bool:
        """The position table is longer than the stored one."""
        return self.positions > self.architecture.positions


def open_source(settings: ModelSettings) -> EncoderSource:
    """Find the model of the settings and read what its files say; weights are hashed, not loaded.

    A folder with modules.json is read as sentence-transformers reads it; one without answers what its architecture is
    for, or, of a plain encoder, is pooled by the mean and not normalised. The settings override both.

    Args:
        settings: the `model` section of deploy.yaml.

    Raises:
        SourceError: the folder or a file of it is missing or unreadable, or the model is of a kind that is not served.
    """
    folder = find_model(settings.source)
    sentence = read_sentence_folder(folder)
    inner = sentence.transformer if sentence else ""
    place = folder / inner
    config = read_object(place / "config.json", "point model.source at the folder that holds config.json")
    architecture = read_architecture(config, place)
    _check_files(place)
    task = read_task(settings, config, architecture, sentence)
    positions = architecture.positions
    if settings.tile_positions is not None:
        _check_table(architecture, settings.tile_positions)
        positions = settings.tile_positions
    limits = read_limits(place)
    graph = {"tile": settings.tile_positions, "task": task.decisive(), "lower_case": limits.lower_case}
    return EncoderSource(
        folder=folder,
        inner=inner,
        architecture=architecture,
        task=task,
        positions=positions,
        max_tokens=_max_tokens(place, settings.max_tokens, limits, positions),
        lower_case=limits.lower_case,
        sha256=_hash(folder, inner, sentence, graph),
    )


def _check_table(architecture: Architecture, positions: int) -> None:
    if not architecture.learned_positions:
        raise SourceError(
            "the model has no learned position table to tile", value=positions, limit=f"{architecture.family}: none",
            remedy="leave model.tile_positions out",
        )  # fmt: skip
    check_tiling(architecture.positions, positions)


def _check_files(place: Path) -> None:
    weights = [place / name for name in _WEIGHTS if (place / name).is_file()]
    if not weights:
        found = sorted(path.name for path in place.iterdir() if path.suffix in {".bin", ".pt", ".safetensors", ".h5"})
        raise SourceError(
            f"no safetensors weights in {place}",
            value=found,
            limit=f"{_WEIGHTS[0]}: pickled weights can run code",
            remedy="convert them: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    if not (place / "tokenizer.json").is_file():
        raise _no_tokenizer(place)
    for path in sorted(place.glob("*.safetensors")):
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise SourceError("the weights are a Git LFS pointer", value=str(path), remedy="run `git lfs pull`")


def _no_tokenizer(place: Path) -> SourceError:
    """The refusal, with the command that makes the file where there is something to make it of."""
    for names, packages in _SLOW_TOKENIZERS.items():
        if all((place / name).is_file() for name in names):
            first = f"pip install {packages}, then " if packages else ""
            code = f"from transformers import AutoTokenizer as T; T.from_pretrained({str(place)!r})"
            return SourceError(
                f"no tokenizer.json in {place}", value=f"only {' and '.join(names)}", limit="a fast tokenizer's file",
                remedy=f'{first}python -c "{code}.save_pretrained({str(place)!r})" writes it',
            )  # fmt: skip
    known = sorted(" + ".join(names) for names in _SLOW_TOKENIZERS)
    return SourceError(
        f"no tokenizer.json in {place}, nor files to make one of",
        value=sorted(path.name for path in place.iterdir() if path.is_file())[:20],
        limit=f"tokenizer.json, or one of {', '.join(known)}",
        remedy="put the model's tokenizer files there; a model without a fast tokenizer is not served",
    )


def _max_tokens(place: Path, wanted: int | None, limits: Limits, positions: int) -> int:
    """The limit of the settings, else the model's own as sentence-transformers reads it."""
    if wanted is None:
        config = read_object_if_there(place / "tokenizer_config.json") if limits.max_tokens is None else {}
        # "No limit" is written as 1e30 there, and a limit of RoBERTa's is often two above what the positions hold.
        return min(limits.max_tokens or int(config.get("model_max_length") or positions), positions)
    if wanted > positions:
        raise SourceError(
            "model.max_tokens is above the model's positions",
            value=wanted,
            limit=f"{positions} positions",
            remedy=f"lower model.max_tokens to {positions}, or raise model.tile_positions",
        )
    return wanted


def _hash(folder: Path, inner: str, sentence: SentenceFolder | None, graph: dict[str, Any]) -> str:
    total = hashlib.sha256(json.dumps(graph, sort_keys=True).encode())
    for name, path in _hashed_files(folder, inner, sentence):
        with path.open("rb") as file:
            total.update(f"\n{name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return total.hexdigest()


def _hashed_files(folder: Path, inner: str, sentence: SentenceFolder | None) -> Iterator[tuple[str, Path]]:
    place = folder / inner
    names = ["config.json", "tokenizer.json", _WEIGHTS[1], *sorted(path.name for path in place.glob("*.safetensors"))]
    for name in names:
        if (place / name).is_file():
            yield name, place / name
    for name in sentence.files if sentence else ():
        yield name, folder / name
