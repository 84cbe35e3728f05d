"""`python -m clients` as a user runs it, and its parts through typer's runner."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from clients.cli import app
from tests.clients.fake_triton import DIM, FakeTriton, serve, vector


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve() as fake:
        yield fake


def run(server: FakeTriton, *arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["encode", "--url", server.url, *arguments], input=stdin)


def rows(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout_bytes.decode().splitlines()]


def command(server: FakeTriton, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "clients", "encode", "--url", server.url, *arguments]


def test_texts_come_out_as_json_lines_that_give_back_every_float32(server: FakeTriton) -> None:
    first, second = rows(run(server, "a text", "漢字 of length"))
    assert list(first) == ["text", "tokens", "cut", "embedding"]
    assert (first["text"], first["tokens"], first["cut"]) == ("a text", 6, 0)
    assert (second["text"], second["cut"]) == ("漢字 of length", 1)
    np.testing.assert_array_equal(np.array(second["embedding"], np.float32), vector("漢字 of length".encode()))


def test_options_reach_the_wire(server: FakeTriton) -> None:
    result = run(
        server, "a", "b", "c", "--priority", "interactive", "--timeout", "0.5", "--truncate", "error", "--model", "m",
        "--batch", "2", "--deadline", "9",
    )  # fmt: skip
    assert result.exit_code == 0
    assert sorted(len(seen.texts) for seen in server.seen) == [1, 2]
    assert server.seen[0].parameters == {
        "priority": 1, "class": "interactive", "timeout": 500_000, "truncate": "error",
    }  # fmt: skip
    assert server.seen[0].model == "m"
    assert server.seen[0].remaining is not None
    assert server.seen[0].remaining < 9.1  # gRPC rounds it up


def test_file_gives_one_text_a_line_whatever_the_line_ends(server: FakeTriton, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\nthree\x0bstill \xe2\x80\xa8three\nfour")
    given = [row["text"] for row in rows(run(server, "--file", str(file)))]
    assert given == ["one", "", "three\x0bstill \u2028three", "four"]


@pytest.mark.parametrize("source", ["-", "--stdin"])
def test_stdin_gives_one_text_a_line(server: FakeTriton, source: str) -> None:
    assert [row["text"] for row in rows(run(server, source, stdin="ä\nb\n".encode()))] == ["ä", "b"]


def test_empty_input_gives_no_lines_and_an_empty_array(server: FakeTriton, tmp_path: Path) -> None:
    assert rows(run(server, "-", stdin=b"")) == []
    output = tmp_path / "none.npy"
    assert run(server, "-", "--output", str(output), stdin=b"").exit_code == 0
    assert np.load(output).shape == (0, DIM)


def test_empty_input_with_fewer_dimensions_gives_an_array_of_as_many_columns(
    server: FakeTriton, tmp_path: Path
) -> None:
    output = tmp_path / "none.npy"
    assert run(server, "-", "--output", str(output), "--dimensions", "4", stdin=b"").exit_code == 0
    assert np.load(output).shape == (0, 4)


def test_server_that_asks_for_a_certificate_is_called_with_one(certificates: Path) -> None:
    pems = [(certificates / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
    root, own = ["--root-certificate", str(certificates / "ca.pem")], ["--client-key", str(certificates / "client.key")]
    with serve(grpc.ssl_server_credentials([(pems[0], pems[1])], pems[2], True)) as server:
        result = run(server, "a", *root, *own, "--client-certificate", str(certificates / "client.pem"))
        assert (result.exit_code, len(rows(result))) == (0, 1)
        assert run(server, "a", *root, "--retries", "0").exit_code == 5
        refused = run(server, "a", *root, *own)
    assert refused.exit_code == 2
    assert "certificate without its key, or a key without its certificate" in refused.stderr


def test_output_is_a_float32_array_in_order_and_leaves_no_other_file(server: FakeTriton, tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(100)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    output = tmp_path / "out.npy"
    output.write_bytes(b"old")
    result = run(server, "--file", str(tmp_path / "in.txt"), "--output", str(output))
    assert (result.exit_code, result.output) == (0, "")
    array = np.load(output)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, np.stack([vector(text.encode()) for text in texts]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def test_failed_call_leaves_the_old_output_as_it_was(server: FakeTriton, tmp_path: Path) -> None:
    server.fail = lambda _: (grpc.StatusCode.INTERNAL, "boom")
    output = tmp_path / "out.npy"
    output.write_bytes(b"old")
    assert run(server, "a", "--output", str(output)).exit_code == 1
    assert output.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


@pytest.mark.parametrize("name", ["missing/out.npy", "out.txt", "folder.npy"])
def test_output_that_cannot_be_written_is_refused_before_anything_is_computed(
    server: FakeTriton, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.npy").mkdir()
    result = run(server, "a", "--output", str(tmp_path / name))
    assert (result.exit_code, server.seen) == (2, [])
    assert result.stderr.startswith("error: --output ")


@pytest.mark.parametrize(
    ("code", "message", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "too long", 2),
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", 3),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", 3),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", 4),
        (grpc.StatusCode.UNAVAILABLE, "the long lane\nis full", 4),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'encode' is not found", 5),
        (grpc.StatusCode.INTERNAL, "boom", 1),
    ],
)
def test_error_is_one_line_on_stderr_and_an_exit_code(
    server: FakeTriton, code: grpc.StatusCode, message: str, exit_code: int
) -> None:
    server.fail = lambda _: (code, message)
    result = run(server, "a")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("error: text 0: ")
    assert result.stderr.count("\n") == 1


def test_no_server_is_exit_code_5() -> None:
    result = CliRunner().invoke(app, ["encode", "--url", "127.0.0.1:1", "a"])
    assert result.exit_code == 5
    assert "127.0.0.1:1; to do: start the server" in result.stderr


def test_error_of_a_file_names_its_lines(server: FakeTriton, tmp_path: Path) -> None:
    server.fail = lambda texts: (grpc.StatusCode.INVALID_ARGUMENT, "too long") if b"bad" in texts else None
    file = tmp_path / "texts.txt"
    file.write_text("ok\nok\nbad\nok\n")
    result = run(server, "--file", str(file), "--batch", "2")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file}, line 3 to 4: texts 2 to 3: too long")


def test_error_of_one_text_of_a_file_names_its_line(server: FakeTriton, tmp_path: Path) -> None:
    server.fail = lambda texts: (
        (grpc.StatusCode.INVALID_ARGUMENT, f"text {texts.index(b'bad')} is too long") if b"bad" in texts else None
    )
    file = tmp_path / "texts.txt"
    file.write_text("ok\nok\nok\nbad\n")
    result = run(server, "--file", str(file), "--batch", "2")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file}, line 4: text 3 is too long; server: ")


def test_file_that_is_not_utf8_is_refused_with_its_line(server: FakeTriton, tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"fine\nna\xefve\n")
    result = run(server, "--file", str(file))
    assert (result.exit_code, server.seen) == (2, [])
    assert result.stderr.startswith(f"error: {file}, line 2: byte 3 is not UTF-8: b'\\xef'; to do: ")


def test_file_that_is_not_there_is_refused(server: FakeTriton, tmp_path: Path) -> None:
    result = run(server, "--file", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr


@pytest.mark.parametrize("sources", [[], ["a", "--stdin"], ["a", "--file", "x"], ["-", "--file", "x"]])
def test_exactly_one_source_of_texts_is_asked_for(server: FakeTriton, sources: list[str]) -> None:
    result = run(server, *sources)
    assert result.exit_code == 2
    assert "one of TEXT..., --file FILE, --stdin" in result.stderr


def test_help_names_every_exit_code() -> None:
    shown = " ".join(CliRunner().invoke(app, ["encode", "--help"]).stdout.split())
    for part in (
        "0 done",
        "2 invalid input",
        "3 a timeout",
        "4 the server is overloaded",
        "5 the server is unavailable",
    ):
        assert part in shown


# As a process of its own


def test_argument_that_is_not_utf8_is_refused(server: FakeTriton) -> None:
    done = subprocess.run([*command(server), b"na\xefve"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "cannot be UTF-8" in done.stderr


def test_output_is_utf8_in_a_locale_that_is_not(server: FakeTriton) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command(server, "-"), input="漢字\n".encode(), capture_output=True, env=environment, timeout=20
    )
    assert json.loads(done.stdout.decode())["text"] == "漢字"


def test_closed_pipe_ends_it_without_a_word(server: FakeTriton) -> None:
    with subprocess.Popen(
        command(server, "-"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        server.delay = lambda _: 0.02
        process.stdin.write(b"a\n" * 5000)
        process.stdin.close()
        assert process.stdout.readline().startswith(b'{"text": "a"')
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141


def test_bar_is_drawn_on_a_terminal_only_and_only_for_many_batches(server: FakeTriton, tmp_path: Path) -> None:
    for texts, drawn in ((100, True), (10, False)):
        (tmp_path / "in.txt").write_text("a\n" * texts)
        arguments = command(
            server, "--file", str(tmp_path / "in.txt"), "--output", str(tmp_path / "o.npy"), "--batch", "4"
        )
        terminal, its_end = pty.openpty()
        subprocess.run(
            arguments,
            stderr=its_end,
            stdout=subprocess.PIPE,
            check=True,
            env={**os.environ, "TERM": "xterm"},
            timeout=20,
        )
        os.close(its_end)
        try:
            shown = os.read(terminal, 65536)
        except OSError:  # Linux: nothing was written and the other end is closed
            shown = b""
        os.close(terminal)
        assert (b"100/100" in shown) is drawn
