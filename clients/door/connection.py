"""A connection of the door: uvicorn's, with bounds on what a client may hold open before and after its request.

uvicorn bounds neither the time nor the size of a request's head with its fast parser, nor how long an answer may wait
for a client that does not read it: https://github.com/Kludex/uvicorn/issues/157. Bodies are `bodies`' matter.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from clients.door.settings import DoorSettings

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """One client's connection, closed when it holds the door up.

    * A head that is not whole `head_s` after the connection opened, or after its own first byte: closed. So is a
      connection that goes on with anything else after its answer, the rest of a body that was refused above all.
    * A head beyond `head_bytes`: 431. What comes in one piece with its end is not counted; a piece has 256 KiB at most.
    * An answer that the client reads more slowly than `read_bytes_s`, over `read_s`: the connection is cut.
    """

    head_s: ClassVar[float] = 10.0
    head_bytes: ClassVar[int] = 65_536
    read_s: ClassVar[float] = 30.0
    read_bytes_s: ClassVar[float] = 4096.0

    _next_head: asyncio.TimerHandle | None = None
    """Runs while a head is awaited or under way."""
    _in_head: bool = True
    _head_size: int = 0
    _reader: asyncio.TimerHandle | None = None
    """Runs while the client has more to read than the sockets hold."""
    _unread: int = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the waits."""
        self._stop_head()
        self._stop_reader()
        super().connection_lost(error)

    # The head

    def data_received(self, data: bytes) -> None:
        """Looks, when the data is read, whether a head goes on, and whether anything is being done for the client."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > self.head_bytes:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        elif self._next_head is None and not self._answering:
            self._await_head()  # by data of any kind uvicorn's own wait for the next request has ended

    def on_message_begin(self) -> None:
        """The first byte of a head has come."""
        self._in_head, self._head_size = True, 0
        if self._next_head is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._stop_head()
        super().on_headers_complete()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._next_head = self.loop.call_later(self.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._answering:
            self._await_head()  # the request before it
        else:
            self.transport.close()

    def _stop_head(self) -> None:
        if self._next_head is not None:
            self._next_head.cancel()
            self._next_head = None

    # The answer

    def pause_writing(self) -> None:
        """More is to be read than the sockets hold."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The client has read nearly all."""
        self._stop_reader()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(self.read_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() < self.read_bytes_s * self.read_s:
            self.transport.abort()  # close() would wait for the reader
        else:
            self._await_reader()

    def _stop_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None


def connection_class(settings: DoorSettings) -> type[Connection]:
    """The class of a door's connections, for uvicorn's `http`."""

    class DoorConnection(Connection):
        """With the settings' time."""

        head_s = settings.head_timeout_s

    return DoorConnection
