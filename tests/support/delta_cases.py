"""Models with dynamic tables of every kind, and training steps between two deltas."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import strategies as st
from oracle import EXTREME_IDS
from table_cases import ids_of, same_state
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn
from torchrec_dyn.modules.unsharded_table import UnshardedTable

LRU, FADING = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed(half_life_time=4)
# Table -> num_embeddings and options.
TABLES = {
    "plain": (1000, dyn.DynamicTableConfig()),
    "lru": (6, dyn.DynamicTableConfig(eviction=LRU, admission=dyn.AdmitAfter(2, counters=4))),
    "old": (
        1000,
        dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=3), admission=dyn.AdmitAfter(2)),
    ),
    "timed": (8, dyn.DynamicTableConfig(eviction=(dyn.ExpireAfter(time=10), FADING))),
}
NAMES = list(TABLES)
MOST = 4  # ids per feature in a batch, so that they fit into every table


class Model(nn.Module):
    """A pooled and a sequence collection, nested in the model."""

    def __init__(self, optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD) -> None:
        super().__init__()
        fused = {"optimizer": optimizer, "learning_rate": 0.1}
        dynamic = {name: config for name, (_, config) in TABLES.items()}
        options = {"fused_params": fused}
        bags = [
            EmbeddingBagConfig(
                TABLES[name][0],
                8 if name == "lru" else 4,
                name,
                feature_names=[f"f_{name}"],
                data_type=DataType.FP16 if name == "old" else DataType.FP32,
            )
            for name in NAMES[:3]
        ]
        timed = EmbeddingConfig(8, 4, "timed", feature_names=["f_timed"])
        self.pooled = dyn.DynamicEmbeddingBagCollection(
            bags, dynamic={name: dynamic[name] for name in NAMES[:3]}, **options
        )
        self.sequence = dyn.DynamicEmbeddingCollection(
            [timed], dynamic={"timed": dynamic["timed"]}, **options
        )

    def forward(self, ids: dict[str, list[int]]) -> Tensor:
        pooled = self.pooled(_features({name: ids[name] for name in NAMES[:3]}))
        sequence = self.sequence(_features({"timed": ids["timed"]}))
        return pooled.values().float().sum() + sequence["f_timed"].values().sum()

    def collection(self, name: str) -> nn.Module:
        return self.sequence if name == "timed" else self.pooled

    def tables(self):
        """Returns the rows of each table by name."""
        found = [one for one in self.modules() if isinstance(one, UnshardedTable)]
        return {one.config.name: one.rows() for one in found}

    def states(self) -> dict[str, dict[str, Tensor]]:
        return {name: table.export_state() for name, table in self.tables().items()}


def _features(ids: dict[str, list[int]]) -> KeyedJaggedTensor:
    """Returns a batch of one sample."""
    return KeyedJaggedTensor(
        [f"f_{name}" for name in ids],
        torch.tensor([number for some in ids.values() for number in some], dtype=torch.int64),
        lengths=torch.tensor([len(some) for some in ids.values()]),
    )


def train(model: Model, ids: dict[str, list[int]]) -> None:
    model.train()
    (model(ids) * 0.5).backward()


def batch(*ids: int) -> dict[str, list[int]]:
    """Returns the same ids for every table."""
    return {name: list(ids) for name in NAMES}


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


def happen(model: Model, event: tuple[Any, ...]) -> None:
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
