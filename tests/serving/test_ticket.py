"""One request, one answer: settled once, sent once, also from 16 threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from builders.serving.entry.errors import Refusal
from builders.serving.entry.ticket import Ticket
from builders.serving.entry.tokenise import Tokens
from tests.serving.parts import Mailbox, ticket, tokens

FAILED = Refusal("failed", "first")


def together(work: Callable[[int], None], threads: int = 16) -> None:
    """Run something on many threads that all begin at once."""
    start = threading.Barrier(threads)

    def run(number: int) -> None:
        start.wait(10)
        work(number)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(10)


def test_settled_only_with_its_last_text() -> None:
    own = ticket(3, 4, 5)
    assert [own.settle(1), own.settle(1), own.settle(1)] == [False, False, True]


def test_settled_at_once_when_all_texts_are_done_together() -> None:
    assert ticket(3, 4, 5).settle(3)


def test_a_row_is_awaited_for_every_window_of_every_text() -> None:
    whole, windows = tokens(3), Tokens((*tokens(4).pieces, *tokens(2).pieces), 0)
    own = Ticket([whole, windows])
    assert [piece.ids.size for piece in own.pieces] == [3, 4, 2]
    own.rows = [np.full(1, number, np.float32) for number in range(3)]
    assert [(text, [row.item() for row in rows]) for text, rows in own.texts()] == [(whole, [0]), (windows, [1, 2])]
    assert [own.settle(2), own.complete, own.settle(1), own.complete] == [False, False, True, True]


def test_late_ticket_sent_when_settled_and_not_before() -> None:
    own, sent = ticket(3, 4), Mailbox()
    own.late, own.send = True, sent
    own.settle(1)
    assert sent.sent == []
    own.settle(1)
    assert sent.sent == [own]


def test_ticket_that_is_not_late_never_sent() -> None:
    own, sent = ticket(3), Mailbox()
    own.send = sent
    assert own.settle(1)
    assert sent.sent == []


def test_refused_late_ticket_sent_once_it_is_settled() -> None:
    own, sent = ticket(3, 4), Mailbox()
    own.late, own.send = True, sent
    own.refuse(FAILED)
    assert sent.sent == []
    own.settle(2)
    assert sent.sent == [own]
    assert sent.sent[0].refusal == FAILED


def test_first_refusal_stays() -> None:
    own = ticket(3)
    own.refuse(FAILED)
    own.refuse(Refusal("overloaded", "second"))
    assert own.refusal == FAILED


def test_given_up_when_refused() -> None:
    own = ticket(3)
    assert not own.given_up
    own.refuse(FAILED)
    assert own.given_up
    assert own.refusal == FAILED


def test_given_up_when_the_client_has_gone_and_refused_as_cancelled() -> None:
    gone = False
    own = ticket(3, cancelled=lambda: gone)
    assert not own.given_up
    assert own.refusal is None
    gone = True
    assert own.given_up
    assert own.refusal
    assert own.refusal.kind == "cancelled"
    assert "cancelled by its client" in own.refusal.message


def test_client_not_asked_again_once_the_ticket_is_refused() -> None:
    asked: list[int] = []
    own = ticket(3, cancelled=lambda: bool(asked.append(1)) or True)
    assert own.given_up
    assert own.given_up
    assert len(asked) == 1


@pytest.mark.parametrize("rounds", [5])
def test_late_ticket_sent_exactly_once_when_16_threads_settle_it(rounds: int) -> None:
    for _ in range(rounds):
        own, sent, settled = ticket(*[2] * 160), Mailbox(), []
        own.late, own.send = True, sent

        def work(_: int, own: Ticket = own, settled: list[bool] = settled) -> None:
            for _ in range(10):
                settled.append(own.settle(1))

        together(work)
        assert sent.sent == [own]
        assert sorted(settled) == [False] * 159 + [True]


def test_one_refusal_kept_when_16_threads_refuse() -> None:
    own = ticket(3)
    seen: list[Refusal | None] = []

    def work(number: int) -> None:
        own.refuse(Refusal("failed", str(number)))
        seen.append(own.refusal)

    together(work)
    assert len(seen) == 16
    assert set(seen) == {own.refusal}
