"""Batches on a mock GPU are pooled before the host waits for counts of rows, with the CPU's bits."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from life_cases import ADMISSIONS, EVERY_LIFE, EVICTIONS, living_table
from mock_device import CUDA, MockDevice
from table_cases import ids_of, make_group, same_state

from torchrec_dyn import ops
from torchrec_dyn.initializers import Constant
from torchrec_dyn.lookup import UnreadCounts
from torchrec_dyn.optimizers import OptimizerKind

POOLS = {"gather_pool", "pool_into_"}
RARE = {"lowest_scores", "move_slots"}  # wait once more


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


def check(counts, more):
    """The check of `unread`, as a collection makes it."""
    [ids, least] = more
    if sum(counts) != ids or least < 0:
        raise ValueError(f"expected lengths of {ids} ids, got {counts}.")


def unread(lengths, ids):
    """Returns counts of one feature a table that the host has not read; lengths [T, B] on the device."""
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.sum(1).cumsum(0)])
    words = torch.cat([begins, ids_of(ids), lengths.min().view(1)])
    return UnreadCounts(words.to(CUDA), len(lengths), check)


class Twins:
    """A group of tables of some lives on the CPU, and its twin on the device that is entered."""

    def __init__(self, device, *lives, pooling="sum", **options):
        self.device, self.pooling = device, pooling
        self.groups = []
        for place in ("cpu", CUDA):
            tables = [
                living_table(
                    EVICTIONS[one], ADMISSIONS[other], name=f"t{n}", device=place, **options
                )
                for n, (one, other) in enumerate(lives)
            ]
            self.groups.append(make_group(*tables, pooling=pooling))

    def forward(self, lists, *, training=True, weighted=False, counted=True, sizes=None):
        """Looks up bags of each table in both groups. Returns their outputs and what the device has noted."""
        ids = ids_of(*(number for bags in lists for bag in bags for number in bag))
        lengths = torch.tensor([[len(bag) for bag in bags] for bags in lists])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        weights = torch.linspace(-1, 3, len(ids)) if weighted else None
        counts = lengths.sum(1).tolist()
        options = {"training": training, "batch_sizes": sizes}
        expected = self.groups[0](ids, offsets, weights, counts=counts, **options)
        there = counts if counted else unread(lengths, len(ids))
        sent = [ids.to(CUDA), offsets.to(CUDA), None if weights is None else weights.to(CUDA)]
        self.device.forget()
        output = self.groups[1](*sent, counts=there, **options)
        order = list(self.device.order)
        assert self.device.mixed == [] and self.device.without_kernel == []
        return expected, output, order

    def step(self, lists, **options):
        """Takes one step in both groups, with a backward, and compares them; returns the noted order."""
        expected, output, order = self.forward(lists, **options)
        assert torch.equal(on_host(output), expected.detach())
        if expected.requires_grad and expected.numel():
            grad = torch.arange(expected.numel()).view(expected.shape) / 7
            expected.backward(grad)
            output.backward(grad.to(CUDA))
        return order

    def compare(self):
        for one, two in zip(*(group.tables for group in self.groups), strict=True):
            state = {name: on_host(part) for name, part in two.export_state().items()}
            assert same_state(state, one.export_state())


def on_host(tensor):
    return getattr(tensor.detach(), "memory", tensor.detach())


PLAIN = [("none", "all")] * 3
KNOWN = [[[1, 2, 2], [3]], [[], [4, 1]], [[9], [8, 9]]]
# New ids in the second table only.
SECOND_HAS_NEW = [KNOWN[0], [[4, 70], [1]], KNOWN[2]]
WAYS = {
    "counted": {},
    "weighted": {"weighted": True},
    "uncounted": {"counted": False},
    "varying": {"sizes": [[2], [2], [2]]},
    "varying and uncounted": {"sizes": [[2], [2], [2]], "counted": False},
}
SAME_LENGTHS = [[[5, 6, 5], [7]], [[], [1, 2]], [[7], [1, 9]]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_step_of_known_ids_pools_once_before_it_waits(device, pooling, way):
    twins = Twins(device, *PLAIN, pooling=pooling)
    options = WAYS[way]
    twins.step(KNOWN, **options)
    order = twins.step(KNOWN, **options)
    early = "gather_pool" if options.get("counted", True) else "pool_into_"
    if device.is_mock:
        assert order == ["lookup", early, "wait"]
    twins.compare()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_step_of_new_ids_pools_their_bags_again_when_they_have_rows(device, pooling, way):
    twins = Twins(device, *PLAIN, pooling=pooling)
    options = WAYS[way]
    twins.step(KNOWN, **options)
    order = twins.step(SECOND_HAS_NEW, **options)
    early = "gather_pool" if options.get("counted", True) else "pool_into_"
    if device.is_mock:
        assert order[:5] == ["lookup", early, "wait", "collect_new", "wait"]
        assert {*order[-3:-1]} == {"insert", "fill_new_"} and order[-1] == "pool_into_"
        assert order.count("wait") == 2
        assert not POOLS & {*order[5:-1]}
    twins.compare()


def test_only_bags_of_new_ids_are_pooled_again(device, monkeypatch):
    twins, calls, pool = Twins(device, *PLAIN), [], ops.pool_into_
    twins.step(KNOWN)

    def noted(out, new_index, *others):
        calls.append((on_host(out).clone(), on_host(new_index)))
        out.fill_(99.0)
        pool(out, new_index, *others)

    monkeypatch.setattr(ops, "pool_into_", noted)
    expected, output, _ = twins.forward(SECOND_HAS_NEW)
    [(early, new_index)] = calls
    assert new_index.tolist() == [-1] * 5 + [0] + [-1] * 4
    got, again = on_host(output), torch.zeros(2, 12, dtype=torch.bool)
    again[0, 4:8] = True  # the first bag of the second table
    assert torch.equal(got[again], expected.detach()[again]) and (got[~again] == 99.0).all()
    assert torch.equal(early[~again.flatten()], expected.detach()[~again])


@pytest.mark.parametrize("unseen", ["zeros", "initial"])
@pytest.mark.parametrize("counted", [True, False])
def test_evaluation_pools_before_it_waits(device, counted, unseen):
    twins = Twins(device, *PLAIN, unseen=unseen)
    twins.step(KNOWN)
    options = {"training": False, "counted": counted}
    early = "gather_pool" if counted else "pool_into_"
    of_known = twins.step(KNOWN, **options)
    order = twins.step(SECOND_HAS_NEW, **options)
    if device.is_mock:
        assert of_known == order[:3] == ["lookup", early, "wait"]
        assert order[3:].count("pool_into_") == (unseen == "initial")
        assert (order[-1] == "pool_into_") == (unseen == "initial")
    twins.compare()


@pytest.mark.parametrize("counted", [True, False])
def test_sequences_pool_before_they_wait_if_their_tables_are_known(device, counted):
    """Uncounted ids of several tables are gathered after the wait: their tables are not known before."""
    for tables in (1, 3):
        twins = Twins(device, *PLAIN[:tables], pooling="none", unseen="initial")
        early = "gather_pool" if counted else "pool_into_"
        twins.step(KNOWN[:tables], counted=counted)
        of_known = twins.step(KNOWN[:tables], counted=counted)
        expected = ["lookup", early, "wait"]
        if tables > 1 and not counted:
            expected = ["lookup", "wait", "gather_pool"]
        order = twins.step([*KNOWN[:tables][:-1], [[60], [9, 61]]], counted=counted)
        if device.is_mock:
            assert of_known == expected
            assert order[-1] == ("pool_into_" if "pool" in expected[1] else "gather_pool")
        twins.step([*KNOWN[:tables][:-1], [[62], [9, 61]]], counted=counted, training=False)
        twins.compare()


@pytest.mark.parametrize("unseen", ["zeros", "initial"])
@pytest.mark.parametrize("counted", [True, False])
def test_steps_beside_frozen_tables_pool_before_they_wait(device, counted, unseen):
    """Absent ids of a frozen table alone cost no wait, unless initial rows show for them."""
    twins = Twins(device, *PLAIN, unseen=unseen)
    twins.step(KNOWN)
    for group in twins.groups:
        group.tables[1].is_frozen = True
    early = "gather_pool" if counted else "pool_into_"
    beside = twins.step(SECOND_HAS_NEW, counted=counted)
    order = twins.step([[[1, 60], [3]], *SECOND_HAS_NEW[1:]], counted=counted)
    if device.is_mock:
        assert beside[:3] == ["lookup", early, "wait"]
        assert (len(beside) == 3) == (unseen == "zeros")
        assert order[:5] == ["lookup", early, "wait", "collect_new", "wait"]
        assert order[-1] == "pool_into_" and POOLS & {*order[5:-1]} == set()
    assert [table.num_rows for table in twins.groups[1].tables] == [4, 2, 2]
    twins.compare()


bag = st.lists(st.integers(0, 12), max_size=3)
batch = st.lists(st.lists(bag, min_size=2, max_size=2), min_size=2, max_size=2)


@settings(max_examples=8)
@given(
    lives=st.lists(st.sampled_from(EVERY_LIFE[1:]), min_size=2, max_size=2),
    program=st.lists(
        st.tuples(batch, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 4)),
        max_size=12,
    ),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    unseen=st.sampled_from(["zeros", "initial"]),
)
def test_every_policy_has_the_bits_of_the_cpu(lives, program, pooling, unseen):
    with MockDevice() as device:
        twins, time = Twins(device, *lives, limit=9, pooling=pooling, unseen=unseen), 0
        for lists, weighted, counted, training, passed in program:
            distinct = [len({number for bag in bags for number in bag}) for bags in lists]
            tables = twins.groups[0].tables
            pairs = zip(tables, distinct, strict=True)
            if not all(t.life.replaces or t.num_rows + n <= t.row_limit for t, n in pairs):
                break
            time += passed
            for table in itertools.chain(*(group.tables for group in twins.groups)):
                table.set_time(time)
            options = {"weighted": weighted and pooling != "none", "counted": counted}
            order = twins.step(lists, training=training, **options)
            pools = [place for place, name in enumerate(order) if name in POOLS]
            # A search for expired rows reads before the step does.
            if RARE & {*order} or not device.is_mock:
                continue
            if counted or pooling != "none":
                assert order[0] == "lookup" and pools[0] < order.index("wait") and len(pools) <= 2
            assert order.count("wait") <= (4 if training else 2)
        twins.compare()


def test_an_expired_id_that_gets_its_row_again_starts_anew(device):
    """The find has the trained row, of the same number: the bag is pooled again although no row changed."""
    options = {"initializer": Constant(1.0), "kind": OptimizerKind.EXACT_SGD}
    twins = Twins(device, ("steps", "all"), **options)
    twins.step([[[7, 3]]])
    for _ in range(4):
        twins.step([[[3]]])
    [table] = twins.groups[1].tables
    row = on_host(table.id_map.lookup(ids_of(7).to(CUDA))).tolist()
    trained = table.lookup(ids_of(7).to(CUDA))[0]
    assert row != [-1] and (on_host(trained) != 1.0).any()
    expected, output, order = twins.forward([[[7]]])
    assert on_host(output).tolist() == expected.tolist() == [[1.0] * 4]
    assert on_host(table.id_map.lookup(ids_of(7).to(CUDA))).tolist() == row
    if device.is_mock:
        assert order.index("gather_pool") < order.index("wait") and order[-1] == "pool_into_"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("lengths", [[[3, -1], [0, 1]], [[9, 9], [0, 1]], [[1, 0], [0, 1]]])
@pytest.mark.parametrize("life", [("none", "all"), ("steps", "count")])
def test_wrong_lengths_are_the_callers_error_and_leave_none_behind(
    device, monkeypatch, life, lengths, at_once
):
    """The GPU pools them before the host has checked them, and reads no memory of others."""
    if at_once:
        monkeypatch.setenv("TORCHREC_DYN_SYNC_ERRORS", "1")
    twins = Twins(device, life, life)
    lists = [[[1, 2], []], [[], [3]]]
    twins.step(lists, counted=False)
    lengths = torch.tensor(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    for training in (True, False):
        with pytest.raises(ValueError, match="expected lengths of 3 ids"):
            twins.groups[1](
                ids_of(1, 2, 3).to(CUDA), offsets.to(CUDA), training=training,
                counts=unread(lengths, 3),
            )  # fmt: skip
        twins.compare()
    ops.raise_errors(ids_of(1).to(CUDA))
    twins.step(lists, counted=False)
    twins.compare()


@pytest.mark.parametrize("life", [("none", "all"), ("steps, lru", "count")])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_output_that_fails_early_changes_nothing(device, monkeypatch, error, life):
    twins = Twins(device, life, life, life)
    twins.step(KNOWN)
    with monkeypatch.context() as patched, pytest.raises(error):
        patched.setattr(ops, "gather_pool", lambda *given: (_ for _ in ()).throw(error()))
        twins.groups[1](
            ids_of(1, 50, 60).to(CUDA), ids_of(0, 1, 2, 3).to(CUDA), training=True, counts=[1, 1, 1]
        )
    twins.compare()
    assert all(len(table.forwards) == 0 for table in twins.groups[1].tables)
    twins.step(SECOND_HAS_NEW)
    twins.compare()


def test_an_open_forward_holds_no_output(device):
    twins = Twins(device, *PLAIN)
    for lists in (KNOWN, SECOND_HAS_NEW):
        _, output, _ = twins.forward(lists)
        node = output.grad_fn
        while not hasattr(node, "lookup"):
            [(node, _), *_] = node.next_functions
        assert node.lookup.early is None
