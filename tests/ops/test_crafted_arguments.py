"""Arguments that no caller of ours makes: each is an error, or right, and an error changes no argument."""

import copy
import mmap
import re

import pytest
import torch
from another_process import call
from device_ops import DESCRIPTIONS
from op_samples import (
    I64,
    ON_DEVICES_ONLY,
    SAMPLES,
    blocks,
    filled_slots,
    pool_sample,
    pooled,
    update,
    whole,
)
from raw_maps import WHOLE
from table_cases import ids_of
from update_rules import NUMBERS, hyper_of

from torchrec_dyn import ops

FAR = 2**63 - 1


def check_refuses(op, sample, rule, what=""):
    """Asserts that a call raises an error with this rule and changes no argument."""
    before = copy.deepcopy(sample)
    try:
        getattr(ops, op)(**sample)
    except RuntimeError as error:
        assert re.search(f"{op}: expected .*{rule}", str(error)), f"{what or rule}: {error}"
    else:
        raise AssertionError(f"{op} accepted {what or rule}")
    for name, value in sample.items():
        given = value if isinstance(value, list) else [value]
        was = before[name] if isinstance(value, list) else [before[name]]
        for now, then in zip(given, was, strict=True):
            if isinstance(now, torch.Tensor):
                now, then = now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8)
            same = torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
            assert same, f"{op} wrote {name}"


# Arguments of another kind, numbers out of range


def arguments(op):
    """Yields (argument, kind of change, invalid value) for every tensor of an op's simplest sample."""
    for name, value in SAMPLES[op][0]().items():
        tensors = value if isinstance(value, list) else [value]
        if tensors and isinstance(tensors[0], torch.Tensor):
            first = tensors[0]
            other = {I64: torch.int32, torch.float64: torch.float32}.get(first.dtype, torch.float64)
            spoilt = {
                "dtype": first.to(other),
                "strides": torch.stack([first, first], -1)[..., 0],
                "size": torch.cat([first.flatten(), first.flatten()[:1]]),
                "nothing": first.flatten()[:0],
            }
            for how, wrong in spoilt.items():
                yield name, how, [wrong, *tensors[1:]] if isinstance(value, list) else wrong
            if isinstance(value, list):
                yield name, "one less", value[:-1]


# Changes that are valid: an op of independent elements takes any number of them.
HARMLESS = {
    (op, argument, how)
    for op, argument in [
        ("mix64", "ids"),
        ("erase", "ids"),
        ("gather_rows", "rows"),
        ("ask_for_rows", "rows"),
    ]
    for how in ("size", "nothing")
} | {
    ("erase", "moved", "strides"),
    ("add_rows_", "reused", "strides"),  # one
    ("admit", "counters", "strides"),  # one
    *(("commit_step_", "counters", how) for how in ("strides", "nothing")),  # one; no counters
    *(("lowest_rows", "like", how) for how in ("dtype", "strides", "size", "nothing")),
    ("lowest_rows", "questions", "nothing"),
    *((op, "moved", "strides") for op in ("count_cells", "ids_between", "ids_of_rows")),  # one
    ("sort_by_owner", "lengths", "dtype"),  # int32 or int64
    ("sort_by_owner", "weights", "dtype"),
    ("gather_pool", "rows", "size"),  # an id in no bag
    ("weights_grad_prepared", "rows", "size"),
    *(("find_and_pool", "ids", how) for how in ("size", "nothing")),  # the result says so
    ("find_and_pool", "lengths", "dtype"),  # int32 or int64
    *((op, "caches", "nothing") for op in ON_DEVICES_ONLY),  # a table without rows
    *((op, "tables", "strides") for op in SAMPLES if "tables" in SAMPLES[op][0]()),  # one
    ("grow_block", "block", "dtype"),
    *(("raise_errors", "like", how) for how in ("dtype", "strides", "size", "nothing")),
}


def skip_without_kernel(op, device):
    if device == "cpu" and op in ON_DEVICES_ONLY:
        pytest.skip("no kernel for the CPU")


@pytest.mark.parametrize("op", SAMPLES)
def test_what_is_wrong_is_an_error_that_says_so(device, op):
    skip_without_kernel(op, device)
    for argument, how, wrong in arguments(op):
        sample = {**SAMPLES[op][0](), argument: wrong}
        if (op, argument, how) in HARMLESS:
            getattr(ops, op)(**sample)
        else:
            check_refuses(op, sample, r".*, got .+\.", f"{argument}: {how}")


def adam(**change):
    return {"segments": SAMPLES["update_rows_"][0]()["segments"], **update(3), **change}


def refusals(*on_nonfinite):
    return {
        "on_nonfinite": list(on_nonfinite),
        "nonfinite": [whole(0) for _ in range(max(2, len(on_nonfinite)))],
    }


def streams(column=0, step=1):
    return ids_of(1, 0, 1, 2, column, step).view(2, 3)


SHORT_LAST = [*blocks(3)[:2], blocks(3)[2][:1]]
SHORT_SECOND = [blocks(3)[0], blocks(3)[1][:1], *blocks(2, count=1)]  # of two tables
SCORES = torch.ones(11, 1, dtype=I64)
WRONG = [
    ("lookup", {"table_offsets": whole(0, 3, 2)}, "ascending table_offsets, got 3 before 2"),
    ("lookup", {"table_offsets": whole(1, 2, 3)}, "table_offsets to start at 0, got 1"),
    ("lookup", {"table_offsets": whole(0, 2, 4)}, "the last of table_offsets = 3, got 4"),
    ("insert", {"new_rows": whole(3, 2**63 - 1)}, r"rows in \[0, 2\^63 - 1\), got 92"),
    ("insert", {"slots": [torch.full((4, 2), 1) for _ in "ab"]}, "an empty slot for every new id"),
    ("insert", {"slots": [torch.empty(0, 2, dtype=I64)] * 2}, "an empty slot for every new id"),
    ("grown_slots", {"capacities": [12]}, "the number of capacities = 2, got 1"),
    ("grown_slots", {"keys": [0, 0, 0]}, "the number of keys = 2, got 3"),
    ("grown_slots", {"capacities": [12, 6]}, r"a capacity in \[4, 2\^48\), a multiple of 4, got 6"),
    ("grown_slots", {"slots": [torch.full((8, 2), 1)] * 2}, "an empty slot for every id, got a cap"),
    ("grow_block", {"rows": 3}, r"rows in \[4, 9\], got 3"),
    ("grow_block", {"rows": 10}, r"rows in \[4, 9\], got 10"),
    ("grow_block", {"rows": 0, "block": torch.ones(0, 3)}, r"rows in \[1, 9\], got 0"),
    ("grow_block", {"limit": 2**62}, r"a limit of at most 2\^47 bytes, got 4611686018427387904"),
    ("grow_block", {"block": torch.ones(4, 0)}, r"shape \[R, D\] with D > 0, got 2 dim"),
    ("grow_block", {"block": torch.ones(4)}, r"shape \[R, D\] with D > 0, got 1 dim"),
    ("prepare_tables", {"slots": filled_slots()[:1], "moved": whole(-1)}, "the number of maps = 2, got 1"),
    ("find_and_pool", {"tables": whole(1)}, "the result of prepare_tables in this process"),
    ("find_and_pool", {"collects": 3}, r"collects in \[0, 2\], got 3"),
    ("find_and_pool", {"pools": 3}, r"pools in \[0, 2\], got 3"),
    ("find_and_pool", {"output_rows": -1}, "output_rows and columns >= 0, .*, got -1 and 5"),
    ("find_and_pool", {"columns": -1}, "output_rows and columns >= 0, .*, got 2 and -1"),
    ("find_and_pool", {"output_rows": 2**62}, "fewer than 2.62 elements, got 46.* and 5"),
    ("find_and_pool", {"output_rows": 3}, "the elements that the segments cover = 15, got 10"),
    ("find_and_pool", {"dtype": torch.int8}, "float32, float16 or bfloat16, got another"),
    ("find_and_pool", {"lengths": None}, "lengths or offsets of the bags, got none"),
    ("find_and_pool", {"segments": None}, "the columns of each table of sequences = 3, got 2"),
    ("find_and_pool", {"first_bags": whole(0, 3, 2)}, "first_bags that ascend from 0"),
    ("find_and_pool", {"first_bags": whole(1, 2, 4)}, "first_bags that ascend from 0"),
    ("find_and_pool", {"first_features": whole(0, 1, 1)}, "first_features that ascend from 0"),
    ("find_and_pool", {"first_features": whole(0, 2)}, "number of first_features = 3, got 2"),
    # the last block of a table may have fewer rows, no other block, and states have the same rows
    ("gather_rows", {"rows": whole(9), "blocks": SHORT_LAST}, r"rows in \[-1, 9\), got 9"),
    ("gather_rows", {"blocks": SHORT_LAST[::-1]}, "the elements of a block = 12, got 3"),
    ("touch_scores_", {"tables": whole(3)}, "the result of prepare_tables"),
    ("gather_pool", {"weights": SHORT_SECOND}, r"rows in \[-1, 5\), got one outside"),
    ("update_rows_", {**update(2), "weights": SHORT_SECOND, "rows": whole(0, 4, -1, 3, 3)},
     "the elements of a block = 1, got 4"),
    ("init_rows_", {"rows": whole(0, 12)}, r"rows in \[0, 12\), got 12"),
    ("init_rows_", {"rows": whole(0, -1)}, r"rows in \[0, 12\), got -1"),
    ("prepare_tables", {"initial": whole(1, 5, 0, 0, 3, 6, 0, 1)}, r"kind in \[0, 2\], got 3"),
    ("init_rows_", {"kind": 3}, r"kind in \[0, 2\], got 3"),
    ("init_rows_", {"parameters": [1.0]}, "the number of parameters = 6, got 1"),
    ("gather_rows", {"rows": whole(-2)}, r"rows in \[-1, 12\), got -2"),
    ("gather_rows", {"columns": -3}, r"columns in \[1, 2\^31\), got 2 and -3"),
    ("gather_rows", {"shift": 3}, "the elements of a block = 24, got 12"),
    ("gather_rows", {"dtype": torch.float16}, "blocks of dtype float16, got float32"),
    ("gather_rows", {"dtype": torch.int8, "blocks": []}, "float32, float16 or bfloat16"),
    ("touch_scores_", {"rows": whole(0, 8, -1, 7, 3, 0)}, "rows of the table's scores"),
    ("touch_scores_", {"rows": whole(0, -2, -1, 7, 3, 0)}, "got one outside"),
    ("touch_scores_", {"steps": whole(5, 6, 2**32 - 1)}, r"steps in \[0, 2\^32 - 1\), got 4294967295"),
    ("touch_scores_", {"times": whole(1, 1, 1, 1, 1)}, "the number of times = 6, got 5"),
    ("touch_scores_", {"times": torch.ones(6)}, "times of dtype"),
    ("touch_scores_", {"times": whole(1, 1, 0, 1, 1, 1)}, r"times in \[1, 2\^32\), got 0"),
    ("touch_scores_", {"times": whole(1, 1, 1, 1, 1, 2**32)}, r"times in \[1, 2\^32\), got 42"),
    ("touch_scores_", {"steps": whole(5, -1, 7)}, r"steps in \[0, 2\^32 - 1\), got -1"),
    ("read_scores", {"rows": whole(0, 8, -1, 7, 3, 0)}, r"rows in \[-1, 8\) .*, got row 8"),
    ("read_scores", {"rows": whole(0, 7, -1, 7, 3, -2)}, r"rows in \[-1, 4\) .*, got row -2"),
    ("write_scores_", {"rows": whole(0, 8, -1, 7, 3, 0)}, r"rows in \[-1, 8\) .*, got row 8"),
    *(("write_scores_", {"last_seen": whole(0, 0, 0, 0, 0, wrong)}, r"last_seen in .*, got row 0")
      for wrong in (-2, 2**32 - 1)),
    *(("write_scores_", {"counts": whole(0, wrong, 0, wrong, 0, 0)}, r"counts in .*, got row 7")
      for wrong in (-1, 2**32)),
    ("add_rows_", {"first_rows": [8, 0]}, "room for the new rows .*, got 1 rows from 8 on of 8. Res"),
    ("add_rows_", {"first_rows": [-1, 0]}, "room for the new rows .*, got 1 rows from -1 on"),
    ("add_rows_", {"first_rows": [2**63 - 1, 0]}, "room for the new rows .*, got 1 rows from 92"),
    ("add_rows_", {"reused": whole(1, 2, 3), "reused_offsets": [0, 3, 3]}, "room .*, got -1 rows"),
    ("add_rows_", {"steps": [9, 2**32 - 1]}, r"steps in \[0, 2\^32 - 1\), got 4294967295"),
    ("add_rows_", {"steps": [-1, 9]}, r"steps in \[0, 2\^32 - 1\), got -1"),
    ("add_rows_", {"counts": whole(1, 2)}, "the number of counts = 3, got 2"),
    ("add_rows_", {"new_offsets": [0, 4, 3]}, "ascending table_offsets, got 4 before 3"),
    ("add_rows_", {"reused_offsets": [0, 1]}, "the number of table_offsets = 3, got 2"),
    ("add_rows_", {"first_rows": [6]}, "the number of first_rows and steps = 2, got 1"),
    ("add_rows_", {"rows": None}, "both rows and new_index, or neither, got one of them"),
    ("add_rows_", {"places": whole(0)}, "the number of places = 3, got 1"),
    ("add_rows_", {"tables": whole(3)}, "the result of prepare_tables"),
    ("commit_step_", {"begun_first_rows": [8, 0]}, "room for the new rows .*, got 1 rows from 8 on of 8"),
    ("commit_step_", {"waiting_steps": whole(9, -1)}, r"steps in \[0, 2\^32 - 1\), got -1"),
    ("commit_step_", {"counters": whole(3)}, "the result of prepare_tables"),
    ("remove_rows_", {"rows": whole(0, 8, 0)}, r"rows in \[0, 8\), got 8"),
    ("remove_rows_", {"rows": whole(0, 2, -1)}, r"rows in \[0, 4\), got -1"),
    *(("admit", {"rules": whole(*rule, 0, 0, 0, 0)}, f"they have counters, got {rule[0]}, {rule[1]}, ")
      for rule in ((4, 1, 0, 0), (-1, 1, 0, 0), (2, 1, 0, 0), (0, 1, 34, 0), (1, 1, -1, 0))),
    ("admit", {"counters": whole()}, "whether they have counters, got 1, 9, 0 and 1"),
    ("admit", {"counters": whole(3)}, "the result of prepare_tables"),
    ("admit", {"new_offsets": whole()}, r"new_offsets \[T \+ 1\], got none"),
    ("admit", {"new_offsets": whole(0, 3, 4)}, "the last of table_offsets = 5, got 4"),
    ("admit", {"new_offsets": whole(0, 5), "rules": whole(0, 0, 0, 0), "squares": torch.ones(33).double()},
     "the tables of counters = 1, got 2"),
    ("admit", {"asks": torch.ones(4).bool()}, "the number of asks = 5, got 4"),
    ("admit", {"counted": whole(1)}, "the number of counted = 5, got 1"),
    *(("lowest_rows", {"questions": whole(*question)}, rule)
      for question, rule in (
          ((2, 3, 1, 9, 2), r"tables in \[0, 2\), got 2"), ((-1, 3, 1, 9, 2), r"tables in .*, got -1"),
          ((0, 9, 1, 9, 2), r"rows in \[0, 8\], got 9"), ((0, -1, 1, 9, 2), r"rows in \[0, 8\], got -1"),
          ((1, 5, 1, 9, 2), r"rows in \[0, 4\], got 5"), ((0, 3, 1, 9, -1), "most >= 0, got -1"),
          ((0, 3, 1, 9, 2, 0, 0), "the elements of questions = 5, got 7"),
      )),
    ("lowest_rows", {"half_lives": whole(0)}, "the elements of half_lives = 80, got 1"),
    *(("choose_listed", {"spans": whole(*span, 1, 1, 2, 1)}, f"spans .* inside .* got {span[0]}, {span[1]}, ")
      for span in ((2, 0, 3, 2), (-1, 0, 3, 2), (0, -1, 3, 2), (0, 2, 1, 2), (0, 0, 4, 2), (0, 0, 3, -1))),
    ("choose_listed", {"listed": [torch.ones(2, 3).long()] * 2}, r"lists of shape \[3, M\], got 2 dim"),
    *((op, {"kept": whole(1)}, "both kept and kept_offsets, or neither, got one of them")
      for op in ("lowest_rows", "choose_listed")),
    ("choose_listed", {"spans": whole(0, 0, 3, 2)}, "the elements of spans = 8, got 4"),
    ("ids_of_rows", {"first": -1}, "0 <= first <= last, got -1 and 4"),
    ("ids_of_rows", {"first": 5}, "0 <= first <= last, got 5 and 4"),
    ("count_cells", {"bits": -1}, r"bits in \[0, 16\], got -1"),
    ("count_cells", {"bits": 17}, r"bits in \[0, 16\], got 17"),
    ("count_cells", {"slots": filled_slots(), "moved": whole(-1, -1)}, "number of maps = 1, got 2"),
    ("ids_between", {"slots": filled_slots(), "moved": whole(-1, -1)}, "number of maps = 1, got 2"),
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
    ("mark_new_", {"rows": whole(0, 512, -1, 7, 3, 0, 0, 0)}, "rows below 512, the marks of table 0"),
    ("mark_new_", {"rows": whole(0, 0, 0, 0, 0, 7, 2**63 - 1, 0)}, "rows below 512, .* table 1"),
    ("mark_new_", {"layout": torch.tensor([[0, 1, 5, 1]] * 3)}, "shift >= 6 in layout, got 5"),
    ("scatter_rows_", {"rows": whole(0, 12)}, r"rows in \[0, 12\), got 12"),
    ("scatter_rows_", {"columns": 2**62}, r"columns in \[1, 2\^31\)"),
    ("sort_by_owner", {"lengths": whole(3, 0, 2)}, "lengths of at least 0 that add up to the 4 ids"),
    ("sort_by_owner", {"lengths": whole(2**63 - 1, 2**63 - 1, 6)}, "lengths of at least 0"),
    ("sort_by_owner", {"lengths": whole(4, -1, 1)}, "lengths of at least 0"),
    ("sort_by_owner", {"lengths": torch.ones(3)}, "lengths of dtype int64, got float32"),
    ("sort_by_owner", {"weights": whole(1, 2, 3, 4)}, "weights of dtype float32, got int64"),
    ("sort_by_owner", {"weights": torch.ones(3)}, "the number of weights = 4, got 3"),
    ("sort_by_owner", {"ranks": 0}, r"ranks in \[1, 1048576\], got 0"),
    ("sort_by_owner", {"ranks": 2**20 + 1}, r"ranks in \[1, 1048576\], got 1048577"),
    ("gather_pool", {"offsets": whole(0, 2, 1, 4, 5)}, "ascending offsets, got 2 before 1"),
    ("gather_pool", {"offsets": whole(-1, 2, 2, 4, 5)}, r"offsets inside the ids \[0, 5\], got -1"),
    ("gather_pool", {"offsets": whole(0, 2, 2, 4, 6)}, r"offsets inside the ids \[0, 5\], got 0 to 6"),
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
    ("update_rows_", {"optimizer": 1, "hyper": hyper_of(1)}, "blocks of states = 3, got 0"),
    ("update_rows_", {"hyper": []}, "the number of hyper-parameters = 1, got 0"),
    ("update_rows_", {**update(2), "hyper": [0.1, 0.1, 0.1, 3.0, 0.0]},
     r"weight_decay_mode in \[0, 2\], got 3"),
    ("update_rows_", {"rows": whole(0, 8, 0, 0, 0)}, r"rows in \[-1, 8\), got one outside"),
    ("update_rows_", {"grad_scales": [1.0]}, "the number of grad_scales = 2, got 1"),
    ("update_rows_", {"senders": whole(0, 0, 0, 0, 0)}, "senders of dtype int32, got int64"),
    ("update_rows_", {"senders": whole(0, 0).int()}, "the number of senders = 5, got 2"),
    ("update_rows_", {"senders": whole(0, -2, 0, 0, 0).int()}, r"senders in \[-1, 1048576\), got -2"),
    ("update_rows_", {"senders": whole(0, 2**20, 0, 0, 0).int()}, r"got -1 to 1048576"),
    ("update_rows_", {"mark_layout": torch.tensor([[0, 1, 6, 1]])}, "lines of mark_layout = 2, got 1"),
    ("update_rows_", {"mark_layout": torch.tensor([[0, 0, 5, 1]] * 2)}, "shift of at least 6 .*got 5"),
    ("update_rows_", {"mark_layout": torch.tensor([[0, 1, 6, 1]] * 2)}, "1 blocks of marks, got 0"),
    (
        "update_rows_",
        {
            "mark_layout": torch.tensor([[0, 2**31 - 1, 31, 1]] * 2),
            "marks": [torch.zeros(64, dtype=torch.uint8)],
        },
        "2147483647 blocks of marks, got 1",
    ),
    # first columns, steps, modes
    ("init_rows_", {"first_column": -37}, r"first_column in \[0, 2\^31\), got -37"),
    ("update_rows_", {"on_nonfinite": [1, 1]}, "tensors of nonfinite = 2, got 0"),
    ("update_rows_", refusals(1), "number of on_nonfinite = 2, got 1"),
    ("update_rows_", refusals(1, 3), r"on_nonfinite in \[0, 2\], got 3"),
    ("update_rows_", refusals(1, -1), r"on_nonfinite in \[0, 2\], got -1"),
    ("update_rows_", refusals(1, 1) | {"nonfinite": [whole(0), whole(0, 0)]}, "nonfinite = 1, got 2"),
    ("update_rows_", refusals(1, 1) | {"nonfinite": [torch.zeros(1)] * 2}, "int64, got float32"),
    ("update_rows_", refusals(1, 1) | {"nonfinite": [whole(0)] * 2}, "memory"),
    ("update_rows_", {"streams": streams(column=-1)}, r"first column in \[0, 2\^31\) .*, got -1"),
    ("update_rows_", adam(streams=streams(step=0)), "a step of at least 1 in streams, got 0"),
    ("update_rows_", update(2) | {"hyper": [0.1, 0.1, 0.1, 0.5, 0]}, r"decay_mode in \[0, 2\], got 0.5"),
    *[("update_rows_", update(5) | {"hyper": [rate, 0, 0]}, f"learning rate above 0 with FTRL, .* {rate:g}")
      for rate in (0.0, -0.5, 1e-50)],
    # the first invalid number is named, and before a row outside
    ("touch_scores_", {"rows": ids_of(0, 7, -1, 7, 3, 4), "times": ids_of(1, 1, 1, 1, -5, 2**32)},
     r"times in \[1, 2\^32\), got -5"),
    ("touch_scores_", {"rows": ids_of(0, 7, -1, 8, 3, 0), "times": ids_of(0, 1, 1, 1, 1, 1)},
     r"times in \[1, 2\^32\), got 0"),
    ("cache_rows_", {"table_offsets": whole()}, "at least one of table_offsets, got none"),
    ("cache_rows_", {"table_offsets": whole(0, 2, 4, 6)}, "the number of tables = 2, got 3"),
    ("cache_rows_", {"cache_layout": whole(1, 7, 4, 0, 7, 2).view(2, 3)}, "tables below 2, got 0 after 1"),
    ("cache_rows_", {"cache_layout": whole(0, 7, 4, 2, 7, 2).view(2, 3)}, "tables below 2, got 2 after 0"),
    ("cache_rows_", {"cache_layout": whole(0, 7, 3, 1, 7, 2).view(2, 3)}, "at least the 4 rows .*, got 3"),
    ("cache_rows_", {"cache_layout": whole(0, 7, 6, 1, 7, 2).view(2, 3)}, "3 frames from row 6 on, got room"),
    ("row_places", {"cache_layout": whole(0, 7, 4, 1, 7, 2**62).view(2, 3)}, "the 2 rows .*, got 4611686018"),
]  # fmt: skip


@pytest.mark.parametrize("op", dict.fromkeys(op for op, _, _ in WRONG))
def test_values_out_of_range_change_nothing(device, op):
    skip_without_kernel(op, device)
    for of, change, rule in WRONG:
        if of == op:
            check_refuses(op, {**SAMPLES[op][0](), **change}, rule)


# Segments

# Table, first bag, bags, offset and stride of the outputs. The samples have two tables of 3 and 2
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
@pytest.mark.parametrize("op", ["gather_pool", "update_rows_"])
def test_segments_hold_each_bag_and_fill_each_element_once(op, segments, rule):
    """A bag in two segments was read with the columns of the wrong table; outputs had holes."""
    sample = SAMPLES[op][0]() | {"segments": torch.tensor(segments)}
    if rule is None:
        getattr(ops, op)(**sample)
    else:
        check_refuses(op, sample, rule)


@pytest.mark.usefixtures("device")
def test_any_tiling_gives_each_bag_its_place():
    by_rows = ops.gather_pool(**pool_sample(pooled())).view(2, 5)
    given = pooled() | {"segments": torch.tensor([[1, 2, 2, 0, 2], [0, 0, 2, 4, 3]])}
    by_tables = ops.gather_pool(**pool_sample(given))
    assert torch.equal(by_tables[:4].view(2, 2), by_rows[:, 3:])
    assert torch.equal(by_tables[4:].view(2, 3), by_rows[:, :3])


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
    for argument in getattr(ops, op)._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield argument.name


WRITES = [(op, name) for op in SAMPLES for name in written(op)]


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
    and other not in ("layout", "segments", "streams", "tables", "counters")
]


@pytest.mark.parametrize("op", dict.fromkeys(op for op, _, _ in SHARED))
def test_tensors_that_are_written_share_no_memory(device, op):
    """Rows that lie in the weights were checked before, and changed by, an update."""
    skip_without_kernel(op, device)
    elsewhere = DESCRIPTIONS if device == "cuda" else ()  # on the CPU, beside tensors of a GPU
    for target, other in [(target, other) for of, target, other in SHARED if of == op]:
        if other not in elsewhere:
            check_refuses_shared_memory(op, target, other)


def check_refuses_shared_memory(op, target, other):
    sample, found = tensors(op)
    together = torch.zeros(1 << 10, dtype=torch.uint8)
    for place, name in enumerate((target, other)):  # the second begins 16 bytes after the first
        tensor = found[name]
        piece = together[16 * place : 16 * place + tensor.numel() * tensor.itemsize]
        shared = piece.view(tensor.dtype).view(tensor.shape)
        if place:
            shared = shared.copy_(tensor)
        value = sample[name]
        sample[name] = [shared, *value[1:]] if isinstance(value, list) else shared
    first, second = first_of(sample[target]), first_of(sample[other])
    if first.numel() * first.itemsize <= 16:  # they do not overlap then: put one on the other
        sample[other] = (
            together[: second.numel() * second.itemsize].view(second.dtype).view(second.shape)
        )
        sample[other].copy_(found[other])
    rule = "tensors that share no memory with a tensor that the op writes"
    check_refuses(op, sample, rule, f"{other} in {target}")


BROKEN = [
    (op, name) for op in SAMPLES for name in tensors(op)[1] if tensors(op)[1][name].numel() > 0
]


def accepted_without_storage():
    """Returns the cases in which an op takes a tensor whose storage is empty, or a byte short."""
    accepted = []
    for op, name in BROKEN:
        if op in ON_DEVICES_ONLY:
            continue
        sample, found = tensors(op)
        tensor, value = found[name].clone(), sample[name]
        sample[name] = [tensor, *value[1:]] if isinstance(value, list) else tensor
        for left in (tensor.numel() * tensor.itemsize - 1, 0):
            tensor.untyped_storage().resize_(left)
            try:
                getattr(ops, op)(**sample)
                accepted.append((op, name, left))
            except RuntimeError as error:
                if "in a storage that holds its" not in str(error):
                    accepted.append((op, name, left, str(error)))
    return accepted


def test_a_storage_holds_its_tensor():
    assert call(accepted_without_storage) == []


@pytest.mark.parametrize("op", dict.fromkeys(op for op, _ in BROKEN))
def test_elements_begin_where_they_may(device, op):
    skip_without_kernel(op, device)
    for name in [name for of, name in BROKEN if of == op]:
        sample, found = tensors(op)
        tensor = found[name]
        if tensor.itemsize == 1:  # bytes begin anywhere
            continue
        memory = bytearray(tensor.numel() * tensor.itemsize + 8)
        moved = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1)
        value, moved = sample[name], moved.view(tensor.shape).copy_(tensor)
        sample[name] = [moved, *value[1:]] if isinstance(value, list) else moved
        check_refuses(op, sample, "at a multiple of .* bytes, got", name)


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
def test_places_of_a_damaged_map_are_copied_as_they_are():
    """Adding 1 to the row of place -2^63 overflowed (seen under UBSan)."""
    damaged = torch.stack([torch.arange(8), torch.full((8,), -(2**63))], 1)
    [slots] = ops.grown_slots([damaged], [8], [0])
    assert sorted(slots.tolist()) == [[id, -(2**63)] for id in range(8)]
