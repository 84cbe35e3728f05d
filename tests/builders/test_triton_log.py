"""What is read from the lines of tritonserver's log, and the reason they give for a server's end."""

from __future__ import annotations

import pytest

from builders.triton_log import ServerEvent, explain, parse_log_line

E = "E1129 14:09:11.660131 5414 "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            'I1129 14:06:37.612440 4018 model_lifecycle.cc:472] "loading: a:b:12"',
            ServerEvent("loading", "loading: a:b:12", model="a:b", version=12),
        ),
        (
            E + r"""model_lifecycle.cc:642] "failed to load 'p' version 1: Internal: ValueError: ä\n\nAt:\n  x" """,
            ServerEvent("failed", "Internal: ValueError: ä\n\nAt:\n  x", model="p", version=1),
        ),
        (
            E + "model_repository_manager.cc:1415] \"failed to poll model 'p': model not found.\"",
            ServerEvent("failed", "model not found.", model="p"),
        ),
        (
            'I1129 14:06:37.780149 4018 grpc_server.cc:2558] "Started GRPCInferenceService at 127.0.0.1:18101"',
            ServerEvent("endpoint", "Started GRPCInferenceService at 127.0.0.1:18101"),
        ),
        (
            "E1129 14:09:24.904139490    6226 chttp2_server.cc:1060]                UNKNOWN:No address",
            ServerEvent("error", "UNKNOWN:No address"),
        ),
        ('W1129 14:06:37.773056 4018 model.py:8] "of a model"', ServerEvent("warning", "of a model")),
        (E + 'x.cc:1] "not \\escaped well"', ServerEvent("error", "not \\escaped well")),
        (E + 'server.cc:241] "CudaDriverHelper has not been initialized."', None),
        ("Signal (15) received.", ServerEvent("stopping", "Signal (15) received.")),
        ("[libprotobuf ERROR /a.cc:337] Error: 4:39: x", ServerEvent("error", "Error: 4:39: x")),
        ('I1129 14:06:37.777541 4018 metrics.cc:770] "Collecting CPU metrics"', None),
        ("| probe | 1       | READY  |", None),
        ("print of a model", None),
        ("", None),
    ],
)
def test_reads_each_kind_of_line_when_triton_logs_it(line: str, expected: ServerEvent | None) -> None:
    assert parse_log_line(line, gpu=False) == expected


def test_takes_the_last_words_of_the_log_when_no_event_explains_the_end() -> None:
    assert explain([], "I1\nerror: creating server: Internal - failed\n\nAt:\n  <frozen x>\n;\n") == (
        "creating server: Internal - failed at"
    )
    assert explain([], "a\nb\nc\nd\ne\nf") == "b c d e f"
    assert explain([], "") == "it wrote no log"


def test_tells_each_reason_once_when_triton_repeats_it() -> None:
    failed = ServerEvent("failed", "Internal: Boom\n\nAt:\n  /m.py(3): go\n  <frozen y>", model="p", version=1)
    repeated = ServerEvent("error", "ERROR: Failed to create instance: Boom")
    assert explain([repeated, failed, failed], "") == "model 'p' version 1: Boom at /m.py(3): go"
