"""The model without faults of the soak: unsharded, trained on the whole stream in the process that judges.

After each batch that may be saved it notes the content sums of everything in the tables, and writes the rows
to a file that is named by their sums: so who reads a generation of served tables finds what must be in it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from soak_model import IDS_A_SAMPLE, Stream, event_time, unsharded
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import SUMMED
from torchrec_dyn.serving.manifest import read_manifest
from torchrec_dyn.state_dict import saved_sums
from torchrec_dyn.storage import unsigned
from torchrec_dyn.whole_model import tables_of

KEPT = 60  # files of rows


def digest_of(sums: Mapping[str, str]) -> str:
    """Returns a digest of the content sums of whole tables."""
    return hashlib.blake2b(repr(sorted(sums.items())).encode(), digest_size=16).hexdigest()


def digest_of_rows(sums: Mapping[str, tuple[int, int]]) -> str:
    """Returns a digest of the content sums of ids and weights."""
    return hashlib.blake2b(repr(sorted(sums.items())).encode(), digest_size=16).hexdigest()


def digest_of_generation(folder: Path, generation: str) -> str:
    """Returns the digest of what a generation says that it serves.

    Raises:
        FileNotFoundError: the generation was removed.
    """
    tables = read_manifest(folder, generation).tables
    return digest_of_rows(
        {name: (one.sums["ids"], one.sums["weight"]) for name, one in tables.items()}
    )


@dataclass(frozen=True)
class Rows:
    """The tables at a step: ids in order [N] int64 and rows [N, DIM] by table; the dense part."""

    step: int
    tables: Mapping[str, tuple[Tensor, Tensor]]
    dense: Tensor

    def of(self, table: str, ids: Tensor) -> Tensor:
        """Returns the rows of ids, zeros for ids without one, [M, DIM]."""
        own, rows = self.tables[table]
        place = torch.searchsorted(own, ids).clamp(max=len(own) - 1)
        return torch.where((own[place] == ids)[:, None], rows[place], 0.0)


def read_rows(folder: Path, digest: str, patience: float) -> Rows | None:
    """Returns the rows of a digest; None if they are not there after some seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return Rows(**torch.load(folder / f"{digest}.pt", weights_only=True))
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)


def _sums_of(model: nn.Module) -> dict[str, str]:
    """Returns the content sums of all tables, as an entry has them."""
    tables = tables_of(model, "soak")
    return {
        table.name: " ".join(f"{unsigned(word):016x}" for words in both for word in words.tolist())
        for table, both in zip(tables, saved_sums(tables, "soak"), strict=True)
    }


class Oracle:
    """The model without faults.

    Args:
        seed: seed of the stream.
        every: batches from one step that may be saved to the next.
        folder: where the rows of the last `KEPT` of these steps are written.
    """

    def __init__(self, seed: int, every: int, folder: Path) -> None:
        self._model, self._optimizer = unsharded()
        self._batches = iter(Stream(seed))
        self._every, self._folder = every, folder
        self._whole: dict[int, str] = {}
        self._sums: OrderedDict[int, Mapping[str, str]] = OrderedDict()  # of the last `KEPT` steps
        self._steps: dict[str, int] = {}
        self._files: deque[Path] = deque()
        self.step = 0

    def advance(self) -> None:
        """Trains up to the next step that may be saved, and notes it."""
        for _ in range(self._every):
            self._model.sparse.set_time(event_time(self.step))
            self._optimizer.zero_grad()
            self._model(next(self._batches))[0].backward()
            self._optimizer.step()
            self.step += 1
        sums = _sums_of(self._model)
        words = {name: [int(word, 16) for word in text.split()[:2]] for name, text in sums.items()}
        digest = digest_of_rows({name: (ids, weight) for name, (ids, weight) in words.items()})
        self._whole[self.step], self._steps[digest] = digest_of(sums), self.step
        self._sums[self.step] = sums
        if len(self._sums) > KEPT:
            self._sums.popitem(last=False)
        self._write(self._folder / f"{digest}.pt")

    def _write(self, file: Path) -> None:
        tables = {}
        for name in IDS_A_SAMPLE:
            table = self._model.sparse.table(name)
            ids = table.ids().sort().values
            tables[name] = ids, table.lookup(ids)[0]
        state = {
            "step": self.step,
            "tables": tables,
            "dense": self._model.dense.weight.detach().clone(),
        }
        torch.save(state, file.with_suffix(".aside"))
        os.rename(file.with_suffix(".aside"), file)
        self._files.append(file)
        if len(self._files) > KEPT:
            self._files.popleft().unlink()

    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each table now."""
        return {name: self._model.sparse.table(name).num_rows for name in IDS_A_SAMPLE}

    def differences(self, step: int, sums: Mapping[str, str]) -> list[str]:
        """Returns which tensors of whole tables have other content sums than here at a step."""
        own = self._sums.get(step)
        if own is None:
            return [] if self._whole.get(step) == digest_of(sums) else ["something"]
        return [
            f"{name} of {table}"
            for table in sorted({*own, *sums})
            for name, ours, theirs in zip(
                SUMMED, own.get(table, "").split(), sums.get(table, "").split(), strict=False
            )
            if ours != theirs
        ]

    def step_of(self, digest: str) -> int | None:
        """Returns the step at which the rows have this digest; None if it was not noted."""
        return self._steps.get(digest)
