"""The benchmarks still run: each with tiny sizes, in this process, into a folder of the test's own."""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import logging
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_stream_shims import cuda_stream_shims
from garbage import keep_what_exists
from shards import deep_but

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
IN_PROCESS = [
    "bench_lookup",
    "bench_id_map",
    "bench_growth",
    "bench_eviction",
    "bench_delta",
    "bench_sweep",
    "bench_serving",
    "bench_follow",
    "bench_host",
    "bench_first",
    "bench_rules",
    "bench_mapped",
    "bench_replicas",
    "bench_gpu",
]
MORE = {
    "bench_lookup": ("--threads", "2"),  # with which the goals are stated
    "bench_gpu": ("--device", "cpu"),
}
STARTS_PROCESSES = [
    *("bench_train", "bench_gpu_train", "bench_checkpoint", "bench_dedup", "bench_scale"),
]

COMPILES = ["bench_serving_cpp"]  # a program with AOTInductor

# Tables of bench_eviction that expire by time have no time until ids expire.
NO_TIME = pytest.mark.filterwarnings("ignore:.*expected set_time:UserWarning")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The folder on the path, and this process as it was afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before, threads = set(sys.modules), torch.get_num_threads()
    keep_what_exists()  # benchmarks collect garbage before each measurement
    yield
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


def run(name: str, folder: Path, *more: str) -> dict:
    options = ["--quick", "--rounds", "2", "--threads", "1", "--results", str(folder), *more]
    importlib.import_module(name).main(options)
    return json.loads((folder / f"{name.removeprefix('bench_')}.json").read_text())


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """Runs a benchmark once for all tests; returns its results, their folder and its output."""

    @functools.cache
    def run_once(name: str) -> tuple[dict, Path, str]:
        folder, shown = tmp_path_factory.mktemp(name), io.StringIO()
        with contextlib.redirect_stdout(shown):
            return run(name, folder, *MORE.get(name, ())), folder, shown.getvalue()

    return run_once


def test_every_benchmark_is_run_somewhere():
    known = {*IN_PROCESS, *STARTS_PROCESSES, *COMPILES}
    assert {path.stem for path in BENCHMARKS.glob("bench_*.py")} == known


def test_all_can_be_imported():
    names = [*IN_PROCESS, *STARTS_PROCESSES, *COMPILES]
    assert [name for name in names if callable(importlib.import_module(name).main)] == names


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", deep_but({*IN_PROCESS} - {"bench_serving"}, IN_PROCESS))
@NO_TIME
def test_runs_and_writes(name, tiny_run):
    written, _, shown = tiny_run(name)
    assert written["rows"]
    assert {"date", "commit", "cpu", "cores", "simd", "huge_pages", "torch", "fbgemm"} <= set(
        written
    )
    assert all(row["ratio"] > 0 for row in written["rows"] if "ratio" in row)
    last = shown.splitlines()[-1]
    counted = [
        row["ratio"] for row in written["rows"] if "ratio" in row and row.get("in_mean", True)
    ]
    assert not counted or f"{statistics.geometric_mean(counted):.3f}" in last


@pytest.mark.deep
@pytest.mark.parametrize("name", COMPILES)
def test_runs_what_compiles(name, tmp_path):
    sides = [{*row["ns_per_request"]} for row in run(name, tmp_path)["rows"]]
    assert sides and all(one == {"C++", "Python", "static int8"} for one in sides)


def test_the_gpu_benchmark_measures_every_side_and_judges_no_cpu(tiny_run, monkeypatch, capsys):
    import axes

    monkeypatch.setattr(axes, "GPU_IDS", (1_000,))  # the size of --quick
    import summary

    written, folder, shown = tiny_run("bench_gpu")
    goals = summary.gpu_goals()
    assert len(goals) == 17
    seen = [summary.seen_of(goal, {"gpu": written["rows"]}) for goal in goals]
    assert None not in seen
    sides = {(row["what"], row.get("against")) for row in written["rows"]}
    for what, others in {
        "forward": ["TBE", "bare gather", "random lines"],
        "update": ["TBE", "TBE, deterministic"],
        "step": ["TBE", "TBE, deterministic"],
        "host": ["TBE"],
    }.items():
        assert {(what, other) for other in others} == {side for side in sides if side[0] == what}
    assert "Nothing here was measured on one." in shown and " met" not in shown
    summary.main(["--results", str(folder)])
    assert "gpu" not in capsys.readouterr().out


def test_the_sides_of_a_gpu_do_the_same_work():
    from axes import gpu_step, raw_ids, tiny
    from gpu_sides import Batches, Sides

    workload = tiny(gpu_step(bag=2))
    sides, batches = Sides(workload, torch.float32, "cpu", True), Batches(workload, "cpu")
    pooled = {name: run(1) for name, run in sides.forwards(batches).items()}
    rows = batches.rows[1].view(workload.tables, workload.batch, workload.bag)
    for t, table in enumerate(sides.dynamic.local_tables().values()):
        assert table.stats()["rows"] == workload.rows
        held, is_known = table.lookup(raw_ids(rows[t]).flatten())
        assert is_known.all()
        mine = pooled["ours"][:, t * workload.dim : (t + 1) * workload.dim]
        torch.testing.assert_close(mine, held.view(*rows[t].shape, -1).sum(1))
    gathered = sides.floors(batches)["bare gather"](1).view(workload.tables, workload.batch, -1)
    torch.testing.assert_close(gathered.transpose(0, 1).flatten(1), pooled["TBE"])
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_gpu_benchmark_leaves_out_what_is_not_there(monkeypatch, capsys):
    import gpu_steps
    from axes import GPU_STEPS, gpu_step

    def no_library(workload, **more):
        raise AttributeError("no such op\nof this library")

    monkeypatch.setattr("gpu_sides.static_tables", no_library)
    monkeypatch.setattr(gpu_steps, "GPU_STEPS", GPU_STEPS[:1])
    monkeypatch.setattr(gpu_steps, "GPU_HALF", ())
    arguments = SimpleNamespace(device="cpu", quick=True, rounds=1, clock="wall")
    rows = [*gpu_steps.steps(arguments), *gpu_steps.host_times(arguments)]
    assert capsys.readouterr().out.count("TBE is left out: no such op\n") == 2
    against = {"bare gather", "random lines", None}
    assert {row.get("against") for row in rows} == against
    assert {row["what"] for row in rows} == {"bytes a row", "forward", "update", "step", "host"}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (50 * 10**9, 139 * 10**9))
    most = gpu_step(rows=100_000_000)
    assert gpu_steps.lacks_memory(most, torch.float32, "cuda")
    assert not gpu_steps.lacks_memory(most, torch.float16, "cuda")
    assert capsys.readouterr().out.startswith(f"{most.name} is left out: it needs ")


@pytest.mark.deep
def test_checkpoints_are_measured_on_two_ranks(tmp_path):
    more = ["--world", "2", "--folder", str(tmp_path), "--only", "speed"]
    rows = run("bench_checkpoint", tmp_path, *more)["rows"]
    kinds = ("save, synced", "save, not synced", "load, warm", "load, cold")
    sides = {(what, against) for what in kinds for against in ("static", "torch.save")}
    assert {(row["what"], row["against"]) for row in rows} == sides
    for row in rows:
        assert row["ranks"] == 2 and row["ratio"] > 0
        assert set(row["gb_per_second"]) == {"dynamic", "static", "torch.save"}
        assert set(row["ns_per_step"]) == set(row["gb_per_second"])  # ab_ratios.py reads it
        parts = {"state_dict", "dcp.load", "load_state_dict"}
        parts = parts if "load" in row["what"] else {"state_dict", "dcp.save"}
        assert set(row["seconds"]["dynamic"]) == parts


@pytest.mark.deep
def test_ids_sent_once_are_measured_on_two_ranks(tmp_path):
    rows = run("bench_dedup", tmp_path, "--only", "zipf-1.05-lfu", "uniform")["rows"]
    assert [row["workload"] for row in rows] == ["zipf-1.05-lfu", "uniform"]
    for row in rows:
        assert row["ranks"] == 2 and row["ratio"] > 0 and 0 < row["distinct"] < 1
        assert 0 < row["mb_sent"]["once"] < row["mb_sent"]["each"]


@pytest.mark.deep
def test_the_set_up_of_a_rank_and_planning_are_measured(tmp_path):
    case, planning = run("bench_scale", tmp_path)["rows"]
    assert (case["ranks"], case["tables"]) == (16, 10) and case["cpu_s"] > 0 < case["peak_mb"]
    assert planning["workload"] == "planning" and planning["ratio"] > 0


@pytest.mark.deep
def test_peak_memory_of_checkpoints_is_measured_as_the_summary_asks(tmp_path):
    import summary

    more = ["--world", "1", "--folder", str(tmp_path), "--only", "memory"]
    rows = run("bench_checkpoint", tmp_path, *more)["rows"]
    goals = [goal for goal in summary._checkpoint_goals() if goal.number == "extra_mb"]
    assert goals
    assert [goal for goal in goals if summary.seen_of(goal, {"checkpoint": rows}) is None] == []
    grown = {row["what"]: row["mb"]["peak"] - row["mb"]["before"] for row in rows}
    assert grown["peak of torch.save"] < 12
    # All 30 MB once more, less what the process had free from before.
    assert grown["peak of async_save, a copy"] > 12
    assert grown["peak of load into an empty table"] > 12
    assert all(row["ranks"] == 1 and row["bytes"] == 30_000_000 for row in rows)


def test_the_floors_of_life_touch_the_word_or_bit_of_each_occurrence():
    from axes import full_table, raw_ids, tiny
    from floor import BitFloor, WordFloor
    from full_tables import LEAST_RECENT, Stepped

    full = Stepped(tiny(full_table(1000, 0.0)), LEAST_RECENT, 1000).fill(500)
    ids = raw_ids(torch.randint(500, (200,)))
    each = torch.arange(1000)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        floor, bits = WordFloor(full.table, [ids]), BitFloor(full.table, [ids])
        seen, counts = full.table.life.scores.read(each)
        floor(0, by=1)
        times = torch.bincount(full.table.id_map.lookup(ids), minlength=1000)
        now = full.table.life.scores.read(each)
        assert torch.equal(now[0], seen) and torch.equal(now[1], counts + times)
        bits(0)
        is_set = (bits.bits[each // 8] >> (each % 8)) & 1
        assert torch.equal(is_set.bool(), times > 0)


@pytest.mark.parametrize("pooled", [True, False])
def test_floors_touch_the_rows_that_the_tables_give(pooled):
    from axes import POOLED, SEQUENCE, ranks, raw_ids, tiny
    from contestants import dynamic_tables, output_grad
    from floor import Floor

    workload = tiny((POOLED if pooled else SEQUENCE)[0])
    group = dynamic_tables(workload)
    batches = [raw_ids(batch) for batch in ranks(workload, 2, seed=0)]
    floor = Floor(group.tables, batches, workload.bag if pooled else None)
    for turn, ids in enumerate(batches):
        tables = zip(group.tables, ids.chunk(workload.tables), strict=True)
        tables = list(tables)
        rows = torch.cat([table.lookup(part)[0] for table, part in tables])
        numbers = torch.cat([table.find_or_insert(part) for table, part in tables])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(floor.copy(turn), rows)
            assert floor.read(turn) == rows.view(torch.int64).sum().item() % 2**64
            assert torch.equal(floor.probe(turn), numbers)
    grad, each = output_grad(workload), torch.arange(workload.rows)
    before = [table.weights.read(each) for table in group.tables]
    floor.update(0, grad)  # with a rate of 0
    for table, weights in zip(group.tables, before, strict=True):
        assert torch.equal(table.weights.read(each), weights)
    floor.update(0, grad, 0.5)
    bag = workload.bag if pooled else 1
    grads = grad.split(workload.dim, 1) if pooled else grad.chunk(workload.tables)
    for t, ids in enumerate(batches[0].chunk(workload.tables)):
        table, expected = group.tables[t], before[t]
        rows = table.find_or_insert(ids)
        expected.index_add_(0, rows, grads[t].repeat_interleave(bag, 0), alpha=-0.5)
        assert torch.allclose(table.weights.read(each), expected)
        states = table.states[0].read(each).flatten()
        assert torch.equal(
            states, torch.zeros(len(each)).index_add_(0, rows, torch.full(rows.shape, 0.5))
        )


def test_the_floor_of_an_insertion_writes_every_byte():
    from floor import compiled, write_fresh

    floors = compiled()
    memory = torch.zeros(1003, dtype=torch.uint8)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        write_fresh(floors, memory.zero_())
        assert memory.all()


def test_growth_counts_every_tensor_beside_the_rows():
    from bench_growth import bytes_beside
    from contestants import empty_table

    table = empty_table("table", 1000, 8)
    table.find_or_insert(torch.arange(100))
    slots = table.stats()["slots"] * 16
    assert slots <= bytes_beside(table) < slots + 4096
    table.extra = {"kept": [torch.zeros(1000, dtype=torch.int64)]}
    assert bytes_beside(table) >= slots + 8000


def test_static_tables_learn_on_pages_that_we_gave_them():
    from axes import POOLED, offsets, ranks, tiny
    from contestants import output_grad, static_tables

    workload = tiny(POOLED[0])
    (rows,) = ranks(workload, 1, seed=0)
    tables = static_tables(workload, huge_pages=True)
    before = [weights.clone() for weights in tables.split_embedding_weights()]
    output = tables(rows, offsets(workload))
    assert torch.equal(output[0, : workload.dim], before[0][rows[: workload.bag]].sum(0))
    output.backward(output_grad(workload))
    for was, weights in zip(before, tables.split_embedding_weights(), strict=True):
        assert not torch.equal(was, weights)


def test_summary_names_goals_that_the_benchmarks_measure(tiny_run, capsys):
    import summary

    _, folder, _ = tiny_run("bench_lookup")
    summary.main(["--results", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    lookup = [line for line in lines if line.startswith("lookup: ") and " threads " in line]
    assert len(lookup) > 20
    not_run = [line for line in lookup if line.endswith("not run")]
    assert all("1 threads" in line for line in not_run), not_run
    rows = json.loads((folder / "lookup.json").read_text())["rows"]
    where = {"workload": "pooled-uniform", "threads": 2, "what": "step", "against": "static"}
    seen = next(row["ratio"] for row in rows if where.items() <= row.items())
    assert lines[-1].startswith(f"README.md: whole step, 2 threads, uniform ids: {seen:.2f}; ")


def test_summary_names_what_the_growth_benchmark_measures(tiny_run):
    import summary

    measured = {(row["what"], row.get("against")) for row in tiny_run("bench_growth")[0]["rows"]}
    goals = [goal.where for goal in summary._growth_goals() if goal.number == "ratio"]
    assert len(goals) == 6
    assert {(goal["what"], goal["against"]) for goal in goals} <= measured


@NO_TIME
def test_summary_names_what_the_eviction_benchmark_measures(tiny_run, monkeypatch):
    import axes

    monkeypatch.setattr(axes, "EVICTION_ROWS", (6_000,))  # the size of --quick
    import summary

    written = tiny_run("bench_eviction")[0]["rows"]
    goals = summary._eviction_goals()
    assert len(goals) == 12
    assert [goal for goal in goals if summary.seen_of(goal, {"eviction": written}) is None] == []


def test_summary_names_what_the_host_benchmark_measures(tiny_run):
    import summary

    written = tiny_run("bench_host")[0]["rows"]
    goals = summary._host_goals()
    assert len(goals) == 13
    assert [goal for goal in goals if summary.seen_of(goal, {"host": written}) is None] == []


@pytest.mark.parametrize("number", range(4))
def test_streams_of_a_full_table_bring_what_they_promise(number):
    from axes import full_table, ranks, raw_ids, tiny
    from full_tables import FREED, Stepped, cases

    case = cases(2000)[number]
    workload = dataclasses.replace(tiny(full_table(2000, 0.0)), tables=1, rows=1000)
    full = Stepped(workload, case, 2000).fill(workload.rows)
    known = [raw_ids(batch) for batch in ranks(workload, 4, seed=0)]
    a_step, evictions = full.new_ids_a_step(workload.batch), 0
    for step, new in enumerate(full.with_new(known, 30, workload.bag)):
        before = full.table.stats()
        full.step(new)
        full.step(known[step % 4])
        after = full.table.stats()
        assert after["inserted"] - before["inserted"] == a_step
        assert after["unseen"] - before["unseen"] == workload.batch
        evicted = after["evicted_full"] - before["evicted_full"]
        assert evicted in (0, max(a_step, 2000 // FREED))
        evictions += evicted > 0
    assert evictions >= 4


@pytest.mark.deep
def test_training_is_measured_as_the_summary_asks(tmp_path):
    import summary

    name = "train-sequence-zipf1.05"
    rows = run("bench_train", tmp_path, "--full", "--world", "1", "--only", name)["rows"]
    goals = [goal for goal in summary._train_goals() if summary.seen_of(goal, {"train": rows})]
    assert [goal.where["workload"] for goal in goals] == [name]
    (row,) = rows
    assert row["ratio"] > 0
    assert {*row["ns_per_step"]} == {"dynamic", "static", "floor"}


def test_training_on_gpus_is_measured_as_the_summary_asks(tmp_path, monkeypatch, caplog, capsys):
    """On the CPU, whose numbers it judges by no goal; pipelines of CUDA with the shims of the tests."""
    import summary

    for name in ("torchrec", "torch.fx"):  # the benchmark changes their levels
        caplog.set_level(logging.ERROR, logger=name)
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    names = ["gpu-train-10hot-uniform", "gpu-train-sequence-zipf1.05"]
    more = ["--device", "cpu", "--pipelines", "sparse_dist", "prefetch", "--only", *names]
    with cuda_stream_shims():
        rows = run("bench_gpu_train", tmp_path, *more)["rows"]
    goals = [goal for goal in summary.gpu_train_goals() if goal.where["workload"] in names]
    assert len(goals) == 3 + 1 + 3
    assert None not in [summary.seen_of(goal, {"gpu_train": rows}) for goal in goals]
    sides = {(row["side"], row["against"], row["pipeline"]) for row in rows}
    assert len(sides) == 5 and len(rows) == 5 + 4
    for row in rows:
        assert set(row["ns_per_step"]) == {row["side"], row["against"], "floor"}
    shown = capsys.readouterr().out
    assert "Nothing here was measured on one." in shown and " met" not in shown
    summary.main(["--results", str(tmp_path)])
    assert "gpu" not in capsys.readouterr().out


def test_training_on_gpus_names_the_gpus_that_are_missing(monkeypatch):
    import bench_gpu_train

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="expected a GPU for each of 2 ranks, got 1"):
        bench_gpu_train.main(["--world", "2"])


@pytest.mark.parametrize("pooled", [True, False])
def test_lookups_of_the_floor_have_the_shapes_of_real_ones_and_end_backward(pooled):
    from free_lookups import make_lookups_free
    from torchrec import KeyedJaggedTensor, PoolingType

    config = SimpleNamespace(
        pooling=PoolingType.SUM if pooled else PoolingType.NONE,
        embedding_dims=lambda: [4, 2] if pooled else [4, 4],
    )
    lookup = SimpleNamespace(_emb_modules=[SimpleNamespace(config=config)])
    make_lookups_free(SimpleNamespace(_lookups=[lookup]), 0.5)
    kernel = lookup._emb_modules[0]
    for lengths in ([2, 0, 1, 1], [3, 3, 3, 3], [1, 0, 0, 0]):
        features = KeyedJaggedTensor(
            ["a", "b"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths)
        )
        output = kernel(features)
        assert output.shape == ((2, 6) if pooled else (sum(lengths), 4))
        assert (output == 0.5).all() and output.is_contiguous()
        (output * output).sum().backward()


def test_share_above_the_floor_is_taken_round_by_round():
    from axes import TRAIN
    from bench_train import above_floor, families

    seconds = {"dynamic": [3.0, 6.0, 4.0], "static": [5.0, 8.0, 6.0], "floor": [1.0, 4.0, 2.0]}
    assert above_floor(seconds, "dynamic", "static") == (0.5, 0.5, 0.5)
    found = families(TRAIN)
    assert [len(of_tables) for of_tables in found] == [2, 2, 2]
    assert all(one.tables == of_tables[0].tables for of_tables in found for one in of_tables)


def test_summary_reads_both_bounds_and_both_forms():
    from summary import Goal, seen_of

    rows = [{"what": "step", "ratio": [2.0, 1.0, 3.0]}, {"what": "bytes", "bytes": 39.0}]
    faster = Goal("train", {"what": "step"}, at_least=1.3)
    assert seen_of(faster, {"train": rows}) == (2.0, 1.0, 3.0)
    assert faster.met(1.3) and not faster.met(1.2)
    bytes_goal = Goal("train", {"what": "bytes"}, at_most=40.0, number="bytes")
    assert seen_of(bytes_goal, {"train": rows}) == (39.0, 39.0, 39.0)
    assert bytes_goal.met(40.0) and not bytes_goal.met(40.1)
    assert seen_of(bytes_goal, {}) is None


def test_compare_says_which_is_faster(tmp_path, capsys):
    import ab_ratios

    for side, ns in (("base", 30.0), ("checkout", 20.0)):
        for turn in ("1", "2"):
            folder = tmp_path / side / turn
            folder.mkdir(parents=True)
            row = {"workload": "w", "what": "step", "ns_per_id": {"dynamic": {"median_ns": ns}}}
            (folder / "lookup.json").write_text(json.dumps({"rows": [row]}))
    ab_ratios.main([str(tmp_path / "base"), str(tmp_path / "checkout")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith("1.50x [1.50, 1.50]") and lines[-1].endswith("1.500")


def test_measure_gives_everyone_the_same_rounds():
    from interleaved import measure

    order: list[tuple[str, int]] = []
    sides = {name: lambda turn, name=name: order.append((name, turn)) for name in "abc"}
    seconds = measure(sides, rounds=3, warm_up=1)
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 3)
    assert [name for name, _ in order] == [*"abc", *"bca", *"cab", *"abc"]
    assert [turn for _, turn in order] == [turn for turn in range(4) for _ in range(3)]


def test_plot_draws_what_the_sweep_measured(tiny_run, tmp_path):
    import plot

    _, folder, _ = tiny_run("bench_sweep")
    picture = tmp_path / "picture.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit, match="expected matplotlib"):
            plot.main(["--results", str(folder), "--picture", str(picture)])
        return
    plot.main(["--results", str(folder), "--picture", str(picture)])
    assert 10_000 < picture.stat().st_size < 150_000


def test_plot_without_a_sweep_says_how_to_get_one(tmp_path):
    import plot

    with pytest.raises(SystemExit, match=r"bench_sweep\.py"):
        plot.main(["--results", str(tmp_path)])
