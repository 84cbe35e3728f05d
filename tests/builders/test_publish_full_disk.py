"""A disk that is full from some moment on: at each call of a publication that may need space, once."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders.errors import PublishError
from builders.manifest import published_versions
from builders.publish import publish_version
from tests.builders.test_publish import LENGTHS, contents, is_complete, parts, plan, staging

#: Calls that a full disk fails: (where it is looked up, its name).
WRITES: tuple[tuple[Any, str], ...] = (
    (os, "mkdir"), (os, "link"), (os, "replace"), (os, "fsync"), (shutil, "copyfile"),
    (Path, "mkdir"), (Path, "write_text"), (Path, "touch"),
)  # fmt: skip


class FullDisk:
    """Fails every call that may need space, from call number `after` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int | None) -> None:
        self.calls, self.after = 0, after
        for place, name in WRITES:
            # Waiting for the real disk at each of some thousand calls proves nothing more.
            real = getattr(place, name) if name != "fsync" else (lambda file: None)
            monkeypatch.setattr(place, name, self._failing(real))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.after is not None and self.calls >= self.after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return call


def test_repository_as_before_and_said_so_when_the_disk_is_full_from_any_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, new = tmp_path / "r", parts(tmp_path / "new", "new")
    publish_version(repository, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    before = contents(repository)
    with monkeypatch.context() as patch:
        whole = FullDisk(patch, None)
        assert publish_version(repository, plan(*LENGTHS), new) == 2
    assert whole.calls > 60
    for model in ("encode", *(f"encoder_{length}" for length in LENGTHS)):
        shutil.rmtree(repository / model / "2")
    committed = 0
    # Every fifth call, each time others, and all of the moves at the end.
    steps = sorted({*range(random.randint(1, 5), whole.calls, 5), *range(whole.calls - 12, whole.calls + 1)})
    for after in steps:
        with monkeypatch.context() as patch:
            FullDisk(patch, after)
            with pytest.raises(PublishError, match=r"No space left on device.*free some space"):
                publish_version(repository, plan(*LENGTHS), new)
        assert not staging(repository), after
        if published_versions(repository) == (1, 2):
            # The one call behind the commit, which brings its name to the disk.
            committed += 1
            assert is_complete(repository, 2, "new")
            break
        assert contents(repository) == before, after
    assert after >= whole.calls - 1
    # With space again the next build publishes as if nothing had been.
    assert publish_version(repository, plan(*LENGTHS), new) == 2 + committed


LIMITED = """
import resource, signal, sys
from pathlib import Path
from builders.errors import PublishError
from builders.publish import publish_version
from tests.builders.test_publish import LENGTHS, parts, plan

repository, made = Path(sys.argv[1]), parts(Path(sys.argv[2]), "new")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    publish_version(repository, plan(*LENGTHS), made)
except PublishError as error:
    print(error)
    sys.exit(7)
"""


def test_repository_as_before_when_the_kernel_refuses_to_write_more(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    publish_version(repository, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    before = contents(repository)
    # The journal fits into 300 bytes, the entry's code does not.
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(repository), str(tmp_path / "new"), "300"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert "it is as it was" in done.stdout
    assert contents(repository) == before
    assert not staging(repository)
