"""API keys: a file of them, read again when it changes; compared in constant time."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

from clients.errors import InvalidInput

_LEAST = 16
_LOOK_S = 2.0
_RATES = ("requests_per_s", "texts_per_s", "tokens_per_s")
_FORM = "NAME KEY [requests_per_s=N] [texts_per_s=N] [tokens_per_s=N], KEY of 16 characters or more, or sha256:HEX"


@dataclass(frozen=True, slots=True)
class Key:
    """A key: its name for the log, its SHA-256, and rates of its own."""

    name: str
    digest: bytes = field(repr=False)
    rates: dict[str, float] = field(default_factory=dict)


ANYBODY = Key("anybody", b"")


class KeyRing:
    """The keys of a file.

    Args:
        path: the file; see DoorSettings.keys.
        clock: time.monotonic, for tests.

    Raises:
        InvalidInput: the file cannot be read, or a line is wrong; its key is not shown.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file."""
        self._path, self._clock = path, clock
        self._stamp = self._stat()
        self._keys = read_keys(path)
        self._next = clock() + _LOOK_S

    def find(self, presented: str) -> Key | None:
        """The key that was presented; None when there is no such key.

        Every key is compared, whichever fits, so that the time says nothing of them.
        """
        self._look()
        digest, found = hashlib.sha256(presented.encode()).digest(), None
        for key in self._keys:
            if compare_digest(digest, key.digest):
                found = key
        return found

    def _look(self) -> None:
        """Reads a changed file; one that is wrong is logged, and the keys stay as they were."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + _LOOK_S
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._keys, self._stamp = read_keys(self._path), stamp
                logging.getLogger("clients.door").info("keys read again", extra={"door": {"keys": len(self._keys)}})
        except InvalidInput as error:
            logging.getLogger("clients.door").error("keys not read again", extra={"door": {"error": str(error)}})

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise _unreadable(self._path, error) from None
        return found.st_mtime_ns, found.st_ino, found.st_size


def read_keys(path: Path) -> tuple[Key, ...]:
    """Reads a file of keys; empty lines and those that begin with # are passed over.

    Raises:
        InvalidInput: as KeyRing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    keys = [
        _read(line.split(), number) for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"
    ]
    names = [key.name for key in keys]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInput("names of keys stand twice in the file", value=twice, limit="one key a name")
    if not keys:
        raise InvalidInput(
            "the file of keys is empty", value=str(path), remedy="write keys into it, or leave --keys out"
        )
    return tuple(keys)


def _read(words: list[str], number: int) -> Key:
    if len(words) < 2:
        raise InvalidInput(f"line {number} of the keys is wrong", limit=_FORM)
    name, secret, *given = words
    if secret.startswith("sha256:"):
        try:
            digest = bytes.fromhex(secret.removeprefix("sha256:"))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise InvalidInput(f"line {number} of the keys is wrong", limit="sha256: and 64 hexadecimal digits")
    elif len(secret) < _LEAST:
        raise InvalidInput(f"the key in line {number} is too short", limit=f"{_LEAST} characters or more")
    elif not secret.isascii():  # headers carry nothing else unharmed: it would never be found
        raise InvalidInput(f"the key in line {number} is not ASCII", limit="letters, digits and signs of ASCII")
    else:
        digest = hashlib.sha256(secret.encode()).digest()
    return Key(name, digest, dict(_rate(word, number) for word in given))


def _rate(word: str, number: int) -> tuple[str, float]:
    name, _, value = word.partition("=")
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if name not in _RATES or not 0 < rate <= 1e9:
        raise InvalidInput(f"line {number} of the keys is wrong", limit=_FORM)
    return name, rate


def _unreadable(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput("the file of keys cannot be read", value=str(path), limit=str(error))
