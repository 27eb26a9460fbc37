"""Long streams of drifting ids against the model: batches of many ids, limits of hundreds of rows."""

import pytest
import torch
from life_cases import EVICTIONS, SideBySide, living_table
from life_model import TooFew
from shards import deep_but
from table_cases import make_group

import torchrec_dyn as dyn

# (limit, batch): a 64th of the limit is 0, 2 and 3 rows.
SIZES = [(40, 24), (130, 90), (200, 130)]
ADMISSIONS = {
    "all": None,
    "count": dyn.AdmitAfter(2, counters=70),
    "chance": dyn.AdmitWithProbability(0.3),
}


def run(eviction, admission, limit, size, steps, seed=0):
    """Runs a stream of drifting ids, most of them seen often; backwards run late, early or never."""
    policy = EVICTIONS[eviction]
    table = living_table(policy, ADMISSIONS[admission], limit)
    side, group = SideBySide(table), make_group(table, pooling="none")
    draw = torch.Generator().manual_seed(seed)
    rows_open: dict[int, dict] = {}
    outputs: dict[int, tuple] = {}
    for step in range(steps):
        near = torch.randn(size, generator=draw).mul(size * 0.9).add(step * size / 5).long()
        ids = (near * 7919 * 2**40).tolist()[: int(torch.randint(size + 1, (), generator=draw))]
        if side.model.is_timed and step % 3 == 0:
            side.model.set_time(3 * step)
            table.set_time(3 * step)
        try:
            side.model.check(ids)
        except TooFew:
            with pytest.raises(RuntimeError, match=f"at most {limit} rows"):
                group(torch.tensor(ids), torch.tensor([0, len(ids)]), training=True)
            assert not side.model.makes_room
            gone = table.ids()[::3]
            table.erase(gone)
            side.change(lambda model, gone=gone: model.erase(gone.tolist()), rows_open)
            continue
        given = torch.tensor(ids, dtype=torch.int64)
        output = group(given, torch.tensor([0, len(ids)]), training=True)
        births = side.change(lambda model, ids=ids: model.train(ids), rows_open)
        outputs[step] = (output, births)
        rows_open[step] = dict(zip(births, table.id_map.lookup(given).tolist(), strict=True))
        output = None
        chance = torch.rand((), generator=draw)
        if len(outputs) > 3 or chance < 0.6:
            first = next(iter(outputs))
            output, births = outputs.pop(first)
            del rows_open[first]
            if chance > 0.1:
                output.backward(torch.ones_like(output))
                side.learn(births, 1.0)
            output = None
        side.assert_rows_apart(rows_open)
        if step % 5 == 0 or step == steps - 1:
            side.assert_same_life([0])
            side.assert_same_rows()
    return side.model.causes


@pytest.mark.everyday(7)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_stream_that_drifts(eviction, admission):
    limit, size = SIZES[1]
    causes = run(eviction, admission, limit, size, steps=30)
    assert causes["inserted"] > 50
    if admission == "all":
        assert causes["evicted_full"] > 50 or not eviction.endswith(("lru", "lfu"))
    assert causes["evicted_expired"] > 10 or not eviction.startswith(("steps", "time"))
    assert causes["refused"] > 50 or admission == "all"
    assert causes["counters_dropped"] > 10 or admission != "count"


LONG = [
    (eviction, admission, size, 600, 3)
    for eviction in EVICTIONS
    for admission in ADMISSIONS
    for size in SIZES
]
SHORT = ("time, lfu", "count", SIZES[0], 60, 1)


@pytest.mark.parametrize(
    ("eviction", "admission", "size", "steps", "seeds"), deep_but([SHORT], [SHORT, *LONG])
)
def test_a_long_stream_that_drifts(eviction, admission, size, steps, seeds):
    for seed in range(seeds):
        causes = run(eviction, admission, *size, steps=steps, seed=seed)
        assert causes["inserted"] > steps
