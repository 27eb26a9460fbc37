"""A run that is killed and started again ends as one that was not, with its dense part and its pipeline."""

import contextlib
import importlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import contents, quietly
from forked import forkserver, run_ranks
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints, Positions
from torchrec_dyn.checkpoint_format import read_chain

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
STEPS, SAVED = 14, 3
FEATURES = ["user", "item"]
TABLES = [
    EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=60, feature_names=[name])
    for name in FEATURES
]
DYNAMIC = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(2), eviction=dyn.LeastFrequentlyUsed(half_life_steps=5)
)


class Net(nn.Module):
    """A tower over two dynamic tables."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = dyn.DynamicEmbeddingBagCollection(
            TABLES, dynamic=DYNAMIC, fused_params={"optimizer": "ADAM", "learning_rate": 0.02}
        )
        self.over = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.over(self.sparse(batch).values()).squeeze(1)
        return (outputs - 1).square().mean(), outputs.detach()


class Source:
    """Yields the same batches each time, those of its rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> KeyedJaggedTensor:
        if step >= STEPS:
            raise IndexError(step)
        draw = torch.Generator().manual_seed(100 * step + self.rank)
        ids = torch.randint(20 + 4 * step, (16,), generator=draw)
        return KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones(16, dtype=torch.int64))


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    sharders: Any = [dyn.DynamicEmbeddingBagCollectionSharder()]
    model: Any = DistributedModelParallel(Net(), sharders=sharders, device=torch.device("cpu"))
    return model, optimizer_of(model, "", model.fused_optimizer)


def optimizer_of(model: nn.Module, prefix: str, fused: Any) -> CombinedOptimizer:
    of_model = in_backward_optimizer_filter(model.named_parameters())
    dense = KeyedOptimizerWrapper(
        {name: parameter for name, parameter in of_model if not parameter.is_meta},
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    return CombinedOptimizer([(prefix, fused), ("", dense)])


@dataclass(frozen=True)
class Death:
    """Where a rank is killed.

    Attributes:
        place: name of a function of a file of `checkpoint`, e.g. "entry_writing.commit_entry"; "": any place.
        number: the n-th call of the function; of any place, the number of trained batches before it.
        delay: of any place, seconds after that batch.
    """

    place: str
    number: int
    delay: float = 0.0


@contextlib.contextmanager
def killed_at(death: Death | None, positions: Positions) -> Iterator[None]:
    """Kills this process at a place."""
    if death is None:
        yield
        return
    if not death.place:
        killer = threading.Thread(target=kill_after, args=(death, positions), daemon=True)
        killer.start()
        yield
        killer.join()  # a slow killer does not come too late
        return
    file, _, name = death.place.partition(".")
    module, left = importlib.import_module(f"torchrec_dyn.checkpoint.{file}"), [death.number]
    function = getattr(module, name)

    def called(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, called)
        yield


def kill_after(death: Death, positions: Positions) -> None:
    while positions.batches < death.number:
        time.sleep(0.001)
    time.sleep(death.delay)
    os.kill(os.getpid(), signal.SIGKILL)


Deaths = list[Death | None]


Store = tuple[str, dict[str, str]]  # a URL for the checkpoints, and the environment of its driver


def train(
    folder: str, deaths: Deaths, method: str, workers: int, store: Store | None = None
) -> None:
    """Restores if there is something, trains to the end and saves; a death ends a rank before."""
    url, environment = store or (f"{folder}/kept", {})
    os.environ.update(environment)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = made()
    kept = Checkpoints(url, keep=2, full_every=3)
    source: Any = Source(rank)
    if workers:
        alike = {"batch_size": None, "multiprocessing_context": "fork"}  # others import torch anew
        source = StatefulDataLoader(source, num_workers=workers, **alike)
    positions = Positions(source)
    with killed_at(deaths[rank], positions):
        quietly(kept.restore, model, optimizer, extra={"position": positions})
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        batches = iter(positions)
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
                positions.step()
                if positions.batches % SAVED == 0:
                    quietly(
                        getattr(kept, method),
                        model,
                        optimizer,
                        step=positions.batches,
                        extra={"position": positions},
                    )
        kept.close()  # the last save may still be written, in the background
    assert positions.batches == STEPS
    quietly(Checkpoints(f"{folder}/end").save, model, optimizer, step=STEPS)


def ended(
    folder: Path,
    deaths: Deaths,
    method: str = "save",
    workers: int = 0,
    store: Store | None = None,
) -> list[int]:
    """Runs a job of two ranks with these deaths; returns the exit codes."""
    done = run_ranks(train, str(folder), deaths, method, workers, store, ranks=2)
    assert -signal.SIGKILL in done.codes or done.codes == [0, 0], done.stderr
    return done.codes


def all_contents(folder: Path, store: Store | None = None) -> dict[str, Any]:
    """Returns everything that a run has saved: its end, and its entries with the contents of deltas."""
    entries = read_chain(folder / "kept" if store is None else store[0]).entries
    kinds = {f"kind at {entry.step}": entry.kind for entry in entries}
    sums = {f"sums at {entry.step}": entry.sums for entry in entries}
    saved = {"end": contents(folder / "end" / "full-00000001" / "state")}
    for entry in entries:
        for part in {entry.tables, entry.dense}:
            saved[f"{part.name} at {entry.step}"] = contents(part)
    tensors = {f"{at}: {name}": one for at, all in saved.items() for name, one in all.items()}
    return {**kinds, **sums, **tensors}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The saves of a run without a kill: full, delta, delta, full, at batches 3, 6, 9 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    assert ended(folder, [None, None]) == [0, 0]
    found = all_contents(folder)
    assert [found[f"kind at {3 * save}"] for save in (1, 2, 3, 4)] == [
        "full",
        "delta",
        "delta",
        "full",
    ]
    return found


def check(
    folder: Path,
    deaths: Deaths,
    expected: dict[str, Any],
    method: str = "save",
    workers: int = 0,
    store: Store | None = None,
) -> None:
    assert -signal.SIGKILL in ended(folder, deaths, method, workers, store)
    assert ended(folder, [None, None], method, workers, store) == [0, 0]
    found = all_contents(folder, store)
    assert found.keys() == expected.keys()
    differs = [
        name
        for name, one in found.items()
        if not (torch.equal(one, expected[name]) if torch.is_tensor(one) else one == expected[name])
    ]
    assert not differs


@pytest.mark.parametrize(
    ("deaths", "method", "workers"),
    [
        ([None, Death("checkpoints.changes_since", 2)], "save", 0),
        ([Death("entry_writing.commit_entry", 3), None], "async_save", 2),
    ],
    ids=["one rank", "in the background, with two loader workers"],
)
def test_a_killed_run_ends_as_one_that_was_not(
    deaths: Deaths, method: str, workers: int, tmp_path: Path, expected: dict[str, Any]
) -> None:
    """While the pipeline has read two batches more, and the workers of a loader some beyond these."""
    check(tmp_path, deaths, expected, method, workers)


def test_a_run_killed_while_it_sends_files_to_s3(
    s3: Any, tmp_path: Path, expected: dict[str, Any]
) -> None:
    store = f"{s3.new_bucket()}/kept", s3.environment
    check(tmp_path, [None, Death("dcp_files.open_writer", 4)], expected, "async_save", store=store)


PLACES = (
    *("checkpoints.changes_since", "entry_writing.split_state", "entry_writing.save_part"),
    *("entry_writing.write_values", "dcp_files.open_writer"),
    *("entry_writing.commit_entry", "entry_writing.outdated", "entry_writing.remove_folders"),
)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(130))
def test_any_place_of_a_save(
    seed: int, tmp_path: Path, expected: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Of one rank or of both: half of them in a function of a save, half at any time."""
    draw = random.Random(seed)
    deaths: Deaths = [None, None]
    place = draw.choice(PLACES) if seed % 2 else ""
    number = draw.randint(1, 2 if place == "checkpoints.changes_since" else 4)
    for rank in range(2) if draw.random() < 0.4 else [draw.randrange(2)]:
        deaths[rank] = (
            Death(place, number) if place else Death("", draw.randint(0, 12), draw.random() / 10)
        )
    if place in PLACES[-3:] and deaths[0] is None:
        deaths.reverse()  # rank 0 alone does this
    method, workers, store = draw.choice(["save", "async_save"]), draw.choice([0, 0, 0, 2]), None
    if seed >= 100:
        s3 = request.getfixturevalue("s3")
        store = f"{s3.new_bucket()}/kept", s3.environment
    check(tmp_path, deaths, expected, method, workers, store)


def follow(folder: Path) -> None:
    for followed in serving.follow(folder / "kept", folder / "served", every=0.05):
        with open(folder / "steps", "a") as steps:
            steps.write(f"{followed.entry.step}\n")


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(6))
def test_what_is_served_of_killed_runs(seed: int, tmp_path: Path) -> None:
    """Runs and their follower are killed at any time: it never goes back, and ends with the last save."""
    draw = random.Random(seed)
    for number in range(4):
        follower = forkserver().Process(target=follow, args=(tmp_path,), daemon=True)
        follower.start()
        deaths: Deaths = [None, None]
        if number < 3:
            deaths[draw.randrange(2)] = Death(
                "", 4 * number + draw.randrange(4), draw.random() / 10
            )
        ended(tmp_path, deaths, draw.choice(["save", "async_save"]))
        follower.kill()
        follower.join()
    steps = (tmp_path / "steps").read_text().split()
    assert len(steps) > 1 and steps == sorted(steps, key=int)
    serving.Follower(tmp_path / "kept", tmp_path / "served").poll()
    net, served = Net(), serving.ServingEmbeddingBagCollection(tmp_path / "served", TABLES)
    optimizer = optimizer_of(net, "sparse", net.sparse.fused_optimizer)
    restored = quietly(
        Checkpoints(tmp_path / "kept").restore, net, optimizer, leave_out=["position"]
    )
    assert restored.step == 12
    ids = torch.arange(80)
    features = KeyedJaggedTensor(
        FEATURES, ids.repeat(2), lengths=torch.ones(160, dtype=torch.int64)
    )
    assert served(features).values().equal(net.eval().sparse(features).values())
