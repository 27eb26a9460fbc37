"""`Positions`: the position is behind the last trained batch, however many batches a pipeline has read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from torchrec_dyn.checkpoint import Positions

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


class Stateful:
    """A loader with a position of its own, which is ahead of what it yields, as with workers."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 9:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def sources() -> list[Any]:
    return [range(9), Stateful()]


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "stateful"])
@pytest.mark.parametrize("ahead", [0, 3])
def test_the_rest_comes_after_a_load(which: int, ahead: int) -> None:
    positions = Positions(sources()[which])
    batches = iter(positions)
    list(islice(batches, 4 + ahead))
    for _ in range(4):
        positions.step()
    state = positions.state_dict()
    assert state["batches"] == positions.batches == 4
    again = Positions(sources()[which])
    again.load_state_dict(state)
    assert list(again) == [4, 5, 6, 7, 8]
    for _ in range(5):
        again.step()
    assert again.batches == 9
    assert list(again) == [*range(9)] and again.batches == 0  # a new pass


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "stateful"])
def test_before_the_first_batch(which: int) -> None:
    again = Positions(sources()[which])
    again.load_state_dict(Positions(sources()[which]).state_dict())
    assert list(again) == [*range(9)]


def test_a_step_without_a_batch() -> None:
    positions = Positions([1])
    next(iter(positions))
    positions.step()
    with pytest.raises(RuntimeError, match="expected one call for each trained batch"):
        positions.step()


def test_a_state_of_something_else() -> None:
    positions = Positions([1, 2])
    with pytest.raises(
        ValueError, match=r"expected a state of Positions.*got one with \['batch'\]"
    ):
        positions.load_state_dict({"batch": 1})
    assert list(positions) == [1, 2]


def test_a_loader_of_torchdata() -> None:
    """Two workers read ahead of what is trained."""

    def made() -> Positions:
        return Positions(StatefulDataLoader([*range(12)], 2, num_workers=2))

    positions = made()
    batches = iter(positions)
    list(islice(batches, 4))
    positions.step()
    again = made()
    again.load_state_dict(positions.state_dict())
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
