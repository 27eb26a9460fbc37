"""Every op: samples pass opcheck, and invalid arguments raise an error in the form of the house rules."""

import random

import pytest
import torch
from device_ops import kernels_of
from fuzz_ops import copies
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import CASES as FUZZED
from op_samples import I64, NAMESPACE, SAMPLES, blocks, filled_slots, update, whole
from update_rules import NUMBERS, hyper_of

CASES = [(op, make) for op, makes in SAMPLES.items() for make in makes]


def test_every_op_has_a_sample():
    registered = torch._C._dispatch_get_all_op_names()
    ours = {name.split("::")[1] for name in registered if name.startswith("torchrec_dyn::")}
    assert ours == set(SAMPLES)


@pytest.mark.parametrize(("op", "make"), CASES, ids=[op for op, _ in CASES])
def test_opcheck(op, make):
    """Checks the schema's written arguments, the fake kernel's shapes and dtypes, and torch.compile."""
    torch.library.opcheck(getattr(torch.ops.torchrec_dyn, op).default, (), make())


def test_valid_calls_of_the_fuzzer(device):
    """The fuzzer itself calls the CPU's kernels; these are the ops that have another one."""
    for op in kernels_of("simt") - {"advise_huge_pages"}:
        for seed in range(40):
            given = FUZZED[op].draw(random.Random(seed))
            before = copies(given)
            try:
                FUZZED[op].check(before, given, getattr(NAMESPACE, op)(**given))
            except Exception as error:
                raise AssertionError(f"{op}, seed {seed}, on {device}: {error}") from error


# Invalid arguments


def arguments(op):
    """Yields (argument, kind of change, invalid value) for every tensor of an op's simplest sample."""
    for name, value in SAMPLES[op][0]().items():
        tensors = value if isinstance(value, list) else [value]
        if tensors and isinstance(tensors[0], torch.Tensor):
            first = tensors[0]
            spoilt = {
                "dtype": first.to(torch.int32 if first.dtype == I64 else torch.float64),
                "strides": torch.stack([first, first], -1)[..., 0],
                "size": torch.cat([first.flatten(), first.flatten()[:1]]),
                "nothing": first.flatten()[:0],
            }
            for how, wrong in spoilt.items():
                yield name, how, [wrong, *tensors[1:]] if isinstance(value, list) else wrong
            if isinstance(value, list):
                yield name, "one less", value[:-1]


SPOILT = [(op, name, how) for op in SAMPLES for name, how, _ in arguments(op)]
# Changes that are valid: an op of independent elements takes any number of them.
HARMLESS = {
    (op, argument, how)
    for op, argument in [
        ("mix64", "ids"),
        ("erase", "ids"),
        ("gather_rows", "rows"),
    ]
    for how in ("size", "nothing")
} | {
    ("fill_new_", "new_rows", "size"),
    *((op, name, "strides") for op, name in [("fill_new_", "new_rows"), ("erase", "moved")]),  # one
    *(("read_scores", "rows", how) for how in ("size", "nothing")),  # any number of rows
    *(
        (op, "moved", "strides")
        for op in ("lowest_scores", "count_cells", "ids_between", "ids_of_rows")
    ),  # one
    ("lowest_scores", "scores", "one less"),  # rows [0, 3) do not need the last block
    ("sort_by_owner", "lengths", "dtype"),  # int32 or int64
    ("sort_by_owner", "weights", "dtype"),
    ("gather_pool", "rows", "size"),  # an id in no bag
    ("bag_weights_grad", "rows", "size"),
    *(("advise_huge_pages", "block", how) for how in ("dtype", "size", "nothing")),
    ("grow_block", "block", "dtype"),
    *(("raise_errors", "like", how) for how in ("dtype", "strides", "size", "nothing")),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("op", "argument", "how"), SPOILT, ids=lambda v: str(v))
def test_what_is_wrong_is_an_error_that_says_so(op, argument, how):
    sample = SAMPLES[op][0]()
    sample[argument] = {(n, h): value for n, h, value in arguments(op)}[argument, how]
    if (op, argument, how) in HARMLESS:
        getattr(NAMESPACE, op)(**sample)
        return
    with pytest.raises(RuntimeError, match=rf"{op}: expected .+, got .+\."):
        getattr(NAMESPACE, op)(**sample)


SHORT_LAST = [*blocks(3)[:2], blocks(3)[2][:1]]
SHORT_SECOND = [blocks(3)[0], blocks(3)[1][:1], *blocks(2, count=1)]  # of two tables
SCORES = torch.ones(11, 1, dtype=I64)
WRONG = [
    ("lookup", {"table_offsets": whole(0, 3, 2)}, "ascending table_offsets, got 3 before 2"),
    ("lookup", {"table_offsets": whole(1, 2, 3)}, "table_offsets to start at 0, got 1"),
    ("lookup", {"table_offsets": whole(0, 2, 4)}, "the last of table_offsets = 3, got 4"),
    ("insert", {"new_rows": whole(3, -1)}, r"rows in \[0, 2\^63 - 1\), got -1"),
    ("insert", {"new_rows": whole(3, 2**63 - 1)}, r"rows in \[0, 2\^63 - 1\), got 92"),
    (
        "insert",
        {"slots": [torch.full((4, 2), 1) for _ in "ab"]},
        "an empty slot for every new id",
    ),
    ("insert", {"slots": [torch.empty(0, 2, dtype=I64)] * 2}, "an empty slot for every new id"),
    ("fill_new_", {"new_index": whole(-1, 1)}, "new_index < 1, got a larger one"),
    ("grow_block", {"rows": 3}, r"rows in \[4, 9\], got 3"),
    ("grow_block", {"rows": 10}, r"rows in \[4, 9\], got 10"),
    ("grow_block", {"rows": 0, "block": torch.ones(0, 3)}, r"rows in \[1, 9\], got 0"),
    ("grow_block", {"limit": 2**62}, r"a limit of at most 2\^47 bytes, got 4611686018427387904"),
    ("grow_block", {"block": torch.ones(4, 0)}, r"shape \[R, D\] with D > 0, got 2 dim"),
    ("grow_block", {"block": torch.ones(4)}, r"shape \[R, D\] with D > 0, got 1 dim"),
    # the last block of a table may have fewer rows, no other block, and states have the same rows
    ("gather_rows", {"rows": whole(9), "blocks": SHORT_LAST}, r"rows in \[-1, 9\), got 9"),
    ("gather_rows", {"blocks": SHORT_LAST[::-1]}, "the elements of a block = 12, got 3"),
    ("touch_scores_", {"scores": list(SCORES.split((4, 3, 4)))}, "rows of the table's scores"),
    ("gather_pool", {"weights": SHORT_SECOND}, r"rows in \[-1, 5\), got one outside"),
    (
        "update_rows_",
        {**update(2), "weights": SHORT_SECOND, "rows": whole(0, 4, -1, 3, 3)},
        "the elements of a block = 1, got 4",
    ),
    ("init_rows_", {"rows": whole(0, 12)}, r"rows in \[0, 12\), got 12"),
    ("init_rows_", {"rows": whole(0, -1)}, r"rows in \[0, 12\), got -1"),
    ("init_rows_", {"kind": 3}, r"kind in \[0, 2\], got 3"),
    ("init_rows_", {"parameters": [1.0]}, "the number of parameters = 6, got 1"),
    ("gather_rows", {"rows": whole(-2)}, r"rows in \[-1, 12\), got -2"),
    ("gather_rows", {"rows": whole(2**63 - 1)}, r"rows in \[-1, 12\)"),
    ("gather_rows", {"columns": -3}, r"columns in \[1, 2\^31\), got 2 and -3"),
    ("gather_rows", {"shift": 3}, "the elements of a block = 24, got 12"),
    ("gather_rows", {"shift": 64}, r"shift in \[0, 32\)"),
    ("gather_rows", {"dtype": torch.float16}, "blocks of dtype float16, got float32"),
    ("gather_rows", {"dtype": torch.int8, "blocks": []}, "float32, float16 or bfloat16"),
    ("touch_scores_", {"rows": whole(0, 8, -1, 7, 3, 0)}, "rows of the table's scores"),
    ("touch_scores_", {"rows": whole(0, -2, -1, 7, 3, 0)}, "got one outside"),
    ("touch_scores_", {"rows": whole(0, -(2**63), 2**63 - 1, 7, 3, 0)}, "got one outside"),
    (
        "touch_scores_",
        {"steps": whole(5, 6, 2**32 - 1)},
        r"steps in \[0, 2\^32 - 1\), got 4294967295",
    ),
    ("touch_scores_", {"times": whole(1, 1, 1, 1, 1)}, "the number of times = 6, got 5"),
    ("touch_scores_", {"times": torch.ones(6)}, "times of dtype"),
    ("touch_scores_", {"times": whole(1, 1, 0, 1, 1, 1)}, r"times in \[1, 2\^32\), got 0"),
    ("touch_scores_", {"times": whole(1, 1, 1, 1, 1, 2**32)}, r"times in \[1, 2\^32\), got 42"),
    ("touch_scores_", {"steps": whole(5, -1, 7)}, r"steps in \[0, 2\^32 - 1\), got -1"),
    ("write_scores_", {"rows": whole(0, 12)}, r"rows in \[0, 12\), got 12"),
    ("write_scores_", {"rows": whole(0, -1)}, r"rows in \[0, 12\), got -1"),
    (
        "write_scores_",
        {"last_seen": whole(0, 2**32 - 1)},
        r"last_seen in \[-1, 2\^32 - 1\), got 42",
    ),
    ("write_scores_", {"last_seen": whole(0, -2)}, r"last_seen in \[-1, 2\^32 - 1\), got -2"),
    ("write_scores_", {"counts": whole(2**32, 0)}, r"counts in \[0, 2\^32\), got 4294967296"),
    ("write_scores_", {"counts": whole(-1, 0)}, r"counts in \[0, 2\^32\), got -1"),
    ("read_scores", {"rows": whole(0, 12)}, r"rows in \[-1, 12\), got one outside"),
    ("read_scores", {"rows": whole(-2)}, r"rows in \[-1, 12\), got one outside"),
    ("lowest_scores", {"rows": 13}, r"rows in \[0, 12\], got 13"),
    ("lowest_scores", {"rows": -1}, r"rows in \[0, 12\], got -1"),
    ("lowest_scores", {"most": -1}, "most >= 0, got -1"),
    ("lowest_scores", {"shift": 32}, r"shift in \[0, 32\)"),
    (
        "lowest_scores",
        {"slots": filled_slots(), "moved": whole(-1, -1)},
        "number of maps = 1, got 2",
    ),
    ("ids_of_rows", {"first": -1}, "0 <= first <= last, got -1 and 4"),
    ("ids_of_rows", {"first": 5}, "0 <= first <= last, got 5 and 4"),
    ("count_cells", {"bits": -1}, r"bits in \[0, 16\], got -1"),
    ("count_cells", {"bits": 17}, r"bits in \[0, 16\], got 17"),
    ("count_cells", {"bits": 2**62}, r"bits in \[0, 16\]"),
    (
        "count_cells",
        {"slots": filled_slots(), "moved": whole(-1, -1)},
        "number of maps = 1, got 2",
    ),
    (
        "ids_between",
        {"slots": filled_slots(), "moved": whole(-1, -1)},
        "number of maps = 1, got 2",
    ),
    ("content_sum", {"first_column": -1}, r"first_column in \[0, 2\^31\), got -1"),
    ("content_sum", {"first_column": 2**31}, r"first_column in \[0, 2\^31\), got 2147483648"),
    ("content_sum", {"values": torch.ones(3, dtype=I64)}, r"shape \[M, D\], got 1 dim"),
    ("content_sum", {"values": torch.ones(3, 2).int()}, "bfloat16 or int64, got int32"),
    ("content_sum", {"values": torch.ones(2, 3)}, "number of rows of values = 3, got 2"),
    ("content_sum", {"values": torch.ones(2, 3).T}, "values to be contiguous, got strides"),
    ("mark_rows_", {"rows": whole(0, 8, -1, 7, 3, 0)}, "rows below 8, the marks of table 0"),
    ("mark_rows_", {"rows": whole(0, 7, -1, 7, 3, 4)}, "rows below 4, the marks of table 2"),
    ("mark_rows_", {"rows": whole(2**63 - 1, 7, -1, 7, 3, 0)}, "rows below 8, .* got one above"),
    ("mark_rows_", {"versions": whole(5, 6, 2**31)}, r"versions in \[0, 2\^31\), got 2147483648"),
    ("mark_rows_", {"versions": whole(5, -1, 7)}, r"versions in \[0, 2\^31\), got -1"),
    ("scatter_rows_", {"rows": whole(0, 12)}, r"rows in \[0, 12\), got 12"),
    ("scatter_rows_", {"columns": 2**62}, r"columns in \[1, 2\^31\)"),
    (
        "sort_by_owner",
        {"lengths": whole(3, 0, 2)},
        "lengths of at least 0 that add up to the 4 ids",
    ),
    (
        "sort_by_owner",
        {"lengths": whole(5, -1, 0)},
        "lengths of at least 0 that add up to the 4 ids",
    ),
    ("sort_by_owner", {"lengths": whole(2**63 - 1, 2**63 - 1, 6)}, "lengths of at least 0"),
    ("sort_by_owner", {"lengths": whole(4, 4, 4)}, "lengths of at least 0"),
    ("sort_by_owner", {"lengths": whole(1, 1, 1)}, "lengths of at least 0"),
    ("sort_by_owner", {"lengths": whole(4, -1, 1)}, "lengths of at least 0"),
    ("sort_by_owner", {"lengths": torch.ones(3)}, "lengths of dtype int64, got float32"),
    ("sort_by_owner", {"weights": whole(1, 2, 3, 4)}, "weights of dtype float32, got int64"),
    ("sort_by_owner", {"weights": torch.ones(3)}, "the number of weights = 4, got 3"),
    ("sort_by_owner", {"ranks": 0}, r"ranks in \[1, 1048576\], got 0"),
    ("sort_by_owner", {"ranks": 2**20 + 1}, r"ranks in \[1, 1048576\], got 1048577"),
    ("gather_pool", {"offsets": whole(0, 2, 1, 4, 5)}, "ascending offsets, got 2 before 1"),
    ("gather_pool", {"offsets": whole(-1, 2, 2, 4, 5)}, r"offsets inside the ids \[0, 5\], got -1"),
    (
        "gather_pool",
        {"offsets": whole(0, 2, 2, 4, 6)},
        r"offsets inside the ids \[0, 5\], got 0 to 6",
    ),
    ("gather_pool", {"rows": whole(0, 8, 0, 0, 0)}, r"rows in \[-1, 8\), got one outside"),
    ("gather_pool", {"rows": whole(0, -2, 0, 0, 0)}, r"rows in \[-1, 8\), got one outside"),
    ("gather_pool", {"elements": 9}, "a segment's output inside 9 elements"),
    ("gather_pool", {"elements": 11}, "the elements that the segments cover = 11, got 10"),
    ("gather_pool", {"elements": -1}, "elements >= 0, got -1"),
    ("gather_pool", {"dtype": torch.float64}, "float32, float16 or bfloat16, got float64"),
    ("gather_pool", {"segments": torch.tensor([[2, 0, 2, 0, 5]])}, r"a table in \[0, 2\), got 2"),
    ("gather_pool", {"segments": torch.tensor([[0, 3, 2, 0, 5]])}, "inside 4 bags, got 2 from 3"),
    ("gather_pool", {"segments": torch.tensor([[0, 0, 2, 0, 2]])}, "offset 0 and stride 2"),
    ("gather_pool", {"layout": torch.tensor([[2**62, 2**62, 2, 3]] * 2)}, "block and count in"),
    ("gather_pool", {"layout": torch.tensor([[0, 2, 62, 3]] * 2)}, r"shift in \[0, 32\)"),
    ("gather_pool", {"layout": torch.tensor([[0, 2, 2, 2**62]] * 2)}, r"columns in \[1, 2\^31\)"),
    ("update_rows_", {"optimizer": len(NUMBERS)}, r"optimizer in \[0, \d+\], got \d+"),
    ("update_rows_", {"optimizer": 1, "hyper": hyper_of(1)}, "blocks of momentum1, got 0"),
    ("update_rows_", {"hyper": []}, "the number of hyper-parameters = 1, got 0"),
    (
        "update_rows_",
        {"optimizer": 2, "hyper": [0.1, 0.1, 0.1, 3.0]},
        r"weight_decay_mode in \[0, 2\], got 3",
    ),
    ("update_rows_", {"rows": whole(0, 8, 0, 0, 0)}, r"rows in \[-1, 8\), got one outside"),
    ("update_rows_", {"grad_scales": [1.0]}, "the number of grad_scales = 2, got 1"),
    ("update_rows_", {"senders": whole(0, 0, 0, 0, 0)}, "senders of dtype int32, got int64"),
    ("update_rows_", {"senders": whole(0, 0).int()}, "the number of senders = 5, got 2"),
    (
        "update_rows_",
        {"senders": whole(0, -2, 0, 0, 0).int()},
        r"senders in \[-1, 1048576\), got -2",
    ),
    ("update_rows_", {"senders": whole(0, 2**20, 0, 0, 0).int()}, r"got -1 to 1048576"),
    (
        "update_rows_",
        {"mark_layout": torch.tensor([[0, 1, 6, 1]])},
        "lines of mark_layout = 2, got 1",
    ),
    (
        "update_rows_",
        {"mark_layout": torch.tensor([[0, 0, 5, 1]] * 2)},
        "shift of at least 6 .*got 5",
    ),
    ("update_rows_", {"mark_layout": torch.tensor([[0, 1, 6, 1]] * 2)}, "1 blocks of marks, got 0"),
    (
        "update_rows_",
        {
            "mark_layout": torch.tensor([[0, 2**31 - 1, 31, 1]] * 2),
            "marks": [torch.zeros(64, dtype=torch.uint8)],
        },
        "2147483647 blocks of marks, got 1",
    ),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("op", "change", "rule"), WRONG, ids=[w[0] for w in WRONG])
def test_values_out_of_range(op, change, rule):
    sample = {**SAMPLES[op][0](), **change}
    with pytest.raises(RuntimeError, match=f"{op}: expected .*{rule}"):
        getattr(NAMESPACE, op)(**sample)


wild = st.sampled_from(
    [-(2**63), -(2**62), -2, -1, 0, 1, 2, 3, 4, 5, 2**31, 2**32, 2**62, 2**63 - 1]
)


@pytest.mark.usefixtures("device")
@settings(max_examples=300)
@given(
    which=st.sampled_from(["gather_pool", "bag_weights_grad", "update_rows_"]),
    name=st.sampled_from(["rows", "offsets", "layout", "segments"]),
    place=st.integers(0, 9),
    number=wild,
    second=st.tuples(st.integers(0, 9), wild),
)
def test_wild_numbers_never_crash(which, name, place, number, second):
    """With two numbers of a layout replaced an op returns a result or an error with the expected values."""
    sample = SAMPLES[which][0]()
    flat = sample[name] = sample[name].clone()
    flat.view(-1)[place % flat.numel()] = number
    flat.view(-1)[second[0] % flat.numel()] = second[1]
    try:
        getattr(NAMESPACE, which)(**sample)
    except RuntimeError as error:
        assert "expected" in str(error)
