"""What a group of processes holds, against one that holds known things."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from builders.server_checks import SHARED_MEMORY
from tests.tools.footprint import footprint

# A process that leads a group and has a child; each takes what it is told when it reads a line.
_HOLDER = """
import os, subprocess, sys, threading
child = len(sys.argv) == 1 and subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE)
print("ready", flush=True)
for line in sys.stdin:
    what = line.strip()
    if child and what.startswith("child "):
        child.stdin.write((what.removeprefix("child ") + "\\n").encode()); child.stdin.flush()
        continue
    if what == "files": kept = [open(os.devnull) for _ in range(20)]
    if what == "memory": held = bytearray(os.urandom(30 << 20))
    if what == "threads": [threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(5)]
    print("done", flush=True)
if child: child.stdin.close(); child.wait()
"""


def test_memory_files_threads_and_shared_memory_are_seen_where_they_are_held(tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(_HOLDER, encoding="utf-8")
    prefix = f"footprint_test_{uuid.uuid4().hex}_"
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin
    assert process.stdout

    def hold(what: str) -> None:
        process.stdin.write(what + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    region = SHARED_MEMORY / f"{prefix}1"
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2  # the child's and its own
        before = footprint(process.pid, prefix)
        assert len(before.pids) == 2
        assert process.pid in before.pids
        assert 0 < before.server.own < before.server.pss <= before.server.rss
        assert (before.regions, before.shared) == (0, 0)
        for what in ("files", "child memory", "child threads"):
            hold(what)
        region.write_bytes(bytes(1 << 20))
        after = footprint(process.pid, prefix)
        assert after.server.descriptors - before.server.descriptors == 20
        assert after.models.descriptors == before.models.descriptors
        assert 29 < after.models.own - before.models.own < 35
        assert 29 < after.models.pss - before.models.pss < 40
        assert abs(after.server.own - before.server.own) < 2
        assert list(after.instances.values()) == [after.models.own]
        assert after.models.threads - before.models.threads == 5
        assert after.server.threads == before.server.threads
        assert (after.regions, after.shared) == (1, 1.0)
        assert after.models.cpu_s > 0
    finally:
        region.unlink(missing_ok=True)
        process.stdin.close()
        process.wait(10)
    assert footprint(process.pid, prefix).pids == ()
    assert os.getpid() not in after.pids
