"""A full save and the deltas after it, in order, are the full save later: unsharded models."""

import copy

import pytest
import torch
from delta_cases import MOST, NAMES, Model, batch, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXTREME_IDS
from table_cases import ids_of, same_state

from torchrec_dyn.checkpoint import apply_delta, export_delta, mark

POOL = [*EXTREME_IDS[:3], *EXTREME_IDS[-2:], *range(2, 12)]
some = st.lists(st.sampled_from(POOL), max_size=MOST)
per_table = st.fixed_dictionaries(dict.fromkeys(NAMES, some))
table = st.sampled_from(NAMES)
events = st.one_of(
    st.tuples(st.just("train"), per_table),
    st.tuples(st.just("train"), per_table),
    st.tuples(st.just("erase"), table, some),
    st.tuples(st.just("assign"), table, some),
    st.tuples(st.just("set_time"), st.integers(0, 12)),
    st.tuples(st.just("evaluate"), per_table),
    st.tuples(st.just("reload"), table),
    st.tuples(st.just("export")),
)


def happen(model: Model, event) -> None:
    """Lets one thing happen to a model."""
    what, *told = event
    tables = model.tables()
    if what == "train":
        train(model, told[0])
    elif what == "erase":
        tables[told[0]].erase(ids_of(*told[1]))
    elif what == "assign":
        rows = torch.full((len(told[1]), tables[told[0]].columns), float(tables[told[0]].step))
        ids = list(dict.fromkeys(told[1]))
        tables[told[0]].assign(ids_of(*ids), rows[: len(ids)])
    elif what == "set_time":
        clock = tables["timed"].time or 0
        model.sequence.set_time(clock + told[0])
    elif what == "evaluate":
        model.eval()
        model(told[0])
    elif what == "reload":
        tables[told[0]].load_state(tables[told[0]].export_state())


def assert_same(one: Model, other: Model) -> None:
    for name, state in one.states().items():
        assert same_state(other.states()[name], state), name


OPTIMIZERS = [EmbOptimType.EXACT_ROWWISE_ADAGRAD, "ADAMW", EmbOptimType.EXACT_SGD]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=max(1, settings.default.max_examples // 8))
@given(before=st.lists(events, max_size=6), after=st.lists(events, max_size=25), ids=per_table)
def test_full_and_deltas_in_order_are_full_later(tmp_path_factory, optimizer, before, after, ids):
    folder = tmp_path_factory.mktemp("deltas")
    model = Model(optimizer)
    twin = copy.deepcopy(model)
    for event in before:
        happen(model, event)
        happen(twin, event)
    marker, number = mark(model), 0
    for event in [*after, ("export",)]:
        if event[0] == "export":
            marker = export_delta(model, folder / str(number), marker)
            apply_delta(twin, folder / str(number))
            assert_same(model, twin)
            number += 1
        else:
            happen(model, event)
    # The copy goes on as the model does: no list or cache of before is left.
    for _ in range(6):
        for one in (model, twin):
            train(one, ids)
        assert_same(model, twin)
        ids = {
            name: [number + 1 for number in some if abs(number) < 1000]
            for name, some in ids.items()
        }


def test_a_copy_forgets_what_it_had_listed_ahead(tmp_path):
    """The model went back to rows of long ago: in the copy they must expire as they do there."""
    model = Model()
    model.tables()["old"].assign(ids_of(1), torch.ones(1, 4))
    early = model.tables()["old"].export_state()
    twin = copy.deepcopy(model)
    for step in range(20):
        for one in (model, twin):
            train(one, batch(step))
    marker = mark(model)
    model.tables()["old"].load_state(early)
    export_delta(model, tmp_path / "0", marker)
    apply_delta(twin, tmp_path / "0")
    for _ in range(5):
        assert_same(model, twin)
        for one in (model, twin):
            train(one, batch())
    assert model.tables()["old"].num_rows == 0
