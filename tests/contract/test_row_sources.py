"""The contract of `RowSource`: under any chunks and ranges each source gives the rows of its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracle import unmixed
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, export_rows, open_checkpoint
from torchrec_dyn.checkpoint_format import MergedTable, RowSource, content_sum
from torchrec_dyn.migration.static_rows import StaticRows
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.ranks import mixed_ranges, owners
from torchrec_dyn.state_dict import LiveRows
from torchrec_dyn.storage import canonical_keys
from torchrec_dyn.tools.safetensors_rows import FileRows

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COLUMNS = 6
DTYPES = ["FP32", "FP16", "BF16"]
# The last ids are behind the ranges of mixed ids that ranks share evenly.
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, *unmixed(torch.arange(-6, 0)).tolist()]


class Case(NamedTuple):
    """A source, and what it must give: all tensors by row, by name, and the waiting ids [Q, 3]."""

    source: RowSource
    tensors: dict[str, Tensor]
    waiting: Tensor = torch.empty(0, 3, dtype=torch.int64)


def joined(source: RowSource, names: Any, *args: Any, **options: Any) -> dict[str, Tensor]:
    """All chunks as one; of no chunk nothing."""
    chunks = [*source.chunks(names, *args, **options)]
    return (
        {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]} if chunks else {}
    )


def assert_same(rows: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    assert rows.keys() == tensors.keys()
    for name, values in rows.items():
        assert values.dtype == tensors[name].dtype and torch.equal(values, tensors[name]), name


class Model:
    """A collection of one table, trained with its policy, and what a source of it must give."""

    def __init__(self, dtype: str) -> None:
        config = EmbeddingBagConfig(
            500, COLUMNS, "t", feature_names=["f"], data_type=DataType[dtype]
        )
        life = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=dyn.LeastRecentlyUsed())
        rule = {"optimizer": "PARTIAL_ROWWISE_ADAM", "learning_rate": 0.1}
        self.collection = dyn.DynamicEmbeddingBagCollection(
            [config], fused_params=rule, dynamic=life
        )

    def train(self, *ids: int) -> None:
        values = torch.tensor(ids)
        features = KeyedJaggedTensor(["f"], values, lengths=torch.ones(len(ids), dtype=torch.int64))
        self.collection(features).values().float().square().sum().backward()

    def case(self, source: RowSource) -> Case:
        state = self.collection.local_tables()["t"].export_state()
        tensors = {name: state[name] for name in source.names}
        tensors["momentum2"] = tensors["momentum2"].view(-1, 1)
        return Case(source, tensors, state["waiting"].t())


class RowSourceTests:
    """The tests that every source runs; a subclass says how its source is made."""

    has_order = True  # the canonical order; else that in which the rows are stored

    @staticmethod
    def make(folder: Path, dtype: str, is_empty: bool = False) -> Case:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tmp_path_factory: pytest.TempPathFactory) -> Case:
        return cls.make(tmp_path_factory.mktemp("source"), "FP32")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_are_those_of_the_table(self, tmp_path: Path, dtype: str) -> None:
        source, tensors, _ = self.make(tmp_path, dtype)
        assert source.dtype == tensors["weight"].dtype and source.name == "t"
        assert source.embedding_dim == COLUMNS and source.names[:2] == ("ids", "weight")
        assert_same(joined(source, source.names), tensors)
        for name, values in tensors.items():
            assert source.columns_of(name) == (values.shape[1] if values.dim() == 2 else 1)
        row_bytes = sum(values[:1].nbytes for values in tensors.values())
        assert source.row_bytes_of(source.names) == row_bytes

    def test_ids_are_in_order(self, case: Case) -> None:
        ids = joined(case.source, ())["ids"]
        keys = canonical_keys(ids) if self.has_order else torch.arange(len(ids))
        assert len(ids) > 20 and bool((keys[1:] > keys[:-1]).all())

    @pytest.mark.parametrize("chunk_bytes", [1, 100, 999, 1 << 20])
    def test_chunks_have_any_size(self, case: Case, chunk_bytes: int) -> None:
        source, tensors, _ = case
        most = max(chunk_bytes, source.row_bytes_of(source.names))
        sizes = [
            sum(values.nbytes for values in chunk.values())
            for chunk in source.chunks(source.names, chunk_bytes)
        ]
        assert all(0 < size <= most for size in sizes)
        assert_same(joined(source, source.names, chunk_bytes), tensors)

    def test_some_tensors_and_names_that_are_none(self, case: Case) -> None:
        rows = joined(case.source, ("weight", "weight", "ids"))
        assert_same(rows, {name: case.tensors[name] for name in ("ids", "weight")})
        with pytest.raises(ValueError, match=r"expected names among ids, weight.*, got step, x"):
            case.source.chunks(("weight", "step", "x"))

    def test_reads_may_be_repeated_and_side_by_side(self, case: Case) -> None:
        first = case.source.chunks(case.source.names, 200)
        chunk = next(first)
        assert_same(joined(case.source, case.source.names), case.tensors)
        rest = [chunk, *first]
        assert torch.equal(torch.cat([one["ids"] for one in rest]), case.tensors["ids"])

    @pytest.mark.parametrize(
        "ids", [range(3, 20), range(-(2**63), 1), range(9, 9), range(0, 2**63)]
    )
    def test_a_range_of_ids(self, case: Case, ids: range) -> None:
        source, tensors, _ = case
        of_range = torch.tensor([id in ids for id in tensors["ids"].tolist()])
        rows = joined(source, source.names, 200, ids=ids)
        expected = {name: values[of_range] for name, values in tensors.items()}
        assert_same(rows, expected if of_range.any() else {})

    @pytest.mark.parametrize("ranks", [1, 2, 3, 7])
    def test_the_parts_of_ranks_are_the_whole(self, case: Case, ranks: int) -> None:
        source, tensors, _ = case
        owner, sums = owners(tensors["ids"], ranks), {}
        for part in range(ranks):
            own = {name: values[owner == part] for name, values in tensors.items()}
            mixed = mixed_ranges(part, ranks)
            assert_same(joined(source, source.names, 200, mixed=mixed, sums=sums), own)
        assert sums == {
            name: content_sum("t", name, tensors["ids"], values) for name, values in tensors.items()
        }
        source.check_sums(source.names, sums)

    def test_the_columns_of_shards_are_the_whole(self, case: Case) -> None:
        source, tensors, _ = case
        sums: dict[str, int] = {}
        columns = [(0, 4), (4, 6)]
        chunks = [*source.chunks(source.names, 200, columns=columns, sums=sums)]
        for number, (first, last) in enumerate(columns):  # a chunk for each, in turn
            rows = {
                name: torch.cat([chunk[name] for chunk in chunks[number::2]]) for name in chunks[0]
            }
            for name, values in rows.items():
                if source.is_rowwise(name):
                    widths = torch.tensor(source.cuts).diff().double()
                    own = [
                        max(0, min(last, end) - max(first, begin))
                        for begin, end in zip(source.cuts[:-1], source.cuts[1:], strict=True)
                    ]
                    mean = tensors[name].double() @ torch.tensor(own).double() / (last - first)
                    assert len(widths) == tensors[name].shape[1] and values.shape[1] == 1
                    torch.testing.assert_close(values[:, 0], mean.float())
                else:
                    is_cut = tensors[name].dim() == 2
                    expected = tensors[name][:, first:last] if is_cut else tensors[name]
                    assert torch.equal(values, expected), name
        assert sums == {
            name: content_sum("t", name, tensors["ids"], values) for name, values in tensors.items()
        }

    def test_an_empty_table(self, tmp_path: Path) -> None:
        source, _, _ = self.make(tmp_path, "FP32", is_empty=True)
        assert joined(source, ("ids", "weight")) == {}
        assert joined(source, ("weight",), mixed=mixed_ranges(1, 3), columns=[(0, 2)]) == {}

    def test_ids_that_wait(self, case: Case) -> None:
        rows = joined(case.source, (), 50, waiting=True)
        if len(case.waiting):
            assert torch.equal(torch.stack([*rows.values()], 1), case.waiting)
            assert [*rows] == ["ids", "last_seen", "count"]
            parts = [
                joined(case.source, (), mixed=mixed_ranges(part, 3), waiting=True).get("ids")
                for part in range(3)
            ]
            assert sum(len(ids) for ids in parts if ids is not None) == len(case.waiting)
        else:
            assert rows == {}

    def test_other_sums_are_an_error_after_the_last_chunk(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = case.source
        if not source.sums:
            pytest.skip("its rows have no saved sums")
        monkeypatch.setattr(source, "sums", {**source.sums, "weight": source.sums["weight"] ^ 1})
        chunks = source.chunks(("weight",), 200)
        read = []
        with pytest.raises(ValueError, match=r"expected the content sum \w+ of weight, got"):
            read.extend(chunks)
        assert sum(len(chunk["ids"]) for chunk in read) == len(case.tensors["ids"])
        joined(source, ("ids",))  # what was not asked for is not compared


IDS = (*range(30), *EXTREMES)


def trained(dtype: str, is_empty: bool) -> Model:
    """A model with rows of several counts, some of one step."""
    model = Model(dtype)
    if not is_empty:
        for _ in range(3):
            model.train(*IDS)
        model.train(100, 101, 102)
    return model


class TestLiveRows(RowSourceTests):
    @staticmethod
    def make(folder: Path, dtype: str, is_empty: bool = False) -> Case:
        model = trained(dtype, is_empty)
        return model.case(LiveRows(model.collection.table("t"), "contract"))


class TestMergedTable(RowSourceTests):
    """A full save and two deltas, with removed, rewritten and new ids."""

    @staticmethod
    def make(folder: Path, dtype: str, is_empty: bool = False) -> Case:
        model, checkpoints = Model(dtype), Checkpoints(folder / "run", full_every=100)
        optimizer = model.collection.fused_optimizer
        if not is_empty:
            for _ in range(2):
                model.train(*range(100), *IDS)
        entries = [checkpoints.save(model.collection, optimizer, step=1)]
        for step in (2, 3):
            if not is_empty:
                model.collection.table("t").erase(torch.arange(20 * step, 20 * step + 20))
                model.train(*range(step, 10), 200 + step, 200 + step, 300)
                model.train(*range(step, 10), 400 + step)
            entries.append(checkpoints.save(model.collection, optimizer, step=step))
        checkpoints.close()
        chain = checkpoints.entries()
        saves = [next(iter(open_checkpoint(entry.tables).tables.values())) for entry in chain]
        assert [save.is_delta for save in saves] == [False, True, True]
        return model.case(MergedTable(saves))


class TestOneSave(RowSourceTests):
    """A chain of one: a full save alone."""

    @staticmethod
    def make(folder: Path, dtype: str, is_empty: bool = False) -> Case:
        model, checkpoints = trained(dtype, is_empty), Checkpoints(folder / "run")
        checkpoints.save(model.collection, model.collection.fused_optimizer, step=1)
        checkpoints.close()
        (entry,) = checkpoints.entries()
        return model.case(MergedTable([*open_checkpoint(entry.tables).tables.values()]))


class TestFileRows(RowSourceTests):
    @staticmethod
    def make(folder: Path, dtype: str, is_empty: bool = False) -> Case:
        model = Model(dtype)
        if not is_empty:
            for _ in range(3):
                model.train(*IDS)
        export_rows(model.collection, "t", folder / "f", checksum=True)
        state = model.collection.local_tables()["t"].export_state()
        return Case(FileRows(folder / "f"), {name: state[name] for name in ("ids", "weight")})


class TestStaticRows(RowSourceTests):
    """Its row-wise state is of three column shards."""

    has_order = False

    @staticmethod
    def make(folder: Path, dtype: str, is_empty: bool = False) -> Case:
        count = 0 if is_empty else 41
        kinds = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
        tensors = {
            "weight": torch.randn(count, COLUMNS).to(kinds[dtype]),
            "momentum1": torch.randn(count, COLUMNS),
            "momentum2": torch.rand(count, 3),
        }
        read = {
            name: lambda first, last, values=values: values[first:last]
            for name, values in tensors.items()
        }
        source = StaticRows(
            "contract", "t", (count, COLUMNS), kinds[dtype], read,
            RowOptimizer(OptimizerKind.PARTIAL_ROWWISE_ADAM), 7, [0, 1, 3, COLUMNS],
        )  # fmt: skip
        return Case(source, {"ids": torch.arange(count), **tensors})
