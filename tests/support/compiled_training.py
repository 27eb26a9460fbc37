"""Trains a model with torch.compile and a twin without it on the same growing ids, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn

STEPS = 8  # torch.compile has traced all sizes twice
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
ONE = {"embedding_dim": 8, "num_embeddings": 1000, "fused_params": SGD}
_WIDTH = 16  # of the model's dense part
_COLLECTIONS = (
    dyn.DynamicEmbeddingBagCollection,
    dyn.DynamicEmbeddingCollection,
    dyn.ShardedDynamicEmbeddingBagCollection,
    dyn.ShardedDynamicEmbeddingCollection,
)


def configs(kind: Any) -> list[Any]:
    """Returns the configs of two tables, "t0" with feature "f0" and "t1" with feature "f1"."""
    return [
        kind(name=f"t{i}", embedding_dim=8, num_embeddings=1000, feature_names=[f"f{i}"])
        for i in range(2)
    ]


POLICIES = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(2), eviction=dyn.LeastFrequentlyUsed(), seed=3
)
CALLS: dict[str, Callable[[], nn.Module]] = {
    "pooled": lambda: dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig), fused_params=SGD
    ),
    "deferred": lambda: dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig), fused_params={**SGD, "defer_updates": True}
    ),
    "policies": lambda: dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig), dynamic=POLICIES, fused_params=SGD
    ),
    "sequence": lambda: dyn.DynamicEmbeddingCollection(configs(EmbeddingConfig), fused_params=SGD),
    "blocks": lambda: dyn.BlockEmbeddingBagCollection(
        configs(EmbeddingBagConfig), 4, fused_params=SGD
    ),
    "pairs": lambda: dyn.QuotientRemainderEmbeddingBagCollection(
        configs(EmbeddingBagConfig), 50, fused_params=SGD
    ),
    "rows": lambda: dyn.DynamicEmbedding(**ONE),
    "sum": lambda: dyn.DynamicEmbeddingBag(**ONE),
    "tile": lambda: dyn.DynamicEmbeddingBag(mode="tile", tile_length=2, **ONE),
    "max": lambda: dyn.DynamicEmbeddingBag(mode="max", **ONE),
    "weighted": lambda: dyn.DynamicEmbeddingBag(is_weighted=True, weight_gradients=True, **ONE),
    "processed": lambda: FeatureProcessedEmbeddingBagCollection(
        dyn.DynamicEmbeddingBagCollection(configs(EmbeddingBagConfig), is_weighted=True),
        PositionWeightedModuleCollection({"f0": 6, "f1": 6}),
    ),
}
TENSOR_CALLS = ("rows", "sum", "max", "tile", "weighted")


class Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.is_sequence = isinstance(tables, dyn.DynamicEmbeddingCollection)
        self.dense = nn.Sequential(nn.Linear(_WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Any) -> Tensor:
        """Returns one number per example, or per sequence of a sequence collection."""
        read = self.tables(ids)
        if isinstance(ids, Tensor):
            read = read.reshape(-1, _WIDTH)
        elif self.is_sequence:
            read = torch.cat([read[name].values().sum(0) for name in ("f0", "f1")])
        else:
            read = read.values()
        return self.dense(read)


def model_of(kind: str) -> Model:
    """Returns a model; models of one kind are equal."""
    torch.manual_seed(1)
    return Model(CALLS[kind]())


def inputs(kind: str, rank: int = 0) -> Iterator[Any]:
    """Returns the batches of a rank: ids that repeat, and ids that are new in each step."""
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(STEPS):
        bags = 4 + step % 3  # a size that changes makes torch.compile trace again
        if kind in TENSOR_CALLS:
            yield torch.randint(-5, 20 + 9 * step, (2 * bags, 3), generator=generator) * 7919
            continue
        lengths = torch.randint(0, 6, (2 * bags,), generator=generator)
        ids = torch.randint(-5, 20 + 9 * step, (int(lengths.sum()),), generator=generator) * 7919
        yield KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)


def train(model: nn.Module, batches: Iterator[Any], compiled: str, backend: str) -> list[Tensor]:
    """Trains and returns the outputs."""
    inner = model if isinstance(model, Model) else model.module
    of_tables = (".embedding_bags.", ".embeddings.")
    dense = [p for name, p in model.named_parameters() if not any(w in name for w in of_tables)]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    called: Any = model

    def step(ids: Any) -> Tensor:
        output: Tensor = called(ids)
        optimizer.zero_grad()
        (output**2).mean().backward()
        optimizer.step()
        return output.detach()

    if compiled == "model":
        called = torch.compile(model, backend=backend)
    elif compiled in ("tables", "dense"):
        setattr(inner, compiled, torch.compile(getattr(inner, compiled), backend=backend))
    elif compiled == "step":
        step = torch.compile(step, backend=backend)
    return [step(ids) for ids in batches]


def contents(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the ids and rows of each table. Collective."""
    found = {}
    for module in model.modules():
        if isinstance(module, _COLLECTIONS):
            pooled = hasattr(module, "embedding_bags")
            for table in module.embedding_bags if pooled else module.embeddings:
                ids = dyn.read_ids(module, table)
                found[table] = ids, dyn.lookup_rows(module, table, ids)[0]
    return found


def check_as_without_a_compiler(
    kind: str, compiled: str, backend: str, place: Any = None, rank: int = 0
) -> None:
    """Asserts that a compiled model and its twin agree: bit for bit, with inductor up to rounding."""
    shard = place or (lambda model: model)
    twin, model = shard(model_of(kind)), shard(model_of(kind))
    expected = train(twin, inputs(kind, rank), "nothing", backend)
    torch.compiler.reset()
    counters.clear()
    got = train(model, inputs(kind, rank), compiled, backend)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 0 if compiled == "tables" else graphs > 0
    exact = {"rtol": 0, "atol": 0} if backend != "inductor" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **exact)
    of_twin, of_model = contents(twin), contents(model)
    assert of_twin
    for table, (ids, rows) in of_twin.items():
        assert ids.numel() > 20
        assert of_model[table][0].tolist() == ids.tolist()
        torch.testing.assert_close(of_model[table][1], rows, **exact)


IDS = torch.tensor([1, 2, 3])


def _set_rate(tables: Any) -> None:
    for group in tables.fused_optimizer.param_groups:
        group["lr"] *= 0.5


def _read_handle(tables: Any) -> list[Any]:
    table = tables.table("t0")
    found = [table.num_rows, table.ids(), *table.lookup(IDS), table.stats()["step"]]
    return [*found, table.is_frozen, table.columns]


def _read_all(tables: Any) -> list[Any]:
    found = [dyn.read_ids(tables, "t0"), dyn.read_num_rows(tables, "t0")]
    return [*found, dyn.read_stats(tables, "t0")["step"], dyn.sample_ids(tables, "t0", 2, 0)]


def _freeze(tables: Any) -> None:
    table = tables.table("t1")
    table.unfreeze() if table.is_frozen else table.freeze()


CALLS_IN_A_STEP: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda tables: dyn.clip_grad_norm_(tables, 0.01),
    "fused_optimizer": _set_rate,
    "handle": _read_handle,
    "handle edits": lambda tables: tables.table("t0").assign(IDS, torch.ones(3, 8)),
    "handle erases": lambda tables: tables.table("t0").erase(IDS[:1]),
    "freeze": _freeze,
    "lookup_rows": lambda tables: dyn.lookup_rows(tables, "t0", IDS),
    "assign_rows": lambda tables: dyn.assign_rows(tables, "t0", IDS, torch.ones(3, 8)),
    "erase_rows": lambda tables: dyn.erase_rows(tables, "t0", IDS[:1]),
    "read_ids and others": _read_all,
    "state_dict": lambda tables: len(tables.state_dict()),
    "state_dict of the optimizer": lambda tables: len(tables.fused_optimizer.state_dict()["state"]),
}


def compare_calls(call: str, wrap: Callable[[Model], nn.Module]) -> None:
    """Compares training steps that end with a call, with and without torch.compile."""
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        model = model_of("deferred" if call == "clip_grad_norm_" else "pooled")
        whole = wrap(model)
        tables = model.tables

        def step(features: Any, whole: Any = whole, tables: Any = tables) -> Any:
            whole(features).sum().backward()
            result = CALLS_IN_A_STEP[call](tables)
            tables.fused_optimizer.step()
            return result

        run = torch.compile(step, backend="eager") if is_compiled else step
        results = [run(features) for features in list(inputs("pooled"))[:3]]
        rows = [dyn.lookup_rows(tables, name, torch.arange(100)) for name in ("t0", "t1")]
        found.append([results, rows, dyn.read_stats(tables, "t0")["step"]])
    torch.compiler.reset()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
