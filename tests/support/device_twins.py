"""Tables on the CPU and their twins on a mock device, changed by the same calls."""

import copy
import pickle
from itertools import pairwise

import torch
from life_cases import ADMISSIONS, COUNTS, EVICTIONS, living_table
from mock_device import OTHER_GPU
from table_cases import ids_of, make_group, same_state

from torchrec_dyn import knobs
from torchrec_dyn.storage import RowStore
from torchrec_dyn.table import TableShard

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda table: pickle.loads(pickle.dumps(table))}


def take_step_of(tables, ids, offsets, times=None):
    """Takes one training step of tables, each with one bag of ids; returns the output."""
    with torch.no_grad():
        return make_group(*tables)(ids, offsets.to(ids.device), training=True, times=times)


def on_host(state):
    return {name: value.cpu() for name, value in state.items()}


class DeviceTwins:
    """Tables of the given lives (life_cases.py), and their twins on a mock device that is entered.

    The twins are not on the current GPU, so that what forgets their device is noted.
    """

    def __init__(self, device, *lives, limit=1000, **options):
        def made(where):
            return [
                living_table(
                    EVICTIONS[one], ADMISSIONS[other], limit, name=f"t{n}", device=where, **options
                )
                for n, (one, other) in enumerate(lives)
            ]

        self.device, self.tables, self.twins = device, made("cpu"), made(OTHER_GPU)
        self.versions = None

    def step(self, *lists, times=False):
        """Takes one training step of all tables, and compares the outputs."""
        ids = ids_of(*(number for of_table in lists for number in of_table))
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        found = []
        for tables, sent in (
            (self.tables, ids),
            (self.twins, self.device.of(ids.clone(), gpu=OTHER_GPU)),
        ):
            twice = torch.full_like(sent, 2) if times else None
            try:
                output = take_step_of(tables, sent, offsets, twice)
                found.append(getattr(output, "memory", output).tolist())  # `.cpu()` would be noted
            except RuntimeError as error:  # a full table
                found.append(str(error))
        assert found[0] == found[1]

    def each(self, call):
        return [(call(one), call(two)) for one, two in zip(self.tables, self.twins, strict=True)]

    def reload(self):
        """Loads each twin's contents, saved on the device, into the other twin."""
        for one, two in zip(self.tables, self.twins, strict=True):
            from_cpu, from_device = one.export_state(), on_host(two.export_state())
            one.load_state(from_device)
            two.load_state(from_cpu)

    def move_away_and_back(self):
        """Moves the twins to the CPU, compares them there, and moves them back.

        Each move changes every row for the log of changes, so the other tables load their own contents.
        """
        for one, two in zip(self.tables, self.twins, strict=True):
            two.convert(device="cpu")
            state = one.export_state()
            assert two.device.type == "cpu" and same_state(state, two.export_state())
            two.convert(device=OTHER_GPU)
            assert two.device == OTHER_GPU
            one.load_state(state)
            one.load_state(state)

    def copy(self, how):
        self.twins = [COPIES[how](two) for two in self.twins]
        self.tables = [COPIES[how](one) for one in self.tables]
        self.versions = None

    def mark(self):
        self.versions = self.each(TableShard.version)

    def changes(self, table, version):
        if table.changes is None:
            return None
        changed, _ = version.log.changed_rows(version, table.id_map)
        removed = version.log.removed_ids(version, table.id_map)
        return sorted(changed.cpu().tolist()), sorted(removed.cpu().tolist())

    def compare(self):
        for one, two in zip(self.tables, self.twins, strict=True):
            assert same_state(one.export_state(), on_host(two.export_state()))
            for name in ("rows", "waiting", "step", *COUNTS):
                assert one.stats()[name] == two.stats()[name], name
            two.id_map.check_invariants()
        pairs = zip(self.tables, self.twins, self.versions or [], strict=False)
        for one, two, (version, twin) in pairs:
            assert self.changes(one, version) == self.changes(two, twin)
        assert self.device.mixed == []
        assert self.device.without_kernel == []

    def waits(self):
        """Returns the ops for which the host waited since the last call; None if rows were listed anew."""
        noted = [note.op for note in self.device.reads]
        self.device.forget()
        return None if ("lowest_rows", "_to_copy") in pairwise(noted) else noted


def small_chunks(monkeypatch, size):
    """Makes chunks of `size` bytes. Returns the list of bytes of rows that are read at once on a device."""
    monkeypatch.setattr(knobs, "SAVED_CHUNK_BYTES", size)
    monkeypatch.setattr(knobs, "CHUNK_BYTES", size)
    monkeypatch.setattr(knobs, "CROSSING_BYTES", size)
    sizes, read = [], RowStore.read

    def counted(store, rows):
        if not rows.is_cpu:
            sizes.append(len(rows) * store.row_bytes)
        return read(store, rows)

    monkeypatch.setattr(RowStore, "read", counted)
    return sizes
