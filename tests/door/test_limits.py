"""Keys, rates and sizes."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from clients.door.keys import Key, KeyRing, read_keys
from clients.door.limits import Bucket, RateLimits
from clients.door.log import LOGGER, JsonLines
from clients.errors import InvalidInput
from tests.clients.fake_triton import FakeTriton
from tests.door.doors import RunningDoor, running
from tests.tools.waiting import until

SECRET, OTHER = "a-secret-of-24-characters", "another-secret-of-theirs"
HASHED = f"sha256:{hashlib.sha256(OTHER.encode()).hexdigest()}"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may call\n\nsearch {SECRET}\nbatch {HASHED} requests_per_s=0.5\n")
    return path


@pytest.fixture
def locked(triton: FakeTriton, keys: Path) -> Iterator[RunningDoor]:
    with running(triton.url, models="encode", keys=keys, requests_per_s=1000) as door:
        yield door


def test_openai_client_is_let_in_with_its_key_and_not_with_another(locked: RunningDoor, triton: FakeTriton) -> None:
    with OpenAI(base_url=f"{locked.url}/v1", api_key=SECRET, max_retries=0) as client:
        assert len(client.embeddings.create(model="encode", input="a").data) == 1
        assert [one.id for one in client.models.list()] == ["encode"]
    with OpenAI(base_url=f"{locked.url}/v1", api_key=SECRET + "x", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.embeddings.create(model="encode", input="a")
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    assert len(triton.seen) == 1


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Basic {SECRET}", SECRET, "Bearer sécret", f"Bearer {HASHED}"]
)
def test_anything_but_a_key_is_refused(locked: RunningDoor, given: str) -> None:
    reply = locked.embed(Authorization=given)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")


def test_connection_stays_usable_after_a_refusal_whose_body_was_not_read(locked: RunningDoor) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
    body = json.dumps({"input": ["x" * 1000] * 300})
    for key, status in ((SECRET + "x", 401), (SECRET, 200), (OTHER, 200), (OTHER, 429), (SECRET, 200)):
        connection.request("POST", "/v1/embeddings", body, {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        assert (answer.status, len(answer.read()) > 0) == (status, True)
    connection.close()


def test_health_and_metrics_need_no_key(locked: RunningDoor) -> None:
    assert [locked.get(f"/health{path}").status for path in ("", "/ready", "/live")] == [200] * 3
    assert locked.get("/metrics").status == 200


def test_each_key_has_a_rate_of_its_own(locked: RunningDoor) -> None:
    assert locked.embed(Authorization=f"Bearer {OTHER}").status == 200
    reply = locked.embed(Authorization=f"Bearer {OTHER}")
    assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "rate_limit_exceeded", "requests")
    assert reply.headers["retry-after"] == "2"
    assert 1500 < int(reply.headers["retry-after-ms"]) <= 2000
    assert locked.embed(Authorization=f"Bearer {SECRET}").status == 200
    assert locked.metric("door_rate_limited_total", limit="requests") == 1


def test_keys_are_read_again_when_the_file_changes_and_kept_when_it_is_wrong(keys: Path) -> None:
    now = [0.0]
    ring = KeyRing(keys, clock=lambda: now[0])
    keys.write_text("short x\n")
    now[0] += 3
    assert ring.find(SECRET) is not None
    keys.write_text(f"new {OTHER}\n")
    now[0] += 3
    assert ring.find(SECRET) is None
    found = ring.find(OTHER)
    assert found is not None
    assert found.name == "new"
    os.remove(keys)
    now[0] += 3
    assert ring.find(OTHER) is not None


@pytest.mark.parametrize(
    "text",
    ["", "name\n", "name short\n", "name sha256:12\n", f"a {SECRET} rate=1\n", f"a {SECRET} texts_per_s=0\n",
     f"a {SECRET}\na {OTHER}\n", f"a {SECRET}é\n"],
)  # fmt: skip
def test_wrong_file_of_keys_is_refused_without_showing_a_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_keys(tmp_path / "keys")
    assert SECRET not in str(caught.value)
    assert "keys" in str(caught.value) or "key " in str(caught.value)


def test_bucket_lets_a_large_amount_pass_when_it_is_full_and_waits_for_the_debt() -> None:
    bucket = Bucket(rate=10, size=20, level=20, at=0)
    assert bucket.wait(100, 0) == 0
    bucket.take(100)
    assert bucket.wait(1, 0) == pytest.approx(8.1)
    assert bucket.wait(1, 8) == pytest.approx(0.1)
    assert bucket.wait(1, 8.2) == 0
    assert bucket.wait(0, 1000) == 0
    assert bucket.level == 20


def test_texts_and_tokens_are_limited(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", texts_per_s=0.5, burst_s=8) as door:
        assert door.embed(["a", "b", "c"]).status == 200
        reply = door.embed(["a", "b"])
        assert (reply.status, reply.error["type"]) == (429, "texts")
        assert int(reply.headers["retry-after"]) == 2
    with running(triton.url, models="encode", tokens_per_s=10, burst_s=1) as door:
        assert door.embed("x" * 100).status == 200  # more than the bucket holds: known only afterwards
        reply = door.embed("x")
        assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "tokens", "10")
    assert [len(one.texts) for one in triton.seen] == [3, 1]


def test_sizes_are_limited(triton: FakeTriton) -> None:
    with running(triton.url, models="encode,encode_rerank", max_body_bytes=1024, max_inputs=3) as door:
        assert door.embed(["a"] * 3).status == 200
        assert "limit: 3 a request" in door.embed(["a"] * 4).error["message"]
        assert door.post("/v1/rerank", {"query": "a", "documents": ["b"] * 4}).status == 400
        assert door.post("/predict", {"inputs": [["a"]] * 4}).status == 400
        reply = door.embed("x" * 2000)
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "body_too_large", "close")
        connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=10)
        connection.request("POST", "/v1/embeddings", iter([b"x" * 600, b"x" * 600]), encode_chunked=True,
                           headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()
        assert door.embed("a", Content_Encoding="gzip").status == 415


def test_body_that_does_not_arrive_ends_the_request(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", body_timeout_s=0.1) as door:
        connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=10)
        connection.putrequest("POST", "/v1/embeddings")
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        assert connection.getresponse().status == 408
        connection.close()


def test_more_requests_at_once_than_allowed_are_overload(triton: FakeTriton) -> None:
    release = threading.Event()
    triton.delay = lambda texts: 0.0 if release.is_set() else 5.0
    with running(triton.url, models="encode", max_in_flight=1, retry_after_s=3) as door:
        first: list[int] = []
        thread = threading.Thread(target=lambda: first.append(door.embed(X_Deadline_Ms="500").status))
        thread.start()
        assert until(lambda: triton.seen)
        reply = door.embed()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "overloaded", "3")
        thread.join()
        assert first == [504]
        release.set()
        time.sleep(0.01)
        assert door.embed().status == 200


# What strangers leave behind


def test_strangers_leave_nothing_behind_and_no_key_is_logged(
    locked: RunningDoor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    asked: set[str] = set()
    bucket = RateLimits._bucket

    def noted(self: RateLimits, key: Key, unit: str, now: float) -> Bucket | None:
        asked.add(key.name)
        return bucket(self, key, unit, now)

    monkeypatch.setattr(RateLimits, "_bucket", noted)

    def knock(number: int) -> None:
        assert locked.embed(Authorization=f"Bearer {'stranger' * 3}{number}").status == 401
        assert locked.get(f"/v1/made-up/{number}").status == 404
        made_up = {"model": f"made-up-{number}", "input": "a"}
        assert locked.post("/v1/embeddings", made_up, Authorization=f"Bearer {SECRET}").status == 404

    def series() -> int:
        return len(locked.get("/metrics").body.splitlines())

    # The door tells of its own models once it has asked for them, which may be after the first knock.
    assert until(lambda: locked.metric("door_model_ready", model="encode"))
    knock(0)
    before = series()
    for number in range(1, 20):
        knock(number)
    assert series() == before
    assert asked == {"search"}
    # Those that the command writes; pytest hears loggers, too, that are switched off.
    written = [record for record in caplog.records if record.name in (LOGGER, "uvicorn.error")]
    assert len(written) > 50
    for record in written:
        line = JsonLines().format(record) + str(record.__dict__)
        assert all(key not in line for key in (SECRET, OTHER, "stranger", "made-up"))


def test_every_key_is_compared_in_constant_time_whichever_fits(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr("clients.door.keys.compare_digest", compare)
    ring = KeyRing(keys)
    digests = [hashlib.sha256(key.encode()).digest() for key in (SECRET, OTHER)]
    for presented, name in ((SECRET, "search"), (OTHER, "batch"), ("neither of the two", None), ("", None)):
        compared.clear()
        found = ring.find(presented)
        assert (found.name if found else None) == name
        assert compared == digests
