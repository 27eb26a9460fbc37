"""Replicas of one table under every policy against a plain model: trained, edited and merged, repeatedly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from life_cases import ADMISSIONS, EVICTIONS, SideBySide, living_table
from oracle import EXTREME_IDS
from replica_cases import side_of, sync
from replica_model import Replica, TooMany, merge
from table_cases import ids_of, make_group, same_state

IDS = [*EXTREME_IDS[:3], *range(3, 9)]
ids_st = st.lists(st.sampled_from(IDS), max_size=5)
edit_st = st.tuples(
    st.sampled_from(["erase", "assign"]), st.lists(st.sampled_from(IDS), max_size=2)
)


@st.composite
def intervals(draw: st.DrawFn, replicas: int) -> list[list[tuple]]:
    """Draws what each replica does up to a sync: as many steps as the others, and edits."""
    steps = draw(st.integers(0, 3))
    of_replicas = []
    for _ in range(replicas):
        does: list[tuple] = []
        for _ in range(steps):
            if draw(st.booleans()):
                does.append(("time", draw(st.integers(0, 6))))
            does.append(("train", draw(ids_st)))
            if draw(st.integers(0, 3)) == 0:
                does.append(draw(edit_st))
        of_replicas.append(does)
    return of_replicas


def replica_of(eviction, admission, limit) -> tuple[Replica, object]:
    table = living_table(EVICTIONS[eviction], ADMISSIONS[admission], limit)
    return Replica(SideBySide(table)), make_group(table)


def do(replica: Replica, group, what: str, given) -> None:
    pair, model, table = replica.pair, replica.model, replica.pair.table
    if what == "time":
        if model.is_timed:
            time = (model.clock or 0) + given
            table.set_time(time)
            model.set_time(time)
            if set(replica.times) == {None}:  # the first time holds from the first step on
                replica.times = [time] * len(replica.times)
    elif what == "train":
        batch = given if pair.fits(given) else []
        births = pair.change(lambda model: model.train(batch))
        replica.times.append(model.clock)
        bags = torch.tensor([0, len(batch)])
        group(ids_of(*batch), bags, training=True).sum().backward()
        pair.learn(births, 1.0)
    elif what == "erase":
        replica.erased |= set(given)
        table.erase(ids_of(*given))
        pair.change(lambda model: model.erase(given))
    elif len({*given, *model.rows}) <= model.limit:
        for number in dict.fromkeys(given):
            row = pair.initial(number)[None] + 1
            table.assign(ids_of(number), row)
            pair.change(lambda model, number=number: model.assign([number]))
            pair.held[model.rows[number].born].weight = row[0].double()


@pytest.mark.everyday(4)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=max(4, settings.default.max_examples // 10))
@given(data=st.data())
def test_replicas_merge_as_the_model_says(eviction, admission, data):
    count = data.draw(st.integers(2, 3))
    both = [replica_of(eviction, admission, limit=7) for _ in range(count)]
    replicas = [replica for replica, _ in both]
    sides = [side_of(one.pair.table) for one in replicas]
    for _ in range(data.draw(st.integers(1, 3))):
        for (replica, group), does in zip(both, data.draw(intervals(count)), strict=True):
            for what, arguments in does:
                do(replica, group, what, arguments)
        before = [one.pair.table.export_state() for one in replicas]
        try:
            merge(replicas)
        except TooMany:
            with pytest.raises(RuntimeError, match="in the union of the replicas, got"):
                sync(sides)
            now = [one.pair.table.export_state() for one in replicas]
            assert all(map(same_state, before, now))
            return
        sync(sides)
        states = [one.pair.table.export_state() for one in replicas]
        assert all(same_state(state, states[0]) for state in states)
        for one in replicas:
            take_times_of_due_rows(one)
            one.pair.assert_same_life(IDS)
            check_rows(one, states[0])
        assert all(not ids.numel() for ids, *_ in sync(sides))


def take_times_of_due_rows(one: Replica) -> None:
    """Has the model take earlier times of rows that expire at the next step.

    The time of their last step may be that of a replica that has none as old, and has dropped it.
    """
    model, table = one.model, one.pair.table
    for number in model.due() if model.is_timed else ():
        row, told = model.rows[number], int(table.last_seen(ids_of(number)))
        assert told <= (row.time or 0)
        row.time = told


def check_rows(one: Replica, state: dict[str, torch.Tensor]) -> None:
    held = [one.pair.held[one.model.rows[n].born] for n in state["ids"].tolist()]
    for place, expected in enumerate(held):
        torch.testing.assert_close(
            state["weight"][place].double(), expected.weight, rtol=1e-5, atol=1e-6
        )
        squares = torch.full((4,), expected.squares, dtype=torch.float32)
        torch.testing.assert_close(state["momentum1"][place], squares, rtol=1e-5, atol=1e-6)
