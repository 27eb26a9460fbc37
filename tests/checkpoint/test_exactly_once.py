"""A run that is killed and started again ends as one that was not, with its dense part and its pipeline."""

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import contents, quietly
from forked import run_ranks
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, Positions, checkpoints

STEPS, SAVED = 14, 3
FEATURES = ["user", "item"]
DYNAMIC = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(2), eviction=dyn.LeastFrequentlyUsed(half_life_steps=5)
)


class Net(nn.Module):
    """A tower over two dynamic tables."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=60, feature_names=[name])
            for name in FEATURES
        ]
        self.sparse = dyn.DynamicEmbeddingBagCollection(
            tables, dynamic=DYNAMIC, fused_params={"optimizer": "ADAM", "learning_rate": 0.02}
        )
        self.over = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.over(self.sparse(batch).values()).squeeze(1)
        return (outputs - 1).square().mean(), outputs.detach()


class Source:
    """Yields the same batches each time, those of its rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(100 * step + self.rank)
            ids = torch.randint(20 + 4 * step, (16,), generator=draw)
            yield KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones(16, dtype=torch.int64))


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    sharders: Any = [dyn.DynamicEmbeddingBagCollectionSharder()]
    model: Any = DistributedModelParallel(Net(), sharders=sharders, device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def killed_at(place: str, number: int) -> contextlib.AbstractContextManager[Any]:
    """Kills this process at the n-th arrival at a place of a save."""
    left = [number]

    def before(function: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return called

    patch = pytest.MonkeyPatch()
    patch.setattr(checkpoints, place, before(getattr(checkpoints, place)))
    return contextlib.closing(_Undone(patch))


class _Undone:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.close = patch.undo


def train(folder: str, kills: list[tuple[str, int] | None]) -> None:
    """Restores if there is something, trains to the end and saves; the place of a kill ends a rank before."""
    dist.init_process_group("gloo")
    rank, kill = dist.get_rank(), kills[dist.get_rank()]
    model, optimizer = made()
    kept = Checkpoints(f"{folder}/kept", keep=2, full_every=3)
    positions = Positions(Source(rank))
    with killed_at(*kill) if kill else contextlib.nullcontext():
        quietly(kept.restore, model, optimizer, extra={"position": positions})
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        batches = iter(positions)
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
                positions.step()
                if positions.batches % SAVED == 0:
                    quietly(
                        kept.save,
                        model,
                        optimizer,
                        step=positions.batches,
                        extra={"position": positions},
                    )
    assert positions.batches == STEPS
    end = Checkpoints(f"{folder}/end")
    quietly(end.save, model, optimizer, step=STEPS)


def ended(folder: Path, kills: list[tuple[str, int] | None]) -> list[int]:
    """Runs a job of two ranks with these places of death; returns the exit codes."""
    done = run_ranks(train, str(folder), kills, ranks=2)
    assert -signal.SIGKILL in done.codes or done.codes == [0, 0], done.stderr
    return done.codes


def contents_at_end(folder: Path) -> dict[str, torch.Tensor]:
    return contents(folder / "end" / "full-00000001" / "state")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The end of a run without a kill."""
    folder = tmp_path_factory.mktemp("whole")
    assert ended(folder, [None, None]) == [0, 0]
    return contents_at_end(folder)


PLACES = ["export_delta", "save_files", "write_values", "_publish", "apply_delta", "commit"]


def check(
    folder: Path, kills: list[tuple[str, int] | None], expected: dict[str, torch.Tensor]
) -> None:
    assert -signal.SIGKILL in ended(folder, kills)
    assert ended(folder, [None, None]) == [0, 0]
    found = contents_at_end(folder)
    assert found.keys() == expected.keys()
    differs = [name for name, one in found.items() if not torch.equal(one, expected[name])]
    assert not differs


@pytest.mark.parametrize(
    ("rank", "place", "number"),
    [(1, "export_delta", 2), (0, "_publish", 3), (0, "commit", 9)],
)
def test_a_killed_run_ends_as_one_that_was_not(
    rank: int, place: str, number: int, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Saves are full, delta, delta, full, at batches 3, 6, 9 and 12, while the pipeline has read two more."""
    kills: list[tuple[str, int] | None] = [None, None]
    kills[rank] = (place, number)
    check(tmp_path, kills, expected)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100))
def test_any_place_of_a_save(seed: int, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    draw = random.Random(seed)
    kills: list[tuple[str, int] | None] = [None, None]
    place = draw.choice(PLACES[:4] + PLACES[5:])
    rank = 0 if place in ("_publish", "commit") else draw.randrange(2)
    kills[rank] = (place, draw.randint(1, 2 if place == "export_delta" else 4))
    check(tmp_path, kills, expected)
