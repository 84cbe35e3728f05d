"""Names in a model repository: one model's entry, lanes and files, so that several models share nothing.

A model without a name is `encode` with `encoder_<length>`, a named one `encode_<name>` with `encoder_<name>_<length>`.
A name begins with a letter and a length is digits alone, so that no folder can belong to two models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

ENTRY = "encode"
#: What a model may be called.
NAME = r"[a-z][a-z0-9_]{0,63}"


def entry_model(name: str) -> str:
    """The Triton model that clients call."""
    return f"{ENTRY}_{name}" if name else ENTRY


def model_name(entry: str) -> str:
    """The name of the model of an entry; empty where it is the only one."""
    return entry.removeprefix(ENTRY).removeprefix("_")


def lane_model(name: str, length: int) -> str:
    """The Triton model of a bucket of `length` tokens."""
    return f"{_lanes(name)}{length}"


def is_entry(model: str) -> bool:
    """Whether a Triton model is the entry of some model."""
    return re.fullmatch(f"{ENTRY}(_{NAME})?", model) is not None


def is_lane(model: str, name: str) -> bool:
    """Whether a Triton model is a lane of the model `name`, and of no other."""
    return model.startswith(_lanes(name)) and re.fullmatch("[0-9]+", model.removeprefix(_lanes(name))) is not None


def is_any_lane(model: str) -> bool:
    """Whether a Triton model is a lane of some model."""
    return re.fullmatch(f"encoder_({NAME}_)?[0-9]+", model) is not None


def ensemble_model(name: str, length: int) -> str:
    """The ensemble of a bucket, which clients that know their lengths call: `ensemble_<length>`."""
    return f"ensemble_{name}_{length}" if name else f"ensemble_{length}"


def tokenize_model(name: str, length: int) -> str:
    """The first step of an ensemble: `tokenize_<length>`."""
    return f"tokenize_{name}_{length}" if name else f"tokenize_{length}"


def queued_model(name: str, length: int) -> str:
    """The second step of an ensemble, a lane with a queue of its own: `encoder_<length>_queued`."""
    return f"{lane_model(name, length)}_queued"


def is_ensemble(model: str) -> bool:
    """Whether a Triton model is the ensemble of some model."""
    return re.fullmatch(f"ensemble_({NAME}_)?[0-9]+", model) is not None


def is_of_ensemble(model: str, name: str) -> bool:
    """Whether a Triton model is an ensemble of the model `name`, or a step of one, and of no other model."""
    own = f"{name}_" if name else ""
    return re.fullmatch(f"(ensemble|tokenize)_{own}[0-9]+|encoder_{own}[0-9]+_queued", model) is not None


def is_of_any_ensemble(model: str) -> bool:
    """Whether a Triton model is an ensemble, or a step of one, of some model."""
    return re.fullmatch(f"(ensemble|tokenize)_({NAME}_)?[0-9]+|encoder_({NAME}_)?[0-9]+_queued", model) is not None


def ensembles_beside(repository: Path, entry: str) -> Iterator[str]:
    """The ensembles and their steps that have a configuration beside an entry of the same model."""
    name = model_name(entry)
    for path in sorted(repository.glob("*/config.pbtxt")):
        if is_of_ensemble(path.parent.name, name):
            yield path.parent.name


def own_file(name: str, what: str, suffix: str) -> str:
    """A hidden file of one model in the repository: `.served.json`, `.served.minilm.json`."""
    return f".{what}.{name}{suffix}" if name else f".{what}{suffix}"


def make_command(target: str, name: str) -> str:
    """What people type: `make promote VERSION=2 MODEL=minilm`."""
    return f"make {target} MODEL={name}" if name else f"make {target}"


def of_model(name: str) -> str:
    """Words for a message that must say which model it means: ` of model minilm`, or nothing."""
    return f" of model {name}" if name else ""


def other_models(repository: Path, names: Collection[str]) -> Iterator[str]:
    """Entries of the repository with a configuration that belong to none of `names`, by their Triton name."""
    mine = {entry_model(name) for name in names}
    for path in sorted(repository.glob(f"{ENTRY}*/config.pbtxt")):
        model = path.parent.name
        if model not in mine and is_entry(model):
            yield model


def _lanes(name: str) -> str:
    return f"encoder_{name}_" if name else "encoder_"
