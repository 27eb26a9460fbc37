"""`Checkpoints` of several ranks in S3: other numbers of ranks, requests and bytes, and the tools."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import Setup, optimizer_of, quietly, tables_of
from checkpoint_jobs import Job
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from object_store import S3
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import collection_of, shard

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.__main__ import main
from torchrec_dyn.checkpoint import (
    Checkpoints,
    LoadPlanner,
    TableWriter,
    apply_delta,
    export_delta,
    mark,
)
from torchrec_dyn.checkpoint_format import place_of
from torchrec_dyn.ranks import owners

ROWS, DIM = 24_000, 64


def model_of(world: int) -> Any:
    plan = shard_by_hand("row_wise", [(list(range(world)), 0, DIM)], 8 * ROWS)
    case = Case([Table("t", ["f"], plan, DIM, rows=8 * ROWS)], fused_params=FUSED)
    return shard(case, collection_of(case))


FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, None] * 10 + torch.arange(DIM) / 16).float()


def save_rows(environment: dict[str, str], url: str) -> None:
    os.environ.update(environment)
    model = model_of(dist.get_world_size())
    mine = torch.arange(ROWS)[dist.get_rank() :: dist.get_world_size()]
    dyn.assign_rows(model.module.collection, "t", mine, rows_of(mine))
    checkpoints = Checkpoints(url)
    quietly(checkpoints.save, model, optimizer_of(model), step=1)
    checkpoints.close()


def restore_rows(environment: dict[str, str], url: str) -> int:
    """Returns the number of rows of this rank, which are right."""
    os.environ.update(environment)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = model_of(world)
    assert quietly(Checkpoints(url).restore, model, optimizer_of(model)).step == 1
    ids = torch.arange(ROWS)
    mine = ids[owners(ids, world) == rank]
    rows, found = model.module.collection.table("t").lookup(mine)
    assert bool(found.all()) and torch.equal(rows, rows_of(mine))
    return len(mine)


def sizes(url: str) -> int:
    return sum(
        size
        for place in place_of(url).iterdir()
        for size in place.listing().values()
        if size is not None
    )


@pytest.mark.parametrize(("before", "after"), [(2, 3)])
def test_a_restart_on_other_ranks_reads_each_row_once(s3: S3, before: int, after: int) -> None:
    url = f"{s3.new_bucket()}/run"
    workers.run(save_rows, s3.environment, url, world_size=before)
    (entry,) = Checkpoints(url).entries()
    size = sizes(str(entry.path))
    assert size > 4 * DIM * ROWS
    with s3.counted() as traffic:
        held = workers.run(restore_rows, s3.environment, url, world_size=after)
    assert sum(held) == ROWS
    # Each rank reads windows around its rows: of the ids some to find them, of long rows no others.
    assert size < traffic.got < 1.3 * size
    # A rank that has no rows of the store's beginning does not read through them.
    assert traffic.requests["GET"] < 200


@pytest.mark.parametrize("tables", [1, 3])
def test_requests_and_bytes(tables: int, s3: S3, tmp_path: Path) -> None:
    """The numbers of docs/guide/save/stores.md, for one rank: none depends on the number of tables."""
    url = f"{s3.new_bucket()}/run"
    setup = Setup(0, tables=tables, optimizer="ADAM")
    job = Job(url, setup, keep=9, full_every=9)
    job.save()
    for entries in (1, 2):
        with s3.counted() as traffic:
            entry = job.save()
        assert traffic.requests == {
            "LIST": 8, "HEAD": 11 + entries, "GET": 2 + entries, "POST": 4, "PUT": 6
        }  # fmt: skip
        written = sizes(str(entry.path)) + len(entry.commit.read_bytes())
        assert written <= traffic.put < written + 1000
    with s3.counted() as traffic:
        Job(url, setup).restore()
    line, entries = 3, 3
    assert sum(traffic.requests.values()) == 22 + 7 * line + 2 * entries
    whole = sum(sizes(str(entry.path)) for entry in job.checkpoints.entries())
    assert traffic.got < 2.5 * whole  # the dense part twice, and each index
    follower = serving.Follower(url, tmp_path / "served")
    for _ in range(2):
        follower.poll()
    with s3.counted() as traffic:
        assert follower.poll() is None
    assert sum(traffic.requests.values()) <= 4


def test_tools_take_urls(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{s3.new_bucket()}/run"
    job = Job(url, keep=9, full_every=2)
    full, delta = job.save(), job.save()
    assert main(["follow", url, "--to", str(tmp_path / "served"), "--once"]) == 0
    serving.verify(tmp_path / "served")
    serving.build(full.tables, tmp_path / "built")
    assert main(["inspect", str(full.tables), "--verify"]) == 0
    assert "everything read and checked: no damage" in capsys.readouterr().out
    for part in (full.tables, full.dense, delta.tables):
        assert main(["verify", str(part)]) == 0
        assert f"{part}: " in capsys.readouterr().out
    assert main(["diff", url, url]) == 0
    assert main(["export", url, "--to", str(tmp_path / "rows.parquet")]) == 0
    assert (tmp_path / "rows.parquet").stat().st_size
    assert main(["verify", f"{url}/nothing"]) == 1
    assert "expected a checkpoint of torch.distributed.checkpoint" in capsys.readouterr().err


def test_deltas_and_state_dicts_at_urls(s3: S3) -> None:
    url = s3.new_bucket()
    job, other = Job(f"{url}/run"), Job(f"{url}/other")
    job.save()
    other.checkpoints.path = job.checkpoints.path
    other.restore()
    marker = mark(job.model)
    job.train()
    export_delta(job.model, f"{url}/delta", marker)
    with pytest.raises(ValueError, match=r"expected a new directory, got s3://.*, which is taken"):
        export_delta(job.model, f"{url}/delta", marker)
    apply_delta(other.model, f"{url}/delta")
    one, two = (tables_of(model)[0].export_state() for model in (job.model, other.model))
    assert torch.equal(one["weight"], two["weight"]) and torch.equal(one["ids"], two["ids"])
    state = {"model": job.model.state_dict()}
    dcp.save(state, storage_writer=TableWriter(f"{url}/dcp"))
    loaded = {"model": other.model.state_dict()}
    for path in (None, f"{url}/dcp"):
        dcp.load(loaded, checkpoint_id=f"{url}/dcp", planner=LoadPlanner(path=path))
        other.model.load_state_dict(loaded["model"])
