"""The serving process of the soak: a `Follower`, and threads that read the served tables of both followers.

Each generation, and each row that is read, is compared with the model without faults (soak_oracle.py).
"""

from __future__ import annotations

import multiprocessing.connection
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from forked import forkserver
from soak_memory import keep_telling_memory
from soak_model import DENSE, IDS_A_SAMPLE, TABLES
from soak_oracle import Rows, digest_of_generation, read_rows
from torch import Tensor
from torchrec import KeyedJaggedTensor

from torchrec_dyn import serving

PATIENCE = 120.0  # seconds for the model without faults to come to a step
_READ = 48  # ids of a table in one read
_KNOWN = 4  # generations of a directory whose contents are remembered


class Seen(NamedTuple):
    """A message of the process: "generation", "retry", "reads" or "fault".

    A generation has its step, its lag in seconds, and whether its changes and its dense part were compared.
    "reads" has the numbers of rows compared and of reads between two generations since the last one.
    """

    what: str
    step: int = 0
    lag: float = 0.0
    compared: int = 0
    text: str = ""


@dataclass(frozen=True)
class Places:
    """Directories: the Checkpoints, the served tables of this process and of the command, the oracle's.

    `told` is where processes tell their memory.
    """

    path: Path
    served: Path
    served_by_other: Path
    oracle: Path
    told: Path


class _Served:
    """A directory of served tables, and what its generations must have."""

    def __init__(self, folder: Path, oracle: Path) -> None:
        self._folder, self._oracle = folder, oracle
        self.collection = serving.ServingEmbeddingBagCollection(folder, TABLES)
        self._known: OrderedDict[str, Rows | None] = OrderedDict()
        self._lock = threading.Lock()
        self.now()

    def now(self) -> tuple[str, Rows | None]:
        """Returns the generation that the collection serves, and its rows; None if they are not known."""
        with self._lock:
            generation = self.collection.generation
            if generation not in self._known:
                self._known[generation] = self._rows_of(generation)
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
            return generation, self._known[generation]

    def _rows_of(self, generation: str) -> Rows | None:
        try:
            digest = digest_of_generation(self._folder, generation)
        except FileNotFoundError:
            return None  # two newer generations are there
        rows = read_rows(self._oracle, digest, PATIENCE)
        if rows is None:
            raise AssertionError(f"{self._folder}: {generation} has rows of no step")
        return rows


class _Readers:
    """Threads that read and refresh one collection at once."""

    def __init__(self, served: _Served, seed: int, fault: Callable[[str], None]) -> None:
        self._served, self._fault = served, fault
        self._lock = threading.Lock()
        self._compared = self._between = 0
        self._must_end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(seed * 10 + number,), daemon=True)
            for number in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def taken(self) -> tuple[int, int]:
        """Returns the rows compared, and the reads between two generations, since the last call."""
        with self._lock:
            numbers = self._compared, self._between
            self._compared = self._between = 0
        return numbers

    def end(self) -> None:
        self._must_end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        while not self._must_end.wait(0.05):
            try:
                self._read(draw)
            except Exception as error:
                self._fault(f"a reader: {type(error).__name__}: {error}")
                return

    def _read(self, draw: torch.Generator) -> None:
        if torch.rand((), generator=draw) < 0.3:
            self._served.collection.refresh()
        before = self._served.now()
        if before[1] is None:
            self._served.collection.refresh()
            return
        ids = {name: _drawn(own, draw) for name, (own, _) in before[1].tables.items()}
        features = KeyedJaggedTensor(
            list(ids), torch.cat(list(ids.values())), lengths=torch.ones(_READ * len(ids)).long()
        )
        with torch.no_grad():
            values = self._served.collection(features).values()
        after = self._served.now()
        allowed = [rows for _, rows in (before, after) if rows is not None]
        if not any(_are_those_of(rows, ids, values) for rows in allowed):
            steps = [rows.step for rows in allowed]
            raise AssertionError(f"rows of no one generation, at or between the steps {steps}")
        with self._lock:
            self._compared += _READ * len(ids)
            self._between += before[0] != after[0]


def _drawn(own: Tensor, draw: torch.Generator) -> Tensor:
    """Returns ids with a row and, one in six, others, [_READ] int64."""
    ids = own[torch.randint(len(own), (_READ,), generator=draw)]
    ids[::6] += 1
    return ids


def _are_those_of(rows: Rows, ids: Mapping[str, Tensor], values: Tensor) -> bool:
    expected = torch.cat([rows.of(name, of_table) for name, of_table in ids.items()], dim=1)
    return torch.equal(values, expected)


class _Following:
    """The follower of this process, whose generations are compared with those before."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._follower = serving.Follower(places.path, places.served)
        self._before: Rows | None = None

    def poll(self) -> Seen | None:
        """Serves what is new; returns what was seen.

        Raises:
            AssertionError: it is not what the model without faults has.
        """
        try:
            followed = self._follower.poll()
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or str(error)
            return Seen("retry", text=f"{type(error).__name__}: {what[:60]}")
        if followed is None:
            return None
        digest = digest_of_generation(self._places.served, followed.generation)
        rows = read_rows(self._places.oracle, digest, PATIENCE)
        where = f"{followed.entry.path.name}, generation {followed.generation}"
        if rows is None or rows.step != followed.entry.step:
            raise AssertionError(f"{where}: expected the rows of step {followed.entry.step}")
        if self._before is not None and rows.step <= self._before.step:
            raise AssertionError(f"{where}: expected a step after {self._before.step}")
        if followed.changed is not None and self._before is not None:
            assert followed.removed is not None
            for name in IDS_A_SAMPLE:
                changes = followed.changed[name], followed.removed[name]
                _check_changes(f"{where}, {name}", self._before, rows, name, *changes)
        compared = 1 + self._has_dense(followed, rows)
        self._before = rows
        return Seen("generation", rows.step, followed.lag, compared, "; ".join(followed.skipped))

    def _has_dense(self, followed: serving.Followed, rows: Rows) -> bool:
        """Returns True if the dense part is right, False if its entry was pruned meanwhile."""
        state = {"model": {"dense.weight": torch.empty(1, DENSE)}}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "in a single process"
                dcp.load(state, checkpoint_id=followed.dense, no_dist=True)
        except Exception:
            if followed.entry.path.exists():
                raise
            return False
        if not torch.equal(state["model"]["dense.weight"], rows.dense):
            raise AssertionError(f"{followed.entry.path.name}: expected another dense part")
        return True


def _check_changes(
    where: str, before: Rows, after: Rows, table: str, changed: Tensor, removed: Tensor
) -> None:
    """Raises AssertionError unless ids are those that are other now than before."""
    old, new = set(before.tables[table][0].tolist()), set(after.tables[table][0].tolist())
    gone = set(removed.tolist())  # an id that came and went may be among them
    if not old - new <= gone or gone & new or len(gone) != len(removed):
        raise AssertionError(f"{where}: expected the ids that were removed, each once")
    said = set(changed.tolist())
    if len(said) != len(changed) or not said <= new:
        raise AssertionError(f"{where}: expected changed ids with a row, each once")
    rest = torch.tensor(sorted(new - said), dtype=torch.int64)
    own = before.tables[table][0]
    is_kept = torch.isin(rest, own)
    if not is_kept.all() or not torch.equal(before.of(table, rest), after.of(table, rest)):
        raise AssertionError(f"{where}: expected all ids whose rows are other now")


def run(places: Places, seed: int, link: Any) -> None:
    """Follows and reads until the other side says something."""
    torch.set_num_threads(1)
    keep_telling_memory(places.told)
    sends = threading.Lock()

    def tell(seen: Seen) -> None:
        with sends:
            link.send(seen)

    def fault(text: str) -> None:
        tell(Seen("fault", text=text))

    following, readers = _Following(places), []
    waiting = [places.served, places.served_by_other]
    counted = time.monotonic()
    while not link.poll(0.1):
        if multiprocessing.parent_process() is None or os.getppid() == 1:
            return
        try:
            seen = following.poll()
        except Exception as error:
            fault(f"the follower: {type(error).__name__}: {error}")
            break
        if seen is not None:
            tell(seen)
        for folder in [one for one in waiting if (one / "current").exists()]:
            waiting.remove(folder)
            readers.append(_Readers(_Served(folder, places.oracle), seed + len(readers), fault))
        if time.monotonic() - counted > 1:
            counted = time.monotonic()
            for one in readers:
                rows, between = one.taken()
                tell(Seen("reads", step=between, compared=rows))
    for one in readers:
        one.end()


def start(places: Places, seed: int) -> tuple[Any, multiprocessing.connection.Connection]:
    """Returns the process, and its connection: anything sent to it ends it."""
    ours, theirs = forkserver().Pipe()
    process: Any = forkserver().Process(target=run, args=(places, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours
