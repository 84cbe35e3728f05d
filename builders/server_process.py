"""What stands around tritonserver: the command before it, when its entries are warm, and how it ended."""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys

# The child asks the kernel for SIGTERM on its parent's death, then becomes tritonserver. A preexec_fn would do the
# same inside a fork of this process, which may deadlock when other threads (torch, gRPC) hold a lock.
# The stack: Triton 2.51 reads JSON recursively, so that 100 kB of brackets end it with the usual 8 MB
# (docs/reliability.md, "Bad input"). What is not used of it takes no memory. Without a limit glibc gives a thread 2 MB.
_LAUNCHER = (
    "import ctypes, os, resource as r, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    " soft, hard = r.getrlimit(r.RLIMIT_STACK); most = hard if hard >= 0 else 1 << 62;"
    " (0 <= soft >= min(most, 512 << 20)) or r.setrlimit(r.RLIMIT_STACK, (min(most, 512 << 20), hard));"
    " os.getppid() == int(sys.argv[1]) or sys.exit('parent is gone'); os.execv(sys.argv[2], sys.argv[2:])"
)
#: A sample of how many processes of an entry are warm, and of how many.
_WARM = re.compile(r'^encoder_lanes_warm_processes_total\{.*\bof="(\d+)".*\} (\S+)$', re.M)


def launcher() -> list[str]:
    """The words before a command that is to end with this process and to have stack enough for Triton."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]


def read_metrics(host: str, port: int) -> str | None:
    """The page of metrics of a server on this machine; None while there is none.

    Args:
        host: without the brackets of IPv6.
        port: of the metrics.
    """
    # http.client reads no proxy settings: this is always the machine itself.
    connection = http.client.HTTPConnection(host, port, timeout=2.0)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def is_warm(metrics: str) -> bool:
    """Whether every process of every entry in a page of metrics has made its own first calls."""
    return all(float(warm) >= int(of) for of, warm in _WARM.findall(metrics))


def ended_how(code: int | None) -> str:
    """Words for an exit status; negative is a signal."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
