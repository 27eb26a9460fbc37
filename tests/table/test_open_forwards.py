"""Rows that a forward captured are kept until its backward, in spite of other operations."""

import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from life_cases import assert_seen, seen
from table_cases import bags_of, bits, ids_of, make_group, make_table, same_state

from torchrec_dyn.initializers import Constant
from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.storage import OpenForward, OpenForwards

FOUR = torch.arange(4)


def started(ids=(0, 1, 2, 3), **options):
    """Returns a table, its group, and the output of a training forward over the ids as single bags."""
    table = make_table(initializer=Constant(1.0), **options)
    group = make_group(table)
    return table, group, group(*bags_of(*[[i] for i in ids]), training=True)


def rows_of(table, *ids):
    return table.lookup(ids_of(*ids))[0][:, 0].tolist()


def test_insertion_and_rehash_between_forward_and_backward():
    table, group, output = started()
    slots = table.id_map.capacity
    group.prefetch(torch.arange(100, 900), torch.tensor([0, 800]))
    assert table.id_map.capacity > slots
    output.sum().backward()
    assert rows_of(table, 0, 3, 100, 899) == pytest.approx([0.9, 0.9, 1.0, 1.0])


def test_a_late_gradient_goes_to_the_orphan_row():
    """The erased id and new ids get fresh rows, which the late gradient does not change."""
    table, _, output = started()
    assert table.erase(ids_of(1)) == 1
    assert not table.lookup(ids_of(1))[1].item()
    table.find_or_insert(ids_of(1, 50, 51))
    (output * 100).sum().backward()
    assert rows_of(table, 1, 50, 51) == [1.0, 1.0, 1.0]
    assert rows_of(table, 0, 2, 3) == pytest.approx([-9.0] * 3)
    assert table.stats()["late_grads"] == 1
    assert output[1, 0] == 1.0


def test_erased_rows_wait_for_every_forward_before_them():
    table, group, first = started()
    second = group(*bags_of([1]), training=True)
    table.erase(ids_of(1))
    third = group(*bags_of([2]), training=True)  # opened later: holds no erased row
    assert table.stats()["withheld"] == 1
    second.sum().backward()
    assert table.find_or_insert(ids_of(60)).item() == 4
    first.sum().backward()
    assert table.stats()["withheld"] == 0
    assert table.find_or_insert(ids_of(61)).item() == 1, "the freed row, though the third is open"
    third.sum().backward()
    assert rows_of(table, 60, 61) == [1.0, 1.0]
    assert table.stats()["late_grads"] == 2  # one of the first forward, one of the second


def test_a_dropped_graph_frees_its_rows():
    table, _, output = started()
    table.erase(ids_of(0, 3))
    assert table.stats()["withheld"] == 2
    del output
    gc.collect()
    assert table.stats()["withheld"] == 0
    assert table.find_or_insert(ids_of(70, 71, 72)).tolist() == [0, 3, 4]


def test_without_a_forward_rows_are_free_at_once():
    table = make_table()
    table.assign(FOUR, torch.ones(4, 4))
    table.erase(ids_of(2))
    with torch.no_grad():
        make_group(table)(*bags_of([0, 1]), training=True)
    assert table.stats()["withheld"] == 0
    assert table.find_or_insert(ids_of(9)).item() == 2


def test_a_reused_row_starts_fresh_with_fresh_state():
    table, _, output = started(kind=OptimizerKind.ADAM)
    output.sum().backward()
    table.erase(FOUR)
    assert table.find_or_insert(ids_of(9)).item() == 0
    state = table.export_state()
    assert rows_of(table, 9) == [1.0]
    assert not state["momentum1"].any() and not state["momentum2"].any()


RENEWALS = {
    "load_state": lambda group: group.tables[0].load_state(group.tables[0].export_state()),
    "convert": lambda group: group.tables[0].convert(torch.float16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda group: pickle.loads(pickle.dumps(group)),
    "a second group": lambda group: make_group(*group.tables),
}


@pytest.mark.parametrize("renewal", RENEWALS)
def test_rows_are_withheld_after(renewal):
    """After any operation that rebuilt or copied the table or put it into another group."""
    _, group, output = started()
    output.sum().backward()
    group = RENEWALS[renewal](group) or group
    table, was = group.tables[0], rows_of(group.tables[0], 1)
    output = group(*bags_of([0], [1]), training=True)
    table.erase(ids_of(1))
    table.find_or_insert(ids_of(80, 81))
    (output * 10).sum().backward()
    assert rows_of(table, 80, 81) == [1.0, 1.0]
    assert rows_of(table, 0) == pytest.approx([was[0] - 1.0], rel=1e-3)


def test_a_graph_of_an_older_group_holds_its_rows():
    """A collection builds new groups, for example when the optimizer changes."""
    table, _, output = started()
    newer = make_group(table)
    table.erase(ids_of(1))
    newer(*bags_of([5, 6]), training=True).sum().backward()
    output.sum().backward()
    assert rows_of(table, 5, 6) == pytest.approx([0.9, 0.9])


def test_evaluation_with_weight_gradients_holds_its_rows():
    table, group, output = started()
    output.sum().backward()
    weights = torch.ones(2, requires_grad=True)
    ids, offsets = bags_of([0, 1])
    output = group(ids, offsets, weights, training=False)
    table.erase(ids_of(1))
    table.assign(ids_of(90), torch.full((1, 4), 1e6))
    output.sum().backward()
    torch.testing.assert_close(weights.grad, torch.tensor([3.6, 3.6]))


def test_a_second_backward_is_an_error():
    table, _, output = started()
    loss = output.sum()
    loss.backward(retain_graph=True)
    state = table.export_state()
    with pytest.raises(RuntimeError, match="expected one backward through a forward, got a second"):
        loss.backward()
    assert same_state(table.export_state(), state)


@pytest.mark.parametrize("change", ["load_state", "convert"])
def test_a_replaced_table_refuses_the_backward(change):
    _, group, output = started()
    RENEWALS[change](group)
    table, state = group.tables[0], group.tables[0].export_state()
    with pytest.raises(RuntimeError, match="got tables that were loaded or converted in between"):
        output.sum().backward()
    assert same_state(table.export_state(), state)


def test_a_conversion_to_the_same_changes_nothing():
    table, _, output = started()
    table.convert(torch.float32, "cpu")
    output.sum().backward()
    assert rows_of(table, 0) == pytest.approx([0.9])


def test_prefetch_then_erase_then_forward():
    table = make_table(initializer=Constant(1.0))
    group = make_group(table)
    group.prefetch(FOUR, torch.tensor([0, 4]))
    assert (table.num_rows, table.step) == (4, 0)
    table.erase(ids_of(0, 1))
    output = group(FOUR, torch.tensor([0, 4]), training=True)
    output.sum().backward()
    assert rows_of(table, 0, 1, 2, 3) == pytest.approx([0.9] * 4)
    assert table.stats()["hits"] == 2 and table.stats()["inserted"] == 6


def test_lookups_ahead_see_rows_as_they_are_and_learn_in_order():
    """With forward i + 1 before backward i no update is lost."""
    table, group, first = started()
    second = group(*bags_of([0], [1]), training=True)
    first.sum().backward()
    second.sum().backward()
    assert rows_of(table, 0, 1, 2) == pytest.approx([0.8, 0.8, 0.9])


@pytest.mark.parametrize("limit", [1, 5])
def test_a_full_table_is_an_error_that_changes_nothing(limit):
    roomy = make_table(name="roomy")
    full = make_table(name="full", num_embeddings=limit)
    group = make_group(roomy, full)
    known = list(range(limit))
    group(*bags_of(known, known), training=True)
    before = seen((roomy, full))
    batch = bags_of([100, 101], [*known, 200])
    for call in (lambda: group(*batch, training=True), lambda: group.prefetch(*batch)):
        with pytest.raises(
            RuntimeError,
            match=rf"DynamicTable\('full'\) on rank 0: expected at most {limit} rows here "
            rf"\(num_embeddings={limit}\), got {limit} and 1 new ids",
        ):
            call()
    assert_seen((roomy, full), before)
    group(*bags_of([100, 101], known), training=True).sum().backward()
    full.erase(ids_of(0))
    group(*bags_of([0], [200]), training=True)
    assert full.num_rows == limit


@given(st.lists(st.sampled_from("fbedi"), max_size=25), st.integers(0, 1000))
def test_any_interleaving_keeps_rows_apart(steps, seed):
    """Forward, backward, erase, drop and insert in any order: each row is the sum of its updates.

    The backward of a training forward adds -1 to the rows of its ids (learning rate 0.1, gradient 10);
    erasing sets an id back. A dict is the oracle.
    """
    draw = torch.Generator().manual_seed(seed)
    table, held, births, graphs = make_table(initializer=Constant(0.0)), {}, 0, []
    group = make_group(table)
    for step in steps:
        ids = torch.unique(torch.randint(0, 8, (3,), generator=draw)).tolist()
        if step == "f":
            output = group(*bags_of(*[[i] for i in ids]), training=True)
            for i in ids:
                held.setdefault(i, [births := births + 1, 0.0])
            assert output[:, 0].tolist() == [held[i][1] for i in ids]
            graphs.append((output, {i: held[i][0] for i in ids}))
        elif step == "b" and graphs:
            output, captured = graphs.pop(int(torch.randint(len(graphs), (1,), generator=draw)))
            (output * 10).sum().backward()
            for i, birth in captured.items():
                if i in held and held[i][0] == birth:
                    held[i][1] -= 1.0
        elif step == "e":
            table.erase(ids_of(*ids))
            held = {i: row for i, row in held.items() if i not in ids}
        elif step == "d" and graphs:
            graphs.pop(0)
            output = None
        elif step == "i":
            table.find_or_insert(ids_of(*ids))
            for i in ids:
                held.setdefault(i, [births := births + 1, 0.0])
        table.id_map.check_invariants()
        rows, found = table.lookup(torch.arange(8))
        assert found.tolist() == [i in held for i in range(8)]
        assert rows[:, 0].tolist() == [held.get(i, [0, 0.0])[1] for i in range(8)]
    output = None
    graphs.clear()
    assert table.stats()["withheld"] == 0
    assert bits(table.weights.read(table.id_map.lookup(table.ids()))).numel() == 16 * len(held)


def test_an_open_forward_whose_constructor_failed_is_closed_without_an_error():
    """torch.compile makes objects without their constructors, and an interrupt may stop one."""
    forward = OpenForward.__new__(OpenForward)
    forward.close()
    assert forward.number == 0


def test_closed_forwards_are_not_counted(monkeypatch):
    """A forward may be closed while it is referred to, or dropped by a `__del__` that was interrupted."""
    group, table = OpenForwards(), OpenForwards()
    table.include(group)
    first, second = OpenForward(group), OpenForward(group)
    assert [(len(one), one.latest) for one in (group, table)] == [(2, second.number)] * 2
    second.close()
    assert [(len(one), one.latest) for one in (group, table)] == [(1, first.number)] * 2
    assert not table.all_closed_up_to(first.number)
    monkeypatch.setattr(OpenForward, "__del__", lambda forward: None)  # as after an interrupt
    del first
    assert [(len(one), one.latest) for one in (group, table)] == [(0, 0)] * 2
    assert table.all_closed_up_to(second.number)
