"""Programs that take served tables as inputs, and the index from which their callers map these."""

import os
import re
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from compiled_cases import EMPTY, FILLED, GROWN, IDS, A, B, Scores, built, configs_of, grow
from serving_cases import Plain, bag_configs, batch, decode, save, save_delta, sequence_configs
from torch import nn

from torchrec_dyn import ops, serving
from torchrec_dyn.serving.export import export_with_tables
from torchrec_dyn.serving.files import mapped
from torchrec_dyn.serving.generation import mapped_tensors
from torchrec_dyn.serving.manifest import current_generation, read_manifest
from torchrec_dyn.serving.row_format import RowFormat

DTYPES = [torch.float32, torch.float16, torch.int8]


def tensors_of_index(served: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of the current generation by the lines of its index alone, as a C++ program does."""
    found = {}
    for line in (served / (served / "current").read_text().strip() / "tensors").open():
        name, dtype, file, first, *shape = line.split()
        data = torch.tensor(list((served / file).read_bytes()), dtype=torch.uint8)
        dtype, shape = getattr(torch, dtype), list(map(int, shape))
        size = dtype.itemsize * torch.Size(shape).numel()
        assert int(first) + size <= len(data)
        found[name] = data[int(first) : int(first) + size].view(dtype).view(shape)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_names_the_served_tensors(tmp_path, dtype):
    served, form = built(tmp_path, dtype), RowFormat(dtype)
    for tables in ([A, B, EMPTY], [GROWN, B, FILLED]):
        found = tensors_of_index(served)
        names = [
            f"{name}.{part}" for name in ("a%20b", "b", "c") for part in ("slots", "key", "rows")
        ]
        assert list(found) == [*names, "rows"]
        for table, name in zip(tables, ("a%20b", "b", "c"), strict=True):
            saved = table.tensors()
            ids = saved.get("ids", torch.empty(0).long())
            maps, keys = [found[f"{name}.slots"]], found[f"{name}.key"]
            rows, absent = ops.lookup(ids, torch.tensor([0, len(ids)]), maps, keys)
            assert not absent.any()
            stored = found[f"{name}.rows"]
            assert len(stored) >= 1 and stored.dtype == form.stored_dtype
            as_bytes = stored.view(torch.uint8)
            exact = decode(form, as_bytes[rows]) if len(ids) else torch.empty(0, table.dim)
            weight = saved.get("weight", torch.empty(0, table.dim))
            torch.testing.assert_close(exact, decode(form, form.encode(weight, "")), rtol=0, atol=0)
        name = current_generation(served)
        mapped = mapped_tensors(served, name, read_manifest(served, name))
        assert list(mapped) == list(found)
        assert all(torch.equal(mapped[one], found[one]) for one in found)
        if tables[0] is A:
            grow(served)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("dtype", "weighted"),
    [(torch.float32, True), (torch.float16, False), (torch.int8, False), (torch.int8, True)],
)
def test_pooled_programs_read_the_tables_that_they_get(tmp_path, dtype, weighted):
    served = built(tmp_path, dtype)
    ebc = serving.ServingEmbeddingBagCollection(served, configs_of(), is_weighted=weighted)
    model = Scores(ebc).eval()
    keys = ["f3", "x", "f2", "f1"]
    generation = ebc._lookup.generation

    def inputs(size, seed):
        features = batch(keys, IDS, size, seed, weighted=weighted)
        return torch.rand(size, 3), features

    program, names = export_with_tables(model, inputs(6, 0))
    assert ebc._lookup.generation is generation
    kept = [*program.constants.values(), *program.state_dict.values()]
    assert (
        sum(one.numel() for one in kept if one.dtype != torch.float32) < 1000
    )  # no rows, no slots
    run = program.module()
    for _ in range(2):
        tables = tensors_of_index(served)
        with torch.inference_mode():
            for size in (1, 0, 2, 33):
                dense, features = inputs(size, size + 1)
                weights = [features.weights()] if weighted else []
                plain = [dense, features.values(), features.lengths(), *weights]
                seen = run(plain, [tables[name] for name in names])
                for one, expected in zip(seen, model(dense, features), strict=True):
                    assert torch.equal(one, expected), size
        if ebc.generation.startswith("000001"):
            grow(served)
            ebc.refresh()


class WithNumbers(nn.Module):
    """A served collection with whole numbers beside it."""

    def __init__(self, ec: nn.Module) -> None:
        super().__init__()
        self.ec = ec

    def forward(self, numbers, features):
        return numbers + 1, self.ec(features)


def test_sequence_programs_read_the_tables_that_they_get(tmp_path):
    """Beside them is an input that has the shape and dtype of a table's key in the example only."""
    served = built(tmp_path, torch.int8)
    configs = sequence_configs(A, B, features={"a b": ["f1", "f2"], "b": ["f2"]})
    ec = serving.ServingEmbeddingCollection(served, configs)
    for number, states in enumerate(pairwise([A, A.without([1]), A])):  # nor the served generation
        save_delta(tmp_path / f"d{number}", *([one, B, EMPTY] for one in states))
        serving.apply_delta(served, tmp_path / f"d{number}")
    assert not (served / ec.generation).exists()
    example = torch.ones(1, 2).long(), batch(["f2", "f1"], IDS, 6, seed=0)
    program, names = export_with_tables(WithNumbers(ec), example)
    run = program.module()
    grow(served)
    ec.refresh()
    tables = tensors_of_index(served)
    features, numbers = batch(["f2", "f1"], IDS, 20, seed=1), torch.arange(40).view(20, 2)
    plain = [numbers, features.values(), features.lengths()]
    plus_one, *seen = run(plain, [tables[name] for name in names])
    assert torch.equal(plus_one, numbers + 1)
    expected = [part for one in ec(features).values() for part in (one.values(), one.lengths())]
    assert len(seen) == len(expected) == 6
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


def test_a_refresh_while_a_program_is_traced(tmp_path):
    served = built(tmp_path, torch.float32)
    ebc = serving.ServingEmbeddingBagCollection(served, bag_configs(B))
    before, features = ebc.generation, batch(["f_b"], IDS, 6, seed=0)

    class Refreshed(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse = ebc

        def forward(self, features):
            thread = threading.Thread(target=ebc.refresh)
            thread.start()
            thread.join()
            return self.sparse(features)

    assert not ebc.refresh() and ebc.generation == before
    grow(served)
    program, names = export_with_tables(Refreshed(), [features])
    assert ebc.generation == current_generation(served) != before
    assert ebc.ids("b").sort().values.tolist() == sorted(B.rows)
    fresh = serving.ServingEmbeddingBagCollection(served, bag_configs(B))
    assert torch.equal(ebc(features).values(), fresh(features).values())
    tables = tensors_of_index(served)
    plain = [features.values(), features.lengths()]
    (seen,) = program.module()(plain, [tables[name] for name in names])
    assert torch.equal(seen, ebc(features).values())


def test_the_rows_of_other_tables_may_be_more_than_a_block_holds(tmp_path):
    table, served = Plain("a", 2).with_random(range(10)), tmp_path / "served"
    serving.build(save(tmp_path / "checkpoint", table), served, rows=torch.float16)
    ebc = serving.ServingEmbeddingBagCollection(served, bag_configs(table))
    features = batch(["f_a"], list(range(12)), 6, seed=0)
    program, names = export_with_tables(ebc, [features])
    tables = tensors_of_index(served)
    size = 4 * (2**31 + 8)
    (file,) = served.glob("rows-*")
    os.truncate(file, size)  # a hole
    tables["a.rows"] = mapped(file, size).view(torch.float16).view(-1, 2)
    (seen,) = program.module()(
        [features.values(), features.lengths()], [tables[name] for name in names]
    )
    assert torch.equal(seen, ebc(features).values())


def test_what_cannot_be_compiled_is_named(tmp_path):
    served = built(tmp_path, torch.float32)
    features = batch(["f_b"], IDS, 6, seed=0)
    ebc = serving.ServingEmbeddingBagCollection(served, bag_configs(B))
    with pytest.raises(
        ValueError, match=r"expected a file with the ending \.pt2, got .*program\.so"
    ):
        serving.compile_program(ebc, [features], tmp_path / "program.so")

    def refused(module, inputs=(features,)):
        with pytest.raises(ValueError) as raised:
            serving.compile_program(module, inputs, tmp_path / "program.pt2")
        assert not (tmp_path / "program.pt2").exists()
        return str(raised.value)

    assert "collections of one directory, got a module without any" in refused(nn.Linear(2, 2))
    (tmp_path / "other").mkdir()
    other = serving.ServingEmbeddingBagCollection(
        built(tmp_path / "other", torch.float32), bag_configs(B)
    )
    both = refused(nn.ModuleList([ebc, other]))
    assert re.search(r"of one directory, got \['.*/other/served', '.*/served'\]", both)
    initial = serving.ServingEmbeddingBagCollection(served, bag_configs(B), unseen="initial")
    assert 'expected collections with unseen="zeros"' in refused(initial)
    assert "expected inputs that are tensors or KeyedJaggedTensors, got dict" in refused(ebc, [{}])
