"""gRPC servers that give every request the same answer, unread: what is measured on them is the load generator."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import grpc
from tritonclient.grpc import service_pb2

from clients.errors import EncoderError
from clients.load.run import deaf_to_interrupts

_DIM = 384
_READY_S = 60.0


@contextmanager
def null_server(threads: int = 4) -> Iterator[str]:
    """A server in this process; yields its host:port."""
    answer = service_pb2.ModelInferResponse(model_name="encode")
    for name, datatype, shape, raw in (
        ("EMBEDDING", "FP32", [1, _DIM], bytes(4 * _DIM)),
        ("TOKENS", "INT32", [1, 1], (1).to_bytes(4, "little")),
        ("CUT", "INT32", [1, 1], bytes(4)),
    ):
        answer.outputs.add(name=name, datatype=datatype, shape=shape)
        answer.raw_output_contents.append(raw)
    ready = answer.SerializeToString()
    # No serialisers: the request stays bytes, the answer is bytes already.
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: ready)
    handlers = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method})
    server = grpc.server(ThreadPoolExecutor(threads))
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def null_servers(count: int) -> Iterator[list[str]]:
    """As many servers, each in a process of its own; yields their host:port.

    Raises:
        EncoderError: one did not start.
    """
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as started:
        pipes = []
        with deaf_to_interrupts():
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                process: BaseProcess = spawn.Process(target=_serve, args=(theirs,), daemon=True, name="null server")
                process.start()
                started.callback(_end, process, ours)
                theirs.close()
                pipes.append(ours)
        urls = []
        for pipe in pipes:
            try:
                if not pipe.poll(_READY_S):
                    raise EncoderError("a server of the self-test did not start", limit=f"{_READY_S:g} s")
                urls.append(str(pipe.recv()))
            except EOFError:
                raise EncoderError("a server of the self-test ended by itself", remedy="see above why") from None
        running = started.pop_all()
    with running:
        yield urls


def _serve(pipe: Connection) -> None:
    """A process: tells where it serves, and serves until the other end of the pipe is closed."""
    with null_server() as url:
        pipe.send(url)
        with suppress(EOFError, OSError):
            pipe.recv()


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
