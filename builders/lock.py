"""One build, promote or rollback at a time on a model; the kernel lets go of the lock when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders.errors import PublishError
from builders.names import of_model, own_file

_POLL_S = 0.1


@contextmanager
def repository_lock(repository: Path, wait_s: float = 30.0, *, name: str = "") -> Iterator[None]:
    """Hold one model of the repository, whose folder is made if it is missing; the other models are free.

    Args:
        repository: the model repository.
        wait_s: how long another holder is waited for, seconds. Publishing takes seconds, promoting the time of a load.
        name: the model, where there are several.

    Raises:
        PublishError: somebody else holds it for longer, or the folder cannot be written.
    """
    path = repository / lock_file(name)
    try:
        repository.mkdir(parents=True, exist_ok=True)
        # The file stays: removing it would let two hold a lock each, one on the removed file.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise PublishError(f"{path} cannot be made: {error}", remedy="correct the permissions") from error
    try:
        _acquire(file, path, wait_s, name)
        os.truncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)


def lock_file(name: str = "") -> str:
    """The file whose lock is the model's: `.builders.lock`, `.builders.minilm.lock`."""
    return own_file(name, "builders", ".lock")


def _acquire(file: int, path: Path, wait_s: float, name: str) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise PublishError(
                    f"another build, promote or rollback{of_model(name)} works on {path.parent}",
                    value=f"process {os.pread(file, 32, 0).decode(errors='replace').strip()}",
                    limit=f"waited {wait_s:g} s", remedy="wait for it, then try again",
                ) from None  # fmt: skip
            time.sleep(_POLL_S)
        else:
            return
