"""Wrong arguments of `Checkpoints`: errors of all ranks that say what to pass, before anything is changed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import differences, held, new
from checkpoint_jobs import ONE, TWO, Job
from torch import nn
from torchrec.distributed import DistributedModelParallel

from torchrec_dyn.checkpoint import Checkpoints, mark

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "torch's optimizer": (
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
        "expected TorchRec's KeyedOptimizer, got SGD. Pass model.fused_optimizer, or a",
    ),
    "no optimizer": ({"optimizer": None}, "expected TorchRec's KeyedOptimizer, got NoneType. Pass"),
    "list": ({"extra": [1]}, "expected a dict by name as extra, got list. Give each value a name."),
    "function": ({"extra": {"f": lambda: 1}}, "lists and dicts in extra['f'], got function that"),
}


def wrong_arguments(path: str, world: int) -> None:
    """Each wrong argument of the last rank is an error of all ranks, in all methods."""
    job = Job(path, TWO if world else ONE)
    job.train()
    ids = {"plain": torch.tensor([100])}
    before = held(job.model)
    is_last = not world or dist.get_rank() == world - 1
    for wrong, expected in WRONG.values():
        given = {"optimizer": job.optimizer, "extra": {}} | (wrong if is_last else {})
        kept = job.checkpoints
        calls = {
            "save": lambda: kept.save(job.model, step=1, **given),
            "async_save": lambda: kept.async_save(job.model, step=1, **given),
            "forget": lambda: kept.forget(job.model, ids=ids, step=1, **given),
            "restore": lambda: kept.restore(job.model, **given),
        }
        if "'f'" in expected:
            del calls["restore"]  # a name of what is to be loaded
        for name, call in calls.items():
            with pytest.raises(ValueError) as caught:
                call()
            assert expected in str(caught.value), (name, str(caught.value))
    assert not differences(held(job.model), before)
    assert not Path(path).exists()
    with pytest.raises(ValueError, match=r"^Checkpoints.save: expected a model, got \w+Optimizer"):
        job.checkpoints.save(job.optimizer, job.model, step=1)


@pytest.mark.parametrize("world", [0, 2])
def test_wrong_arguments_are_errors_of_all_ranks(world: int, tmp_path: Path) -> None:
    path = str(tmp_path / "kept")
    if world:
        workers.run(wrong_arguments, path, world, world_size=world)
    else:
        wrong_arguments(path, world)


def test_no_path() -> None:
    with pytest.raises(
        ValueError, match=r"expected the path of a directory, got None\. Give a str"
    ):
        Checkpoints(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected the path of a directory, got 'a\\x00b'\. Give"):
        Checkpoints("a\0b")


def save_different_steps(path: str) -> list[str]:
    job, told = Job(path, TWO), []
    job.train()
    ids, before = {"plain": torch.tensor([100])}, held(job.model)
    for call in (
        job.checkpoints.save,
        job.checkpoints.async_save,
        partial(job.checkpoints.forget, ids=ids),
    ):
        with pytest.raises(ValueError) as caught:
            call(job.model, job.optimizer, step=5 + dist.get_rank())
        told.append(str(caught.value))
    assert not differences(held(job.model), before)
    assert not Path(path).exists()
    job.checkpoints.save(job.model, job.optimizer, step=5 if dist.get_rank() else 5.0)
    job.checkpoints.close()
    return told


def test_different_steps_on_the_ranks_are_an_error(tmp_path: Path) -> None:
    """An entry had the step of rank 0, and each rank got one with its own."""
    first, second = workers.run(save_different_steps, str(tmp_path / "kept"), world_size=2)
    assert first == second
    for told, call in zip(first, ("save", "save", "forget"), strict=True):
        rule = "expected the same step on every rank, got [5, 6] by rank. "
        assert told.startswith(f"Checkpoints.{call}: {rule}")


def save_what_is_not_sharded(path: str) -> list[str]:
    """A collection that a model gets under DistributedModelParallel is of each rank alone."""
    model = nn.Sequential(nn.Identity())
    wrapped = DistributedModelParallel(model)
    model[0] = new(ONE).collection
    told = []
    for call in (
        lambda: Checkpoints(path).save(wrapped, model[0].fused_optimizer, step=1),
        lambda: Checkpoints(path).restore(wrapped, model[0].fused_optimizer),
        lambda: mark(wrapped),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        told.append(str(caught.value))
    if dist.get_rank() == 0:  # a model of one rank alone
        assert not Path(path).exists()
        kept = Checkpoints(path)
        kept.save(model, model[0].fused_optimizer, step=1)
        kept.close()
    return told


def test_an_unsharded_collection_under_dmp_is_not_saved(tmp_path: Path) -> None:
    first, second = workers.run(save_what_is_not_sharded, str(tmp_path / "kept"), world_size=2)
    assert first == second
    for told, call in zip(first, ("Checkpoints.save", "Checkpoints.restore", "mark"), strict=True):
        assert told.startswith(
            f"{call}(tables=['plain']): expected a sharded collection under Dist"
        )
