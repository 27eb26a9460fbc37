"""Tables in mapped files train as tables in memory, leave nothing behind, and find the disk full in time."""

from __future__ import annotations

import copy
import ctypes
import errno
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from another_process import environment, start
from forked import forkserver
from full_disk import file_limit, room_left, small_disk
from mapped_cases import SHARED_MEMORY, are_mapped, on_ext4, small_files
from table_cases import bags_of, ids_of, make_group

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.lookup import rows_ahead
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.storage import RowStore, check_directory
from torchrec_dyn.storage.block_memory import mapped_block
from torchrec_dyn.table import TableShard
from torchrec_dyn.table.checks import check_storage

FILES = dyn.MappedFiles(SHARED_MEMORY)


def table_of(
    storage: dyn.MappedFiles | None = FILES,
    kind: OptimizerKind = OptimizerKind.ADAM,
    columns: int = 8,
    limit: int = 3000,
    **config: Any,
) -> TableShard:
    return TableShard(
        name="t",
        num_embeddings=limit,
        embedding_dim=columns,
        optimizer=RowOptimizer(kind=kind, learning_rate=0.1),
        config=dyn.DynamicTableConfig(storage=storage, **config),
    )


def train(table: TableShard, steps: range, pool: int = 4000, ids_a_step: int = 300) -> None:
    group = make_group(table)
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(pool, (ids_a_step,), generator=draw)
        output = group(ids, torch.arange(0, ids_a_step + 1, 3), training=True)
        output.backward(torch.randn(output.shape, generator=draw))


def same(one: TableShard, other: TableShard) -> bool:
    mine, others = one.export_state(), other.export_state()
    return mine.keys() == others.keys() and all(
        torch.equal(mine[name], others[name]) for name in mine
    )


@pytest.mark.parametrize("kind", OptimizerKind, ids=lambda kind: kind.name)
def test_every_optimizer_writes_the_bits_of_a_table_in_memory(kind: OptimizerKind) -> None:
    with small_files():
        tables = [table_of(storage, kind) for storage in (None, FILES)]
    for table in tables:
        train(table, range(8))
    assert same(*tables)
    assert are_mapped(tables[1]) and not are_mapped(tables[0])
    assert len(tables[1].weights.blocks) > 20  # grown, block by block


@pytest.mark.parametrize(
    "policies",
    [
        {"eviction": dyn.LeastRecentlyUsed()},
        {"eviction": (dyn.ExpireAfter(steps=3), dyn.LeastFrequentlyUsed())},
        {"admission": dyn.AdmitAfter(2), "unseen": "initial"},
        {"on_nonfinite": "skip", "unseen": "initial"},
    ],
    ids=lambda policies: "-".join(policies),
)
def test_policies_decide_as_in_memory(policies: dict[str, Any]) -> None:
    with small_files():
        tables = [table_of(storage, limit=500, **policies) for storage in (None, FILES)]
    for table in tables:
        train(table, range(20), 1500 if "eviction" in policies else 400)
        group = make_group(table)
        outputs = group(*bags_of([*range(30)], [-5, 77]), training=False)
        assert outputs.isfinite().all()
    assert same(*tables)
    assert tables[0].stats()["evicted_full"] == tables[1].stats()["evicted_full"]


def test_initial_rows_of_one_evaluation_are_in_memory() -> None:
    table = table_of(unseen="initial")
    train(table, range(2))
    blocks = len(table.weights.blocks)
    make_group(table)(*bags_of([-5, -6]), training=False)
    assert len(table.weights.blocks) == blocks


def test_every_way_to_new_contents_keeps_them_in_files() -> None:
    table, plain = table_of(), table_of(None)
    for one in (table, plain):
        train(one, range(5))
    state = table.export_state()
    copied, unpickled = copy.deepcopy(table), pickle.loads(pickle.dumps(table))
    for one in (copied, unpickled):
        assert are_mapped(one) and same(one, plain)
        assert one.weights.blocks[0].data_ptr() != table.weights.blocks[0].data_ptr()
    table.convert(torch.bfloat16)
    plain.convert(torch.bfloat16)
    assert are_mapped(table) and same(table, plain) and not same(copied, plain)
    table.load_state(state)
    assert are_mapped(table)
    train(copied, range(5, 7))
    train(unpickled, range(5, 7))
    assert same(copied, unpickled)


def mapped_lines() -> list[str]:
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line
    ]


def test_a_dropped_table_frees_its_files() -> None:
    before = len(mapped_lines())
    with small_files():
        table = table_of()
    train(table, range(2))
    assert len(mapped_lines()) > before
    held = len(os.listdir("/proc/self/fd"))
    train(table, range(2, 9))
    assert len(os.listdir("/proc/self/fd")) == held  # blocks keep no descriptors
    del table
    assert len(mapped_lines()) == before


# The disk.


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_full_disk_is_an_error_before_anything_changes(how: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk, small_files(16 << 10):
        table = table_of(dyn.MappedFiles(str(disk)), limit=20_000, eviction=dyn.LeastRecentlyUsed())
        train(table, range(3), 500)
        before, twin = table.export_state(), copy.deepcopy(table)
        no_room = room_left(disk, 8 << 10) if how == "disk" else file_limit(8 << 10)
        expected = errno.ENOSPC if how == "disk" else errno.EFBIG
        with no_room:
            with pytest.raises(
                OSError, match=r"RowStore: expected \d+ more bytes .* No row has"
            ) as e:
                train(table, range(3, 4), 100_000, 3000)
            assert e.value.errno == expected and str(disk) in str(e.value)
            after = table.export_state()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert table.stats()["step"] == twin.stats()["step"]
            train(table, range(4, 6), 500)  # known ids need no room
        train(twin, range(4, 6), 500)
        train(table, range(6, 7), 5000)  # there is room again
        train(twin, range(6, 7), 5000)
        assert same(table, twin) and are_mapped(table, str(disk))


def hold_rows(disk: str, begun: Any) -> None:
    """Has rows in mapped files until the process is killed."""
    table = table_of(dyn.MappedFiles(disk), limit=200_000)
    train(table, range(3))
    begun.set()
    threading.Event().wait()


def test_kill_9_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256 << 20) as disk:
        free = shutil.disk_usage(disk).free
        begun = forkserver().Event()
        child = start(hold_rows, str(disk), begun)
        try:
            assert begun.wait(120)
            taken = free - shutil.disk_usage(disk).free
            assert taken >= 200_000 // 2 * 8 * 4  # space is taken, not only reserved
            assert os.listdir(disk) == []  # nothing that anybody could truncate
        finally:
            child.kill()
            child.join()
        assert child.exitcode == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while shutil.disk_usage(disk).free != free and time.monotonic() < deadline:
            time.sleep(0.01)
        assert shutil.disk_usage(disk).free == free and os.listdir(disk) == []


# What is refused.


def test_other_file_systems_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"DynamicTable\('t'\): expected a directory for mapped files on ext4, xfs or tmpfs, got "
        r"'/proc' on proc\. Choose a directory on a local disk",
    ):
        table_of(dyn.MappedFiles("/proc"))


def test_directories_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"may make files, got .*No such file.*Make it, or choose"):
        check_directory("T", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="absolute path of a directory, got 'scratch'"):
        dyn.MappedFiles("scratch")
    with pytest.raises(
        ValueError, match=r"storage: expected HostMemory, MappedFiles or None, got '/tmp'"
    ):
        dyn.DynamicTableConfig(storage="/tmp")  # type: ignore[arg-type]
    assert dyn.MappedFiles(tmp_path) == dyn.MappedFiles(str(tmp_path))  # type: ignore[arg-type]


def test_a_directory_that_is_gone_is_an_error_of_its_user(tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match=r"RowStore: expected 4096 more bytes .*No such file"
    ) as caught:
        mapped_block(str(tmp_path / "missing"), 64, 16, torch.float32)
    assert caught.value.errno == errno.ENOENT


def test_a_directory_that_goes_away_may_be_made_again(tmp_path: Path) -> None:
    """Its disk may have room: other advice than for a full one."""
    place = tmp_path / "scratch"
    place.mkdir()
    store = RowStore(16, 4, torch.float32, torch.device("cpu"), str(place))
    store.reserve(16)
    place.rmdir()
    with pytest.raises(
        OSError, match=r"No such file.* No row has changed\. Make the directory"
    ) as e:
        store.reserve(17)
    assert "Free space" not in str(e.value)
    place.mkdir()
    store.reserve(17)


def test_rows_beside_a_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected rows on the CPU, since its storage is Mapped"):
        check_storage("T", FILES, torch.device("cuda:0"))


def test_a_fork_may_read_and_not_train() -> None:
    """Parent and child have the same pages: rows that the child wrote would change the parent's."""
    table = table_of()
    train(table, range(2))
    before = table.export_state()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            assert torch.equal(table.lookup(before["ids"])[0], before["weight"])
            for change in (
                lambda: train(table, range(2, 3)),
                lambda: table.assign(before["ids"][:1], torch.zeros(1, 8)),
            ):
                with pytest.raises(RuntimeError, match="got a fork of it, which shares the rows"):
                    change()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(table.export_state()["weight"], before["weight"])


# Rows that are asked for ahead.


def resident_pages(block: torch.Tensor) -> torch.Tensor:
    """Returns which pages of a block are in memory, [pages] bool. Source: mincore(2)."""
    page = os.sysconf("SC_PAGESIZE")
    pages = -(-block.nbytes // page)
    is_there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(block.nbytes)
    assert libc.mincore(address, size, is_there) == 0
    return torch.tensor(list(is_there)) % 2 == 1


def drop_pages(block: torch.Tensor) -> None:
    """Writes the pages of a block to its file, and drops them from memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(block.nbytes)
    assert libc.msync(address, size, 4) == 0  # MS_SYNC
    assert libc.madvise(address, size, 21) == 0  # MADV_PAGEOUT


def test_asking_for_rows_reads_their_pages_and_no_others() -> None:
    with on_ext4() as folder:
        if not folder:
            pytest.skip("/var/tmp is on neither ext4 nor xfs")
        rows = 16 * 256  # 16 rows of 256 bytes in a page
        store = RowStore(64, 12, torch.float32, torch.device("cpu"), folder)
        store.reserve(rows)
        (block,) = store.blocks
        block.copy_(torch.arange(rows)[:, None].expand(rows, 64))
        drop_pages(block)
        if int(resident_pages(block).sum()) > 40:
            pytest.skip("the system keeps the pages in memory")
        before = resident_pages(block)
        store.ask_for(torch.tensor([5, 160, 161, -1, 16 * 200 + 3, 5]))
        wanted = before.clone()
        wanted[[0, 10, 200]] = True
        deadline = time.monotonic() + 60
        while not bool((resident_pages(block) >= wanted).all()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert torch.equal(resident_pages(block), wanted)
        got = store.read(torch.tensor([16 * 255, 7]))  # read after a fault, as well
        assert got[:, 0].tolist() == [16 * 255, 7]


def test_a_page_that_a_row_ends_in_is_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 48 bytes lie across the ends of pages."""
    with on_ext4() as folder:
        if not folder:
            pytest.skip("/var/tmp is on neither ext4 nor xfs")
        store = RowStore(12, 12, torch.float32, torch.device("cpu"), folder)
        store.reserve(1 << 12)
        (block,) = store.blocks
        block.fill_(1)
        drop_pages(block)
        if int(resident_pages(block).sum()):
            pytest.skip("the system keeps the pages in memory")
        row = math.ceil(4096 / 48) - 1
        assert row * 48 < 4096 < (row + 1) * 48
        store.ask_for(ids_of(row))
        deadline = time.monotonic() + 60
        while int(resident_pages(block).sum()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert resident_pages(block).nonzero().flatten().tolist() == [0, 1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RowStore, list[int]]]:
    """The stores and rows of all calls of `ask_for`, in their order."""
    calls: list[tuple[RowStore, list[int]]] = []
    own = RowStore.ask_for

    def ask_for(store: RowStore, rows: torch.Tensor) -> None:
        calls.append((store, sorted(set(rows.tolist()))))
        own(store, rows)

    monkeypatch.setattr(RowStore, "ask_for", ask_for)
    return calls


def test_a_forward_asks_for_the_rows_of_its_batch(asked: list[Any]) -> None:
    table, plain = table_of(), table_of(None)
    group = make_group(plain, table)
    ids, offsets = bags_of([1, 2, 3], [2], [7, 8], [7])
    group(ids, offsets, training=True)
    rows = sorted(table.id_map.lookup(ids_of(7, 8)).tolist())
    assert asked == [(store, rows) for store in table.stores]
    asked.clear()
    group(ids, offsets, training=False)
    assert asked == [(table.weights, rows)]
    asked.clear()
    table.is_frozen = True
    group(ids, offsets, training=True)
    assert asked == [(table.weights, rows)]


def test_rows_of_a_later_batch_are_asked_for_on_another_thread(asked: list[Any]) -> None:
    table = table_of()
    group = make_group(table)
    group(*bags_of([1, 2, 3]), training=True)
    asked.clear()
    group.ask_ahead({0: ids_of(3, 99, 1)}, True)
    assert rows_ahead._asking is not None and rows_ahead._asking._last is not None
    rows_ahead._asking._last.result(10)
    rows = sorted([-1, *table.id_map.lookup(ids_of(1, 3)).tolist()])
    assert [found for _, found in asked] == [rows] * 3
    blocks = [store.blocks[0] for store, _ in asked]
    assert all(one is store.blocks[0] for one, store in zip(blocks, table.stores, strict=True))
    assert table.num_rows == 3


def test_many_rows_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    table = table_of()
    train(table, range(2))
    rows = torch.arange(table.num_rows).flip(0)
    expected = table.weights.read(rows)
    monkeypatch.setattr(knobs, "ROWS_READ_TOGETHER", 7)
    asked.clear()
    assert torch.equal(table.weights.read(rows), expected)
    assert len(asked) == math.ceil(len(rows) / 7)


# A table larger than memory.

ROWS = 500_000

LARGER = """
import sys, torch
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from memory_groups import enter
import torchrec_dyn as dyn
from test_mapped_files import ROWS, sums_of, table_of, train
torch.set_num_threads(1)
enter(Path(sys.argv[4]))
table = table_of(dyn.MappedFiles(sys.argv[1]) if sys.argv[1] else None, columns=64, limit=ROWS)
for first in range(0, ROWS, 25_000):
    table.find_or_insert(torch.arange(first, first + 25_000))
train(table, range(20), ROWS, 3000)
print(sums_of(table))
"""


def sums_of(table: TableShard) -> list[int]:
    """Returns a number that depends on each bit of the rows and states of a table of ROWS rows."""
    sums = []
    for store in table.stores:
        total = 0
        for rows in torch.arange(ROWS).split(8192):
            words = store.read(rows).view(torch.int32).long()
            total += int((words * (2 * rows + 1)[:, None]).sum())
        sums.append(total)
    return sums


@pytest.mark.deep
def test_a_table_of_four_times_the_memory_limit_trains() -> None:
    """500,000 rows of 64 columns under Adam are 366 MiB; the limit is a quarter of them."""
    benchmarks = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, benchmarks)
    try:
        from memory_groups import NoLimitError, limited_group
    finally:
        sys.path.remove(benchmarks)
    here = str(Path(__file__).parent)

    def run(folder: str, limit: int) -> subprocess.CompletedProcess[str]:
        try:
            with limited_group(limit) as group:
                arguments = [LARGER, folder, here, benchmarks, str(group)]
                return subprocess.run(
                    [sys.executable, "-W", "ignore", "-c", *arguments],
                    env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False,
                )  # fmt: skip
        except NoLimitError as error:
            pytest.skip(str(error))

    limit = ROWS * 64 * 3 * 4 // 4
    with on_ext4() as folder:
        if not folder:
            pytest.skip("/var/tmp is on neither ext4 nor xfs")
        limited = run(folder, limit)
        assert limited.returncode == 0, limited.stderr
        assert os.listdir(folder) == []
    assert (
        run("", limit).returncode == -signal.SIGKILL
    )  # the limit is one: rows in memory do not fit
    free = run("", 4 << 30)
    assert free.returncode == 0 and limited.stdout == free.stdout != ""
