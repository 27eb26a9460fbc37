"""The argument fuzzer: calls every op of torch.ops.torchrec_dyn with valid and with crafted arguments.

A valid call must give the same bits on any number of threads. A crafted call may raise an error, in the form
of the house rules, and changes nothing then. No call may end the process, write outside its arguments, or
take longer than a minute. `make fuzz` runs this under AddressSanitizer and UBSan. Other tests judge numbers.

    fuzz_ops.py --seconds 300                 makes calls in child processes until the time is up
    fuzz_ops.py --seed 12 --op gather_pool    repeats one call in this process, and prints its arguments

A call is a function of its op and seed, noted before the call: so a call that ends its process is known.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import op_cases
import op_cases_lookup
import torch
from device_ops import simt_library
from op_cases import Arguments
from op_faults import OF_TORCH, spoil
from op_samples import ON_DEVICES_ONLY
from torch import Tensor

import torchrec_dyn._C

OPS = torch.ops.torchrec_dyn
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
LIMIT_OF_A_CALL = 60  # seconds
ROOM = (
    3 << 30
)  # bytes that a process may allocate; a sanitizer has a limit of its own (tests/csrc/run)
MOST_FOUND = 20  # child processes that end with a finding
FOUND = 9  # their exit status; that of a sanitizer is 1
# Ops whose errors have the names of those that do a part of them alone (csrc/lookup/row_changes_arguments.h).
PARTS = {"commit_step_": ("remove_rows_", "touch_scores_", "add_rows_")}
# Ops that fill a map up to its last slot before they raise: to count empty slots first would read the whole
# map. The callers keep slots empty.
FILLS_A_MAP = ("insert", "move_slots", "add_rows_", "commit_step_")
# Ops whose results are other ones in each call: random numbers, or the order in which threads meet.
DIFFER = ("prepare_tables", "cache_rows_")
CASES = {
    name.removeprefix("draw_"): draw
    for name, draw in {**vars(op_cases), **vars(op_cases_lookup)}.items()
    if name.startswith("draw_")
}
# AddressSanitizer ends a process whose C++ has no memory. Without it the process gets an error.
NO_MEMORY = re.compile("AddressSanitizer: (allocator is out of memory|requested allocation size)")
ERROR = re.compile(r"(\w+): expected .+, got .+\.", re.DOTALL)


class Finding(Exception):
    """A call did what it must not do."""


def registered_ops() -> dict[str, Any]:
    names = torch._C._dispatch_get_all_op_names()
    ours = sorted(name.split("::")[1] for name in names if name.startswith("torchrec_dyn::"))
    return {name: getattr(OPS, name).default._schema for name in ours}


def use_kernels_of_devices() -> torch.library.Library:
    """Gives ops without a kernel for the CPU those of the simt build, as long as the result lives."""
    kernels = torch.library.Library("torchrec_dyn", "IMPL")
    for op in ON_DEVICES_ONLY:
        kernels.impl(op, getattr(simt_library(), op).default, "CPU")
    return kernels


def check_every_op_has_a_case(schemas: dict[str, Any]) -> None:
    if left_out := schemas.keys() - CASES.keys():
        raise SystemExit(
            f"fuzz_ops: expected a case of each op, got none of {left_out}. Add draw_..."
        )


# One call


class Memory(NamedTuple):
    """The bytes of a storage now and before the call, and the ranges that the call may write."""

    now: Tensor
    before: Tensor
    written: list[tuple[int, int]]

    def is_unchanged(self, but_written: bool) -> bool:
        now, before = self.now, self.before
        if but_written and self.written:
            now, before = now.clone(), before.clone()
            for begin, end in self.written:
                now[begin:end] = before[begin:end] = 0
        return torch.equal(now, before)


def tensors_of(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def read_memory(schema: Any, given: Arguments) -> list[Memory]:
    """Copies the whole memory of all arguments."""
    memories: dict[int, Memory] = {}
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_of(given[argument.name]):
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            if storage.data_ptr() not in memories:
                now = torch.empty(0, dtype=torch.uint8).set_(storage)
                memories[storage.data_ptr()] = Memory(now, now.clone(), [])
            if writes and tensor.numel():
                item = tensor.element_size()
                begin = tensor.storage_offset() * item
                last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                memories[storage.data_ptr()].written.append((begin, begin + (last + 1) * item))
    return [*memories.values()]


def copies(given: Arguments) -> Arguments:
    """Returns the arguments with contiguous copies of all tensors."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(one) for one in value]
        is_tensor = isinstance(value, Tensor)
        return value.clone(memory_format=torch.contiguous_format) if is_tensor else value

    return {name: copy(value) for name, value in given.items()}


def make_call(schema: Any, seed: int, show: bool = False) -> str:
    """Makes one call; returns how it ended. Raises Finding if the op did what it must not do."""
    op = schema.name.split("::")[1]
    rng = random.Random(f"{op} {seed}")
    torch.set_num_threads(rng.choice((1, 1, 2, 4)))
    given = CASES[op](rng)
    names = [argument.name for argument in schema.arguments]
    assert sorted(given) == sorted(names), f"draw_{op}: expected arguments {names}, got {[*given]}"
    faults = [] if rng.random() < 0.3 else spoil(rng, schema, given)
    if show:
        print(f"{op} {seed}: {'; '.join(faults) or 'valid'}; threads: {torch.get_num_threads()}")
        for name in names:
            print(f"  {name} = {shown(given[name])}", flush=True)
    again = {} if faults else copies(given)
    memories = read_memory(schema, given)
    signal.alarm(LIMIT_OF_A_CALL)
    try:
        result = getattr(OPS, op).default(**given)
    except Exception as error:
        signal.alarm(0)
        if any(tensors_of(value) for value in given.values()):  # torch chooses a kernel by a tensor
            check_error(op, error, faults)
        if op == "update_rows_" and "expected finite" in str(error):  # it counts the refused rows
            counts = {tensor.untyped_storage().data_ptr() for tensor in given["nonfinite"]}
            memories = [memory for memory in memories if memory.now.data_ptr() not in counts]
        is_unchanged = all(memory.is_unchanged(but_written=False) for memory in memories)
        if not is_unchanged and not (op in FILLS_A_MAP and "a full map" in str(error)):
            raise Finding(f"changed its arguments before it raised {first_line(error)}") from error
        return "refused"
    signal.alarm(0)
    if not all(memory.is_unchanged(but_written=True) for memory in memories):
        raise Finding("wrote outside of the arguments that it may write")
    if faults:
        return "legal"
    if op in DIFFER:
        return "valid"
    torch.set_num_threads(3 if torch.get_num_threads() == 1 else 1)
    if difference := differing((result, given), (getattr(OPS, op).default(**again), again)):
        raise Finding(f"gave other numbers on other threads: {difference}")
    return "valid"


def differing(first: tuple[Any, Arguments], second: tuple[Any, Arguments]) -> str:
    """Returns the name of an argument whose numbers differ, "the result", or ""; NaNs are equal."""
    for name, left, right in (
        ("the result", first[0], second[0]),
        *((name, value, second[1][name]) for name, value in first[1].items()),
    ):
        for a, b in zip(tensors_of(left), tensors_of(right), strict=True):
            if a.shape != b.shape or not ((a == b) | (a != a) & (b != b)).all():
                return name
    return ""


def check_error(op: str, error: Exception, faults: list[str]) -> None:
    """Raises Finding for an error that a call must not raise."""
    if not faults and "expected memory for this call" in str(error):
        return  # a row of up to 2^31 columns may be wider than the room
    if not faults:
        raise Finding(f"refused valid arguments: {first_line(error)}") from error
    if {fault.split(": ")[-1] for fault in faults} & OF_TORCH:
        return
    form = ERROR.search(str(error))  # torch puts the file and line before the text
    if (
        not isinstance(error, (RuntimeError, ValueError, MemoryError))
        or form is None
        or form[1] not in (op, *PARTS.get(op, ()))
    ):
        raise Finding(f"raised {type(error).__name__} in another form: {first_line(error)}")


def first_line(error: object) -> str:
    """Returns the first line of an error, without the place in the core that torch puts before it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^.*/csrc/\S+:\d+, ", "", line)[:200]


def shown(value: Any) -> str:
    """Returns an argument as text, without reading memory that is not there."""
    if isinstance(value, list) and tensors_of(value):
        return "[" + "\n      ".join(shown(tensor) for tensor in value) + "]"
    if not isinstance(value, Tensor):
        return repr(value)
    text = (
        f"{str(value.dtype)[6:]} {[*value.shape]} strides {[*value.stride()]}"
        if value.layout == torch.strided
        else "sparse"
    )
    if value.layout != torch.strided or value.device.type != "cpu":
        return f"{text} on {value.device}"
    bytes_needed = (value.storage_offset() + value.numel()) * value.element_size()
    if value.untyped_storage().nbytes() < bytes_needed and value.is_contiguous():
        return f"{text}, memory of {value.untyped_storage().nbytes()} bytes"
    return f"{text} at {value.data_ptr() % 64} of 64: {value.flatten()[:40].tolist()}"


# Many calls


def make_calls(schemas: dict[str, Any], first: int, calls: int, until: float, last: int) -> int:
    """Calls the ops in turn; writes the seed of each call into the file `last` before it.

    Returns the exit status: FOUND if a call did what it must not do.
    """
    if not SANITIZED:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    names, ends, status = [*schemas], collections.Counter[str](), 0
    for seed in range(first, first + calls):
        if time.monotonic() > until:
            break
        op = names[seed % len(names)]
        os.pwrite(last, f"{seed:20}".encode(), 0)
        try:
            ends[make_call(schemas[op], seed)] += 1
        except Finding as finding:
            print_finding(op, seed, str(finding))
            status = FOUND
    print(f"fuzz_ops: {', '.join(f'{n} {end}' for end, n in sorted(ends.items()))}", flush=True)
    return status


def print_finding(op: str, seed: int, text: str) -> None:
    print(f"FOUND {op} {text}\n      repeat: fuzz_ops.py --seed {seed} --op {op}", flush=True)


def run_child(errors: int, *calls: Any) -> int:
    """Makes calls in a fork, which has the imports; returns how it ended, a signal as a negative number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(errors, 2)
            status = make_calls(*calls)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def last_words(lines: list[str]) -> str:
    """Returns the lines of a crash report that say what happened and where in our files."""
    what = r"ERROR: \w+Sanitizer|runtime error|terminate|what\(\)|/csrc/\w|^\w*(Error|Exception)"
    telling = [line for line in lines if re.search(what, line)]
    return "\n".join(f"      {line[:180]}" for line in (telling or lines)[:6])


def fuzz(schemas: dict[str, Any], first: int, seconds: float, calls: int) -> int:
    """Makes calls in child processes, one after another, until the time is up or a few have ended wrongly."""
    until, seed, end, found = time.monotonic() + seconds, first, first + calls, 0
    print(f"fuzz_ops: {len(schemas)} ops, library {torchrec_dyn._C.__file__}", flush=True)
    while seed < end and time.monotonic() < until and found < MOST_FOUND:
        # A new process now and then: memory that a call spoilt is not kept.
        count = min(4000, end - seed)
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as last:
            code = run_child(errors.fileno(), schemas, seed, count, until, last.fileno())
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
            seed += count
            if code in (0, FOUND):
                found += code == FOUND
                continue
            at = int(os.pread(last.fileno(), 20, 0))
        seed, words = at + 1, last_words(lines)
        if not (SANITIZED and NO_MEMORY.search(words)):
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            print_finding([*schemas][at % len(schemas)], at, f"ended the process: {how}")
            print(words, flush=True)
            found += 1
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="until when calls are made")
    parser.add_argument("--calls", type=int, default=10**9, help="how many calls are made at most")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**9), help="of the first call"
    )
    parser.add_argument("--op", help="repeats the call with the seed")
    given = parser.parse_args()
    schemas, kernels = registered_ops(), use_kernels_of_devices()  # noqa: F841  (kept)
    check_every_op_has_a_case(schemas)
    if given.op:
        print(make_call(schemas[given.op], given.seed, show=True))
        return 0
    return fuzz(schemas, given.seed, given.seconds, given.calls)


if __name__ == "__main__":
    sys.exit(main())
