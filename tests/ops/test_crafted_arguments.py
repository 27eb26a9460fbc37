"""Arguments that no caller of ours makes: each is an error, or right, and an error changes no argument."""

import copy
import mmap

import pytest
import torch
from another_process import call
from op_samples import NAMESPACE, SAMPLES, pool_sample, pooled, update
from raw_maps import WHOLE
from table_cases import ids_of

from torchrec_dyn import ops

FAR = 2**63 - 1


def refuses(op, sample, rule):
    """Asserts that a call raises an error with this rule and changes no argument."""
    before = copy.deepcopy(sample)
    with pytest.raises(RuntimeError, match=f"{op}: expected .*{rule}"):
        getattr(NAMESPACE, op)(**sample)
    for name, value in sample.items():
        given = value if isinstance(value, list) else [value]
        was = before[name] if isinstance(value, list) else [before[name]]
        for now, then in zip(given, was, strict=True):
            if isinstance(now, torch.Tensor):
                now, then = now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8)
            same = torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
            assert same, f"{op} wrote {name}"


# Segments: table, first bag, bags, offset and stride of the outputs. The samples have two tables of 3 and 2
# columns, two bags each.
TILES = [
    ([[0, 0, 2, 0, 5], [1, 1, 2, 3, 5]], "bag 1 in two"),
    ([[0, 0, 2, 0, 5], [1, 3, 1, 3, 5]], "bag 2 in none"),
    ([[0, 1, 2, 0, 5], [1, 3, 1, 3, 5]], "bag 0 in none"),
    ([[0, 0, 2, 0, 5], [1, 2, 1, 3, 5]], "bag 3 in none"),
    ([[0, 0, 2, 0, 5], [1, 2, 2, 2, 5]], "a gap or an overlap at element 3"),
    ([[0, 0, 2, 0, 5], [1, 2, 2, 2, 6]], "a gap or an overlap at element 3"),
    ([[0, 0, 2, 0, 3], [1, 2, 2, 5, 2]], "a gap or an overlap at element 6"),
    ([[0, 0, 2, 0, 4], [1, 2, 2, 3, 4]], "a gap or an overlap at element 5|rows of 4 .* got 5"),
    ([[0, 0, 2, 0, 3], [1, 2, 2, 6, 2], [1, 4, 0, 0, 2]], None),
    ([[1, 2, 2, 0, 2], [0, 0, 2, 4, 3]], None),
    ([[1, 2, 2, 0, 5], [0, 0, 2, 2, 5]], None),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("segments", "rule"), TILES)
@pytest.mark.parametrize("op", ["gather_pool", "bag_weights_grad", "update_rows_"])
def test_segments_hold_each_bag_and_fill_each_element_once(op, segments, rule):
    """A bag in two segments was read with the columns of the wrong table; outputs had holes."""
    sample = SAMPLES[op][0]() | {"segments": torch.tensor(segments)}
    if rule is None:
        getattr(NAMESPACE, op)(**sample)
    else:
        refuses(op, sample, rule)


@pytest.mark.usefixtures("device")
def test_any_tiling_gives_each_bag_its_place():
    by_rows = ops.gather_pool(**pool_sample(pooled())).view(2, 5)
    given = pooled() | {"segments": torch.tensor([[1, 2, 2, 0, 2], [0, 0, 2, 4, 3]])}
    by_tables = ops.gather_pool(**pool_sample(given))
    assert torch.equal(by_tables[:4].view(2, 2), by_rows[:, 3:])
    assert torch.equal(by_tables[4:].view(2, 3), by_rows[:, :3])


def adam(**change):
    return {"segments": SAMPLES["update_rows_"][0]()["segments"], **update(3), **change}


def streams(column=0, step=1):
    return ids_of(1, 0, 1, 2, column, step).view(2, 3)


NUMBERS = [
    ("init_rows_", {"first_column": -37}, r"first_column in \[0, 2\^31\), got -37"),
    ("init_rows_", {"first_column": FAR}, r"first_column in \[0, 2\^31\), got 92"),
    ("update_rows_", {"streams": streams(column=-1)}, r"first column in \[0, 2\^31\) .*, got -1"),
    ("update_rows_", {"streams": streams(column=FAR)}, r"first column in \[0, 2\^31\) .*, got 92"),
    ("update_rows_", adam(streams=streams(step=0)), "a step of at least 1 in streams, got 0"),
    ("update_rows_", adam(streams=streams(step=-1)), "a step of at least 1 in streams, got -1"),
    ("update_rows_", update(2) | {"hyper": [0.1, 0.1, 0.1, 0.5]}, r"weight_decay_mode in \[0, 2\], got 0.5"),
    ("update_rows_", update(2) | {"hyper": [0.1, 0.1, 0.1, 1e300]}, r"weight_decay_mode in \[0, 2\], got 1e"),
    ("insert", {"new_rows": ids_of(3, -1)}, r"rows in \[0, 2\^63 - 1\), got -1"),
    ("fill_new_", {"rows": ids_of(0, -1, -1), "new_index": ids_of(0, 0, 1)}, "new_index < 1"),
    ("touch_scores_", {"rows": ids_of(0, 7, -1, 7, 3, 4)}, "got one outside"),
    # the first invalid number is named, and before a row outside
    ("touch_scores_", {"rows": ids_of(0, 7, -1, 7, 3, 4), "times": ids_of(1, 1, 1, 1, -5, 2**32)},
     r"times in \[1, 2\^32\), got -5"),
    ("touch_scores_", {"rows": ids_of(0, 7, -1, 8, 3, 0), "times": ids_of(0, 1, 1, 1, 1, 1)},
     r"times in \[1, 2\^32\), got 0"),
    ("write_scores_", {"last_seen": ids_of(0, -2), "counts": ids_of(0, -1)}, r"last_seen in .*-2"),
    ("write_scores_", {"rows": ids_of(11, 12), "counts": ids_of(2**32, 0)}, r"counts in .*4294967296"),
    ("mark_rows_", {"rows": ids_of(0, 7, -1, 9, 3, 4)}, "rows below 8, the marks of table 0"),
    ("mark_rows_", {"rows": ids_of(0, 7, -1, 7, 99, 4)}, "rows below 4, the marks of table 2"),
]  # fmt: skip


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("op", "change", "rule"), NUMBERS)
def test_numbers_out_of_range_change_nothing(op, change, rule):
    refuses(op, {**SAMPLES[op][0](), **change}, rule)


def test_a_table_at_step_0_may_have_no_rows_in_the_batch():
    sample = adam(streams=streams(step=0), rows=ids_of(0, 5, -1, -1, -1))
    ops.update_rows_(**sample)
    assert torch.isfinite(sample["weights"][0]).all()


@pytest.mark.usefixtures("device")
def test_extreme_numbers_are_right():
    slots = torch.zeros(8192, 2, dtype=torch.int64)
    ops.insert(ids_of(5), ids_of(3), ids_of(0, 1), [slots], WHOLE)
    assert torch.equal(ops.probe_lengths(slots, FAR), ops.probe_lengths(slots, 2))
    slots[:, 1] = -(2**63)  # the row before the first int64 is the last int64
    assert ops.lookup(ids_of(0), ids_of(0, 1), [slots], WHOLE)[0].item() == FAR


# Memory


def written(op):
    """Yields (name, index) for the tensors that an op writes."""
    for argument in getattr(NAMESPACE, op).default._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield argument.name


WRITES = [(op, name) for op in SAMPLES for name in written(op) if op != "advise_huge_pages"]


def first_of(value):
    return value[0] if isinstance(value, list) else value


def tensors(op):
    sample = SAMPLES[op][1]() if op == "update_rows_" else SAMPLES[op][0]()
    return sample, {
        name: first_of(value)
        for name, value in sample.items()
        if value != [] and isinstance(first_of(value), torch.Tensor)
    }


SHARED = [
    (op, target, other)
    for op, target in WRITES
    for other in tensors(op)[1]
    if other != target
    and target in tensors(op)[1]
    and other not in ("layout", "segments", "streams")
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("op", "target", "other"), SHARED)
def test_tensors_that_are_written_share_no_memory(op, target, other):
    """Rows that lie in the weights were checked before, and changed by, an update."""
    sample, found = tensors(op)
    together = torch.zeros(1 << 10, dtype=torch.uint8)
    for place, name in enumerate((target, other)):  # the second begins 8 bytes after the first
        tensor = found[name]
        piece = together[8 * place : 8 * place + tensor.numel() * tensor.itemsize]
        shared = piece.view(tensor.dtype).view(tensor.shape)
        if place:
            shared = shared.copy_(tensor)
        value = sample[name]
        sample[name] = [shared, *value[1:]] if isinstance(value, list) else shared
    first, second = first_of(sample[target]), first_of(sample[other])
    if first.numel() * first.itemsize <= 8:  # they do not overlap then: put one on the other
        sample[other] = (
            together[: second.numel() * second.itemsize].view(second.dtype).view(second.shape)
        )
        sample[other].copy_(found[other])
    refuses(op, sample, "tensors that share no memory with a tensor that the op writes")


BROKEN = [
    (op, name) for op in SAMPLES for name in tensors(op)[1] if tensors(op)[1][name].numel() > 0
]


def accepted_without_storage():
    """Returns the cases in which an op takes a tensor whose storage is empty, or a byte short."""
    accepted = []
    for op, name in BROKEN:
        sample, found = tensors(op)
        tensor, value = found[name].clone(), sample[name]
        sample[name] = [tensor, *value[1:]] if isinstance(value, list) else tensor
        for left in (tensor.numel() * tensor.itemsize - 1, 0):
            tensor.untyped_storage().resize_(left)
            try:
                getattr(NAMESPACE, op)(**sample)
                accepted.append((op, name, left))
            except RuntimeError as error:
                if "in a storage that holds its" not in str(error):
                    accepted.append((op, name, left, str(error)))
    return accepted


def test_a_storage_holds_its_tensor():
    assert call(accepted_without_storage) == []


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("op", "name"), BROKEN)
def test_elements_begin_where_they_may(op, name):
    sample, found = tensors(op)
    tensor = found[name]
    memory = bytearray(tensor.numel() * tensor.itemsize + 8)
    moved = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1)
    value, moved = sample[name], moved.view(tensor.shape).copy_(tensor)
    sample[name] = [moved, *value[1:]] if isinstance(value, list) else moved
    with pytest.raises(RuntimeError, match=rf"{op}: expected .* at a multiple of .* bytes, got"):
        getattr(NAMESPACE, op)(**sample)


def test_more_bags_than_words_can_number():
    """Empty bags cost nothing: here 2^32 + 1 of them, in memory that is never read."""
    offsets = ops.new_slots(torch.empty(0, 2, dtype=torch.int64), (1 << 31) + 4).view(-1)
    sample = SAMPLES["update_rows_"][0]() | {"offsets": offsets[: (1 << 32) + 2]}
    with pytest.raises(
        RuntimeError, match=r"update_rows_: expected fewer than 2\^32 bags, got 42949"
    ):
        ops.update_rows_(**sample)


def test_a_product_beyond_int64_is_no_size():
    """2^35 rows of 2^29 columns are 2^64 values, which was 0."""
    rows = ops.new_slots(torch.empty(0, 2, dtype=torch.int64), 1 << 34).view(-1)
    with pytest.raises(
        RuntimeError, match="expected the elements of values = 34359738368 \\* 536870912"
    ):
        ops.scatter_rows_(rows, torch.empty(0), [], 0, 1 << 29)


def grow_a_map_of_a_file(folder):
    """Returns the ids in a map and the ids found, after most of its slots have moved out of a file."""
    capacity, ids = 1 << 19, torch.arange(1 << 18)
    slots = torch.zeros(capacity, 2, dtype=torch.int64)
    ops.insert(ids, ids, ids_of(0, len(ids)), [slots], WHOLE)
    path = f"{folder}/slots"
    slots.numpy().tofile(path)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    outgoing = torch.frombuffer(mapped, dtype=torch.int64).view(capacity, 2)
    grown = ops.new_slots(outgoing, capacity + 4)
    moved = ops.move_slots(outgoing, grown, 0, capacity * 3 // 4)
    listed, _ = ops.ids_between([grown, outgoing], moved, 0, -1)
    rows, _ = ops.lookup(ids, ids_of(0, len(ids)), [grown, outgoing], moved)
    return len(listed), int((rows == ids).sum())


def test_a_map_in_a_file_grows_without_its_old_ids(tmp_path):
    """Memory given back reads as zeros, but memory of a file as the file."""
    assert grow_a_map_of_a_file(tmp_path) == (1 << 18, 1 << 18)


@pytest.mark.usefixtures("device")
def test_places_of_a_damaged_map_move_as_they_are():
    """Adding 1 to the row of place -2^63 overflowed (seen under UBSan)."""
    outgoing = torch.stack([torch.arange(8), torch.full((8,), -(2**63))], 1)
    slots = ops.new_slots(outgoing, 8)
    assert ops.move_slots(outgoing, slots, 0, 8).item() == 8
    assert sorted(slots.tolist()) == [[id, -(2**63)] for id in range(8)]
