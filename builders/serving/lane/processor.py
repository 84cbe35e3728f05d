"""What the processor can do that decides how int8 is computed."""

from __future__ import annotations

import platform
from pathlib import Path

#: Dot products of 8-bit numbers that add up in 32 bits, as /proc/cpuinfo names them.
_EXACT = frozenset({"avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8"})
_X86 = ("x86_64", "AMD64")


def int8_saturates(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> bool:
    """Whether ONNX Runtime's fast int8 product may cut sums off at 16 bits here, which gives wrong answers.

    Its kernel for unsigned times signed numbers adds pairs up in 16 bits on x86 without VNNI. There the session
    option `session.x64quantprecision` takes another one, exact and slower; with VNNI the option costs a third of the
    speed and changes nothing.

    Args:
        cpuinfo: the kernel's list of processors; where it cannot be read, the answer is the careful one.
        machine: the architecture; this machine's by default.
    """
    if (machine or platform.machine()) not in _X86:
        return False
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not _EXACT & set(flags)
