"""The argument fuzzer: a short pass over every op, and the faults that the fuzzer itself must find."""

import os
import sys
import time
from pathlib import Path

import fuzz_ops
import pytest
import torch
from forked import run_ranks, run_script

pytestmark = pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="make fuzz does this")
SUPPORT = Path(__file__).parents[1] / "support"


def test_ops_take_valid_arguments_and_refuse_the_rest():
    """About 20 calls of each op, the same in every run. `make fuzz` makes more, under sanitizers."""
    run = run_script(SUPPORT / "fuzz_ops.py", "--seed", "0", "--calls", "600", time_limit=240.0)
    assert run.codes == [0], run.stdout + run.stderr


# Ops with one fault each, of `x` that must have three numbers, and the faults as the fuzzer reports them.
FAULTS = {
    "right": None,
    "dies": "ended the process: SIGABRT",
    "hangs": "ended the process: SIGALRM",
    "counts_threads": "gave other numbers on other threads: the result",
    "refuses": "refused valid arguments: refuses: expected three numbers, got three.",
    "writes_x": "wrote outside of the arguments that it may write",
    "writes_and_raises": "changed its arguments before it raised writes_and_raises: expected",
    "says_little": "raised RuntimeError in another form: no",
    "takes_all": None,
    "has_no_case": None,
}


def kernel_of(name):
    def kernel(x, y):
        if name == "dies":
            os.abort()
        if name == "hangs":
            time.sleep(20)
        if name == "refuses":
            raise RuntimeError("refuses: expected three numbers, got three.")
        if name == "writes_x" and x.numel() == 3:
            x.mul_(2)
        if name == "writes_and_raises":
            y.mul_(2)
        if name == "says_little" and x.numel() != 3:
            raise RuntimeError("no")
        if name != "takes_all" and x.numel() != 3:
            raise RuntimeError(f"{name}: expected three numbers, got {x.numel()}.")
        return x + (torch.get_num_threads() if name == "counts_threads" else 1)

    return kernel


def fuzz_ops_with_faults():
    """In a process of its own: the fuzzer with ops of FAULTS in place of ours."""

    def draw(rng):
        return {"x": torch.ones(3), "y": torch.ones(3)}

    def spoil(rng, schema, given):
        given["x"] = torch.ones(4)
        return ["x: one_more"]

    fuzz_ops.CASES.clear()
    library = torch.library.Library("torchrec_dyn", "FRAGMENT")
    schemas = {}
    for name in FAULTS:
        library.define(f"{name}(Tensor x, Tensor(a!) y) -> Tensor")
        library.impl(name, kernel_of(name), "CPU")
        fuzz_ops.CASES[name] = draw
        schemas[name] = getattr(torch.ops.torchrec_dyn, name).default._schema
    del fuzz_ops.CASES["has_no_case"]
    try:
        fuzz_ops.check_every_op_has_a_case(schemas)
    except SystemExit as error:
        print(error)
    del schemas["has_no_case"]
    fuzz_ops.spoil, fuzz_ops.LIMIT_OF_A_CALL = spoil, 1
    sys.exit(fuzz_ops.fuzz(schemas, 0, 60.0, 3 * len(schemas)))


def test_faults_are_found():
    run = run_ranks(fuzz_ops_with_faults)
    assert run.codes == [1], run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND")]
    for op, fault in FAULTS.items():
        told = [line for line in lines if line.startswith(f"FOUND {op} ")]
        assert bool(told) == (fault is not None), op
        assert all(line.startswith(f"FOUND {op} {fault}") for line in told), told
    assert "a case of each op, got none of {'has_no_case'}" in run.stdout
