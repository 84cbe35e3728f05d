"""The examples of the docstrings, run against a fake server."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import clients
from tests.clients.fake_triton import serve

MODULES = [name for _, name, _ in pkgutil.walk_packages(clients.__path__, "clients.") if name != "clients.__main__"]


def examples(name: str) -> list[doctest.DocTest]:
    return [one for one in doctest.DocTestFinder().find(importlib.import_module(name), name) if one.examples]


@pytest.mark.parametrize("name", ["clients", *MODULES])
def test_examples_of_the_module_hold(name: str) -> None:
    with serve() as fake:
        fake.dim = lambda texts: 384
        for test in examples(name):
            for example in test.examples:
                example.source = example.source.replace("127.0.0.1:8001", fake.url)
                example.source = example.source.replace("http://127.0.0.1:8000", fake.http_url)
            failures: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert runner.run(test, out=failures.append).failed == 0, "".join(failures)


def test_every_method_of_a_task_has_an_example() -> None:
    found = {test.name.rsplit(".", 1)[-1] for test in examples("clients.client")}
    assert {"encode", "encode_batches", "classify", "rerank", "tag", "answer", "similarity"} <= found
