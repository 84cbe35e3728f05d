"""Grouping: each text once, in the smallest bucket, no call above its batch, each vector back in its own row."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.serving.entry.errors import Refusal
from builders.serving.entry.group import Group, Row, groups_of, rows_by_bucket
from builders.serving.entry.ticket import Ticket
from builders.serving.entry.tokenise import Piece, Tokens
from tests.serving.parts import PAD, Mailbox, expected, lane, route, ticket, tokens, vectors

BUCKETS = (route(4, batch=3), route(8, batch=4), route(16, batch=2))
#: Requests as lists of text lengths.
REQUESTS = st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=6), max_size=8)


def grouped(tickets: list[Ticket]) -> list[Group]:
    return [group for own, rows in rows_by_bucket(tickets, BUCKETS).items() for group in groups_of(own, rows)]


@settings(deadline=None)
@given(
    requests=st.lists(st.lists(st.integers(0, 60), max_size=6), max_size=8),
    lengths=st.sets(st.integers(1, 60), max_size=5),
    batch=st.integers(1, 9),
)
def test_every_text_in_exactly_one_group_of_the_smallest_bucket(
    requests: list[list[int]], lengths: set[int], batch: int
) -> None:
    buckets = tuple(route(length, batch=batch) for length in sorted(lengths | {60}))
    tickets = [ticket(*request) for request in requests]
    by_bucket = rows_by_bucket(tickets, buckets)
    groups = [group for own, rows in by_bucket.items() for group in groups_of(own, rows)]
    placed = [(id(row.ticket), row.index) for group in groups for row in group.rows]
    assert sorted(placed) == sorted((id(own), index) for own in tickets for index in range(len(own.tokens)))
    for group in groups:
        for row in group.rows:
            assert group.route == next(bucket for bucket in buckets if row.ids.size <= bucket.length)
    assert [bucket.length for bucket in by_bucket] == sorted(bucket.length for bucket in by_bucket)
    assert all(by_bucket.values()), "a bucket without texts appears"


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=80), batch=st.integers(1, 20))
def test_fewest_calls_about_equally_full_and_none_above_the_batch(lengths: list[int], batch: int) -> None:
    own = route(16, batch=batch)
    groups = list(groups_of(own, [Row(ticket(length), 0) for length in lengths]))
    sizes = [len(group.rows) for group in groups]
    assert sum(sizes) == len(lengths)
    assert max(sizes) <= batch
    assert min(sizes) >= 1
    assert len(groups) == -(-len(lengths) // batch)
    assert max(sizes) - min(sizes) <= 1
    ordered = [row.ids.size for group in groups for row in group.rows]
    assert ordered == sorted(lengths)


@pytest.mark.parametrize(("count", "sizes"), [(32, [32]), (33, [16, 17]), (64, [32, 32]), (1, [1])])
def test_one_text_above_the_batch_gives_two_halves(count: int, sizes: list[int]) -> None:
    groups = groups_of(route(16, batch=32), [Row(ticket(5), 0) for _ in range(count)])
    assert [len(group.rows) for group in groups] == sizes


def test_32_short_texts_of_mixed_length_share_one_call() -> None:
    tickets = [ticket(length) for length in range(5, 37)]
    ((own, rows),) = rows_by_bucket(tickets, (route(128, batch=32), route(256, batch=32))).items()
    assert own.length == 128
    assert len(list(groups_of(own, rows))) == 1


@pytest.mark.parametrize(("length", "bucket"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_bucket_chosen_at_each_edge(length: int, bucket: int) -> None:
    assert [own.length for own in rows_by_bucket([ticket(length)], BUCKETS)] == [bucket]


def test_no_bucket_when_no_text() -> None:
    assert rows_by_bucket([], BUCKETS) == {}
    assert rows_by_bucket([Ticket([])], BUCKETS) == {}


def test_tensors_padded_to_the_bucket_exactly() -> None:
    own = Ticket([tokens(3, 50), tokens(8, 60)])
    ids, length = Group(route(8), (Row(own, 1), Row(own, 0))).tensors(PAD).values()
    assert ids.tolist() == [[60] * 8, [50] * 3 + [PAD] * 5]
    assert length.tolist() == [[8], [3]]
    assert (ids.dtype, length.dtype) == (np.int32, np.int32)


def test_segment_starts_given_in_the_order_of_the_rows_when_the_lane_takes_them() -> None:
    pair, single = Piece(np.full(5, 50, np.int32), 3), Piece(np.full(4, 60, np.int32), 4)
    own = Ticket([Tokens((pair, single), 0)])
    inputs = Group(route(8), (Row(own, 1), Row(own, 0))).tensors(PAD, segment=True)
    assert list(inputs) == ["input_ids", "length", "segment_start"]
    assert inputs["segment_start"].tolist() == [[4], [3]]
    assert inputs["segment_start"].dtype == np.int32
    assert inputs["length"].tolist() == [[4], [5]]


def test_windows_of_one_text_are_rows_of_their_own() -> None:
    windows = Tokens(tuple(Piece(np.full(size, 50, np.int32), size) for size in (8, 8, 3)), 0)
    own = Ticket([tokens(2), windows])
    placed = {bucket.length: [row.index for row in rows] for bucket, rows in rows_by_bucket([own], BUCKETS).items()}
    assert placed == {4: [0, 3], 8: [1, 2]}


def test_answers_per_token_delivered_to_their_pieces() -> None:
    own = Ticket([tokens(3), tokens(2)])
    answers = np.arange(2 * 4 * 5, dtype=np.float32).reshape(2, 4, 5)
    Group(route(4), (Row(own, 1), Row(own, 0))).deliver(answers)
    assert own.complete
    assert (own.rows[1] == answers[0]).all()
    assert (own.rows[0] == answers[1]).all()


def test_text_without_tokens_is_a_row_of_padding() -> None:
    ids, length = Group(route(4), (Row(ticket(0), 0),)).tensors(PAD).values()
    assert (ids.tolist(), length.tolist()) == ([[PAD] * 4], [[0]])


@settings(deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 1000))
def test_every_vector_delivered_into_its_own_row(requests: list[list[int]], seed: int) -> None:
    tickets = [ticket(*request) for request in requests]
    mailbox = Mailbox()
    for own in tickets:
        own.late, own.send = True, mailbox
    groups = grouped(tickets)
    random.Random(seed).shuffle(groups)
    for group in groups:
        group.deliver(lane(group.route, group.tensors(PAD)))
    assert sorted(map(id, mailbox.sent)) == sorted(map(id, tickets))
    for own in tickets:
        assert own.refusal is None
        assert (vectors(own) == expected(own, BUCKETS)).all()


@settings(deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 1000))
def test_failed_groups_refuse_only_the_requests_with_a_row_there(requests: list[list[int]], seed: int) -> None:
    tickets = [ticket(*request) for request in requests]
    mailbox, chance = Mailbox(), random.Random(seed)
    for own in tickets:
        own.late, own.send = True, mailbox
    concerned: set[int] = set()
    for group in grouped(tickets):
        if chance.random() < 0.3:
            concerned |= {id(row.ticket) for row in group.rows}
            group.fail(Refusal("failed", f"{group.route.model} broke"))
        else:
            group.deliver(lane(group.route, group.tensors(PAD)))
    assert sorted(map(id, mailbox.sent)) == sorted(map(id, tickets))
    assert {id(own) for own in tickets if own.refusal} == concerned
    for own in tickets:
        if own.refusal is None:
            assert (vectors(own) == expected(own, BUCKETS)).all()


def test_rows_of_given_up_requests_dropped_and_settled() -> None:
    gone, waiting, mailbox = ticket(3, 4, cancelled=lambda: True), ticket(2), Mailbox()
    for own in (gone, waiting):
        own.late, own.send = True, mailbox
    group = Group(route(4), (Row(gone, 0), Row(waiting, 0), Row(gone, 1)))
    kept = group.without_given_up()
    assert kept.rows == (Row(waiting, 0),)
    assert mailbox.sent == [gone]
    kept.deliver(lane(kept.route, kept.tensors(PAD)))
    assert mailbox.sent == [gone, waiting]


def test_group_kept_when_nobody_has_given_up() -> None:
    group = Group(route(4), (Row(ticket(3), 0),))
    assert group.without_given_up() is group


@pytest.mark.parametrize("end", ["deliver", "fail"])
def test_other_requests_answered_when_sending_one_answer_fails(end: str) -> None:
    broken, other, mailbox = ticket(3), ticket(2), Mailbox()

    def no_client(_: Ticket) -> None:
        raise RuntimeError("the response sender is gone")

    broken.late, broken.send = True, no_client
    other.late, other.send = True, mailbox
    group = Group(route(4), (Row(broken, 0), Row(other, 0)))
    with contextlib.suppress(RuntimeError):  # whether it may come out is not the question here
        if end == "deliver":
            group.deliver(lane(group.route, group.tensors(PAD)))
        else:
            group.fail(Refusal("failed", "x"))
    assert mailbox.sent == [other]
