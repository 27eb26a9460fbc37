"""Every op has samples that pass opcheck. Invalid arguments: test_crafted_arguments.py."""

import random

import pytest
import torch
from device_ops import kernels_of
from fuzz_ops import CASES as CASES_OF_FUZZER
from fuzz_ops import copies, differing, use_kernels_of_devices
from op_samples import ON_DEVICES_ONLY, SAMPLES
from shards import deep_but

from torchrec_dyn import ops

CASES = [(op, make) for op, makes in SAMPLES.items() for make in makes]
COMPILED = [case for case in CASES if case[0] != "prepare_tables"]  # its result is random
KERNELS = {op: getattr(torch.ops.torchrec_dyn, op).default for op in SAMPLES}
DEVICES = ["simt", pytest.param("cuda", marks=pytest.mark.needs_cuda)]


def test_every_op_has_a_sample():
    registered = torch._C._dispatch_get_all_op_names()
    ours = {name.split("::")[1] for name in registered if name.startswith("torchrec_dyn::")}
    assert ours == set(SAMPLES)


@pytest.fixture(autouse=True, scope="module")
def kernels_of_devices():
    """Ops without a kernel for the CPU run on the simt build's."""
    kernels = use_kernels_of_devices()
    yield
    kernels._destroy()


@pytest.mark.parametrize(("op", "make"), CASES, ids=[op for op, _ in CASES])
def test_opcheck(op, make):
    """Checks the schema's written arguments, and the fake kernel's shapes and dtypes."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(KERNELS[op], (), make(), test_utils=checks)


@pytest.mark.parametrize(
    ("op", "make"),
    deep_but([(op, makes[0]) for op, makes in SAMPLES.items()], COMPILED),
    ids=[op for op, _ in COMPILED],
)
def test_opcheck_of_torch_compile(op, make):
    torch.library.opcheck(KERNELS[op], (), make(), test_utils="test_aot_dispatch_dynamic")


def test_the_kernels_of_the_device_are_called(device):
    """Else every test on a device would be one of the CPU."""
    for op in kernels_of("simt" if device == "cpu" else device):
        is_own = getattr(ops, op) is getattr(torch.ops.torchrec_dyn, op).default
        assert is_own == (device == "cpu"), op


def numbers(arguments):
    """Returns the arguments without handles, which are random numbers."""
    return {name: value for name, value in arguments.items() if name not in ("tables", "counters")}


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_valid_calls_of_the_fuzzer(device):
    """The fuzzer itself calls the CPU's kernels; slots of a map may lie in another order on a GPU.

    Other ops of prepared tables: test_prepared_tables.py, test_scores_ops.py and test_row_changes.py.
    """
    prepared = {"pool_prepared_", "weights_grad_prepared", "update_prepared_", "find_and_pool"}
    prepared |= {"add_rows_", "remove_rows_", "commit_step_", "touch_scores_", "write_scores_"}
    others = {"insert", "erase", "grown_slots", "prepare_tables", *prepared}
    for op in kernels_of("simt") - others - ON_DEVICES_ONLY:
        for seed in range(40):
            given = CASES_OF_FUZZER[op](random.Random(seed))
            with pytest.MonkeyPatch.context() as patch:  # a handle is of one library
                patch.setattr(ops, "prepare_tables", KERNELS["prepare_tables"])
                of_cpu = copies(CASES_OF_FUZZER[op](random.Random(seed)))
            if op == "lowest_rows":  # else the order is any
                given["in_order"] = of_cpu["in_order"] = True
            result = getattr(ops, op)(**given)
            expected = KERNELS[op](**of_cpu)
            difference = differing((result, numbers(given)), (expected, numbers(of_cpu)))
            assert not difference, f"{op}, seed {seed}, on {device}: {difference}"
