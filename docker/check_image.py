"""Checks at the build of an image that it is what this project may run on; standard library alone.

    check_image.py server                 the base image's Triton is new enough
    check_image.py tensorrt /server/lib   the builder's TensorRT is the one that the server loads plans with

Why 2.72.0 (container 26.08) is the oldest: it is the first release whose notes name the fix of the dynamic batcher's
starvation (server issue 8870, core pull request 509): throughput decays for exactly the entry's shape. The newest of
NVIDIA's Triton bulletins known when this was written (5875, August 2026, revised 2026-09-08) asks for 26.07, the others
of 2025 and 2026 for less. A newer bulletin raises the line here, and nowhere else.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

OLDEST = (2, 72, 0)
OLDEST_CONTAINER = "26.08"
_VERSION_FILE = Path("/opt/tritonserver/TRITON_VERSION")


class ImageError(Exception):
    """What is wrong with the image and what to do."""


def server_version(version_file: Path, variable: str | None) -> tuple[int, ...]:
    """Triton's version, from the file of its installation and the image's variable TRITON_SERVER_VERSION.

    Raises:
        ImageError: neither is there, one cannot be read, or they differ.
    """
    texts = [version_file.read_text(encoding="utf-8").strip()] if version_file.exists() else []
    texts += [variable.strip()] if variable else []
    if not texts:
        raise ImageError(f"this is no Triton image: no {version_file} and no TRITON_SERVER_VERSION")
    versions = set()
    for text in texts:
        if not (found := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.\d+)?", text)):
            raise ImageError(f"Triton's version cannot be read: {text!r}; a released container says like 2.75.0")
        versions.add(tuple(int(part) for part in found.groups()))
    if len(versions) > 1:
        raise ImageError(f"the image names two versions of Triton: {' and '.join(sorted(set(texts)))}")
    return versions.pop()


def check_server(version: tuple[int, ...]) -> None:
    """Refuse a Triton without the fixes.

    Raises:
        ImageError: it is older than `OLDEST`.
    """
    if version < OLDEST:
        raise ImageError(
            f"Triton {_text(version)} is too old: at least {_text(OLDEST)} (container {OLDEST_CONTAINER}) has the fixes"
            " of NVIDIA's bulletins of 2025 and 2026 and of server issue 8870. Set TRITON_TAG to a newer container"
        )


def library_version(folder: Path) -> tuple[int, ...]:
    """TensorRT's version from the name of its library in `folder`.

    Raises:
        ImageError: no such library, or several.
    """
    found = {
        tuple(int(part) for part in match.groups())
        for path in folder.rglob("libnvinfer.so.*")
        if (match := re.fullmatch(r"libnvinfer\.so\.(\d+)\.(\d+)\.(\d+)", path.name))
    }
    if len(found) != 1:
        raise ImageError(f"one libnvinfer.so.X.Y.Z is needed below {folder}; there are {len(found)}")
    return found.pop()


def check_tensorrt(builder: str, server: tuple[int, ...]) -> None:
    """Refuse a builder whose plans the server would not load.

    Args:
        builder: `tensorrt.__version__` of the builder, like 11.1.0.5.
        server: major, minor and patch of the server's library.

    Raises:
        ImageError: they differ.
    """
    own = tuple(int(part) for part in re.findall(r"\d+", builder)[:3])
    if own != server:
        raise ImageError(
            f"the builder has TensorRT {builder}, the server {_text(server)}: a plan only loads in the version that"
            " built it. Build both images from one TRITON_TAG"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main(arguments: list[str]) -> int:
    """Check, and say what was found; exit code 1 stops the image's build."""
    try:
        match arguments:
            case ["server"]:
                version = server_version(_VERSION_FILE, os.environ.get("TRITON_SERVER_VERSION"))
                check_server(version)
                print(f"Triton {_text(version)}")
            case ["tensorrt", folder]:
                tensorrt = importlib.import_module("tensorrt")
                check_tensorrt(str(tensorrt.__version__), library_version(Path(folder)))
                print(f"TensorRT {tensorrt.__version__} in both images")
            case _:
                raise ImageError("give server, or tensorrt and the folder of the server's libraries")
    except (ImageError, ImportError, OSError) as error:
        print(f"this image cannot be used: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
