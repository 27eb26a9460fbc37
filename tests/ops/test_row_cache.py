"""cache_rows_ and row_places, on random histories beside a model: frames, ages, copies and counts."""

import itertools

import pytest
import torch
from device_ops import kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_device import CUDA, MockDevice
from op_samples import cache_sample, cached_batch, whole
from update_rules import NUMBERS, state_widths

from torchrec_dyn import ops

I32, I64 = torch.int32, torch.int64
WORD = 2**32
LEFT = -(2**31)  # in place of a row, as by a call that had no memory to end
BINS = 2048  # of rows, in which frames of one age leave together
RULES = {len(state_widths(number, 8)): number for number in NUMBERS}  # by the number of states


def age_group(age):
    """Returns a number that is the same for ages that are not told apart, and larger for older ones."""
    octave = max(0, age.bit_length() - 7)
    return octave, age >> octave


def test_ages_up_to_127_are_told_apart_and_then_64_parts_of_each_octave():
    assert len({age_group(age) for age in range(1, 128)}) == 127
    for low in (128, 1 << 20, 1 << 31):
        groups = [age_group(low + part * low // 64) for part in range(64)]
        assert groups == sorted({*groups})
        assert age_group(low - 1) < groups[0] == age_group(low + low // 64 - 1)


class Store:
    """The rows of a table in one store: what they are, and what the host's memory has."""

    def __init__(self, table, columns, dtype):
        self.table, self.columns, self.dtype = table, columns, dtype
        whole_block = 1 << table.shift
        sizes = [whole_block] * (table.base // whole_block)
        sizes += [whole_block] * (table.frames // whole_block)
        sizes += [last] if (last := table.frames % whole_block) else []
        self.blocks = [self.numbers(size).to(CUDA) for size in sizes]
        self.values = self.read(torch.arange(table.rows))
        self.on_host = self.values.clone()

    def numbers(self, count):
        """Returns rows of numbers that every dtype holds."""
        drawn = torch.randint(0, 256, (count, self.columns), generator=self.table.draw)
        return drawn.to(self.dtype)

    def read(self, places):
        of_store = self.blocks, self.table.shift, self.columns, self.dtype
        return ops.gather_rows(places.to(CUDA), *of_store).cpu()

    def write(self, rows, places):
        """Writes new numbers to distinct rows, wherever they are."""
        new = self.numbers(len(rows))
        self.values[rows] = new
        ops.scatter_rows_(
            places.to(CUDA), new.to(CUDA), self.blocks, self.table.shift, self.columns
        )
        is_on_host = places < self.table.base
        self.on_host[rows[is_on_host]] = new[is_on_host]


class Table:
    """A table with rows in host memory, and the frames that it should have."""

    def __init__(self, draw, shape, columns, dtype, rule):
        self.draw, (self.rows, self.frames, self.shift, self.is_cached) = draw, shape
        self.base = -(-self.rows >> self.shift) << self.shift
        widths = (columns, *state_widths(rule, columns))
        self.stores = [
            Store(self, width, torch.float32 if state else dtype)
            for state, width in enumerate(widths)
        ]
        some = torch.randint(-99, 99, (self.frames,), dtype=I32)  # frames begin as any memory
        self.cache = [
            torch.arange(self.rows, dtype=I32) % 2 * LEFT, some.long(), some, some.clone(),
            torch.zeros(4, dtype=I64),
        ]  # fmt: skip
        self.cache = [tensor.to(CUDA) for tensor in self.cache]
        self.used = {}  # {row in a frame: call that used it last}
        self.loaded = self.written = 0

    def call(self, rows, now, loads):
        """Gives frames to the rows of a batch; returns the rows that may have a frame after it."""
        batch = {row for row in rows if 0 <= row < self.rows}
        self.used.update({row: now for row in batch if row in self.used})
        missing = batch - self.used.keys()
        need = len(missing) - (self.frames - len(self.used))
        groups = {}
        for row, call in self.used.items():
            if call != now:
                older_first = [-part for part in age_group((now - call) % WORD)]
                groups.setdefault((*older_first, row * BINS // self.rows), []).append(row)
        for _, leaving in sorted(groups.items()):
            if need <= 0:
                break
            need -= len(leaving)
            for row in leaving:
                del self.used[row]
                for store in self.stores:
                    store.on_host[row] = store.values[row]
                self.written += 1
        given = min(len(missing), self.frames - len(self.used))
        self.loaded += given if loads else 0
        return missing, given

    def check(self, missing, given, now):
        """Compares the cache with the model, which learns which of the missing rows found frames."""
        places, owners, used, free, counts = (tensor.cpu().tolist() for tensor in self.cache)
        frames = {row: place - 1 for row, place in enumerate(places) if place > 0}
        found = frames.keys() - self.used.keys()
        assert found <= missing and len(found) == given
        self.used.update(dict.fromkeys(found, now))
        assert frames.keys() == self.used.keys()
        assert len({*frames.values()}) == len(frames)
        for row, frame in frames.items():
            assert owners[frame] == row and used[frame] % WORD == self.used[row]
        assert counts[2:] == [self.loaded, self.written]
        in_use = {*frames.values()}
        assert {*free[: counts[0]]} == {*range(counts[1])} - in_use and len(in_use) == counts[
            1
        ] - counts[0]
        assert all(owners[frame] == -1 for frame in free[: counts[0]])

    def in_frames(self):
        """Returns the numbers in the frames, of each store."""
        return [store.read(self.base + torch.arange(self.frames)) for store in self.stores]

    def check_rows(self, places):
        """Compares the numbers of all rows, by their places, and those in the host's memory."""
        for store in self.stores:
            assert torch.equal(store.read(places), store.values)
            assert torch.equal(store.read(torch.arange(self.rows)), store.on_host)


class Group:
    """Tables in one call."""

    def __init__(self, shapes, dtype, states, seed):
        draw, rule = torch.Generator().manual_seed(seed), RULES[states]
        self.tables = [Table(draw, shape, columns, dtype, rule) for columns, *shape in shapes]
        stores = [*zip(*(table.stores for table in self.tables), strict=True)]
        lines, first = [], 0
        for table in self.tables:
            store = table.stores[0]
            lines.append([first, len(store.blocks), table.shift, store.columns])
            first += len(store.blocks)
        weights, *of_states = ([block for one in kind for block in one.blocks] for kind in stores)
        states = [block for kind in of_states for block in kind]
        self.handle = ops.prepare_tables(
            [], whole(), weights, states, torch.tensor(lines), rule, [], [], None, None,
            [], [], None,
        )  # fmt: skip

    def caches(self, now):
        cached = [(t, table) for t, table in enumerate(self.tables) if table.is_cached]
        lines = [(t, now, table.base) for t, table in cached]
        layout = torch.tensor(lines, dtype=I64).view(-1, 3)
        return [tensor for _, table in cached for tensor in table.cache], layout

    def places(self, rows, offsets, now):
        return ops.row_places(rows.to(CUDA), offsets, *self.caches(now)).cpu()

    def call(self, batch, now, loads):
        """Gives frames to the rows of each table; compares; writes new numbers to all of them.

        New rows, which are not loaded, have no numbers before that.
        """
        rows = torch.tensor([row for of_table in batch for row in of_table], dtype=I64)
        offsets = torch.tensor([0, *(len(of_table) for of_table in batch)]).cumsum(0)
        before = [table.in_frames() for table in self.tables]
        ops.cache_rows_(rows.to(CUDA), offsets, *self.caches(now), loads, self.handle)
        after = [table.in_frames() for table in self.tables]
        places = self.places(rows, offsets, now).split(offsets.diff().tolist())
        for table, of_table, found in zip(self.tables, batch, places, strict=True):
            if table.is_cached:
                table.check(*table.call(of_table, now, loads), now)
            by_row = dict(zip(of_table, found.tolist(), strict=True))
            for row, place in by_row.items():
                frame = table.cache[0][row].item() - 1 if 0 <= row < table.rows else -1
                assert place == (table.base + frame if frame >= 0 else row)
        if loads:
            self.check_rows(now)
        else:
            assert all(map(torch.equal, itertools.chain(*before), itertools.chain(*after)))
        for table, of_table, found in zip(self.tables, batch, places, strict=True):
            by_row = dict(zip(of_table, found.tolist(), strict=True))
            given = {row: place for row, place in by_row.items() if 0 <= row < table.rows}
            if given:
                for store in table.stores:
                    store.write(whole(*given), whole(*given.values()))
        self.check_rows(now)

    def check_rows(self, now):
        sizes = [table.rows for table in self.tables]
        rows = torch.cat([torch.arange(size) for size in sizes])
        places = self.places(rows, torch.tensor([0, *sizes]).cumsum(0), now)
        for table, of_table in zip(self.tables, places.split(sizes), strict=True):
            table.check_rows(of_table)


# (columns, rows, frames, shift, has a cache)
SHAPES = st.tuples(
    st.sampled_from([1, 3, 4, 8, 10, 17, 40]),
    st.one_of(st.integers(1, 40), st.sampled_from([2048, 5000])),
    st.integers(0, 40),
    st.integers(0, 6),
    st.sampled_from([True, True, False]),
)
# To the next call; ages of one octave, of several, and of a cache that was left alone.
STEPS = st.sampled_from([1, 1, 1, 1, 2, 60, 127, 128, 1000, 1 << 20])


def some_rows(rows):
    """Returns rows of a batch, many of them neighbours, and numbers that are no rows."""
    one = st.one_of(st.integers(-1, min(rows, 80)), st.integers(max(0, rows - 9), rows))
    return st.lists(one, max_size=60)


@pytest.mark.simt
@settings(deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    states=st.sampled_from(sorted(RULES)),
    now=st.one_of(st.integers(1, 9), st.integers(WORD - 200, WORD - 1)),
    data=st.data(),
)
def test_any_history_leaves_the_frames_of_the_model(shapes, dtype, states, now, data):
    with MockDevice() as device:
        group = Group(shapes, dtype, states, data.draw(st.integers(0, 99), "seed"))
        for _ in range(data.draw(st.integers(1, 8), "calls")):
            for loads in data.draw(st.sampled_from([(True,), (True, False)])):
                batch = [data.draw(some_rows(table.rows)) for table in group.tables]
                group.call(batch, now, loads)
            now = (now + data.draw(STEPS)) % WORD
        assert device.mixed == [] and device.without_kernel == []


def batches(count, most, size):
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, most, (size,), generator=draw).tolist() for _ in range(count)]


@pytest.mark.simt
@pytest.mark.parametrize("first", [1, WORD - 150])
def test_long_histories(first):
    """Frames grow older than 127 calls, bins have several rows, and the number of the call begins anew."""
    with MockDevice():
        shapes = [(5, 5000, 60, 4, True), (8, 200, 120, 6, True), (2, 200, 80, 3, True)]
        group, some_are_free = Group(shapes, torch.float32, 1, 3), False
        for step, (many, one) in enumerate(
            zip(batches(300, 300, 12), batches(300, 200, 1), strict=True)
        ):
            group.call([many, one, one], (first + step) % WORD, True)
            some_are_free |= bool(group.tables[0].cache[4][0] > 0)
        assert some_are_free and min(table.written for table in group.tables) > 20
        oldest = [
            max((first + 299 - call) % WORD for call in table.used.values())
            for table in group.tables
        ]
        assert oldest[0] < 20 < 64 < oldest[2] < 128 < oldest[1]


@pytest.mark.simt
def test_many_rows_at_once():
    """Many threads meet at the same rows, frames and counts."""
    with MockDevice():
        group = Group([(4, 5000, 900, 8, True), (3, 2000, 700, 5, True)], torch.float32, 0, 4)
        for step in range(6):
            batch = [batches(step + 1, most, 3000)[step] for most in (5000, 900)]
            group.call(batch, step + 1, True)


def test_they_have_no_kernel_for_the_cpu():
    """A CPU has all rows in one memory: torch says that there is no kernel."""
    with pytest.raises(NotImplementedError, match=r"cache_rows_.*CPU"):
        ops.cache_rows_(**cache_sample())
    with pytest.raises(NotImplementedError, match=r"row_places.*CPU"):
        ops.row_places(**cached_batch())
    assert {"cache_rows_", "row_places"} <= kernels_of("simt")


@pytest.mark.parametrize(
    "device", ["simt", pytest.param("cuda", marks=pytest.mark.needs_cuda)], indirect=True
)
def test_rows_of_a_batch_without_caches_are_where_they_are(device):
    rows = whole(5, -1, 2**62)
    assert ops.row_places(rows, whole(0, 3), [], torch.empty(0, 3, dtype=I64)).equal(rows)
