"""The argument fuzzer: calls every op of torch.ops.torchrec_dyn with valid and with crafted arguments.

A valid call must return what the plain formulas of op_cases_*.py say. A crafted call must do so too, or raise
an error in the form of the house rules and change nothing. No call may end the process, write outside its
arguments, or take longer than a minute. `make fuzz` runs this under AddressSanitizer and UBSan.

    fuzz_ops.py --seconds 300                 makes calls in child processes until the time is up
    fuzz_ops.py --seed 12 --op gather_pool    repeats one call in this process, and prints its arguments

A call is a function of its op and seed. Both are logged before the call, so a call that ends its process is
known.
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
from typing import Any, NamedTuple, TextIO

import op_cases_id_map  # noqa: F401  (these five register the cases)
import op_cases_life  # noqa: F401
import op_cases_lookup  # noqa: F401
import op_cases_ranks  # noqa: F401
import op_cases_storage  # noqa: F401
import torch
from op_cases import CASES, Arguments, Refused, Unjudged
from op_faults import OF_TORCH, UNJUDGED, spoil
from torch import Tensor

import torchrec_dyn._C

OPS = torch.ops.torchrec_dyn
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
LIMIT_OF_A_CALL = 60  # seconds
ROOM = (
    3 << 30
)  # bytes that a process may allocate; a sanitizer has a limit of its own (tests/csrc/run)
MOST_CRASHES = 4  # of one op; then the op is left out
# Ops that fill a map up to its last slot before they raise: to count empty slots first would read the whole
# map. The callers keep slots empty.
FILLS_A_MAP = ("insert", "move_slots")
# AddressSanitizer ends a process whose C++ has no memory. Without it the process gets an error.
NO_MEMORY = re.compile("AddressSanitizer: (allocator is out of memory|requested allocation size)")
ERROR = re.compile(r"(\w+): expected .+, got .+\.", re.DOTALL)


class Finding(Exception):
    """A call did what it must not do."""


def registered_ops() -> dict[str, Any]:
    names = torch._C._dispatch_get_all_op_names()
    ours = sorted(name.split("::")[1] for name in names if name.startswith("torchrec_dyn::"))
    return {name: getattr(OPS, name).default._schema for name in ours}


def check_every_op_has_a_case(schemas: dict[str, Any]) -> None:
    for op in sorted(schemas.keys() ^ CASES.keys()):
        raise SystemExit(
            f"fuzz_ops: expected a case of each op and no other, got {op}. Add draw_{op} and check_{op}."
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
    """Makes one call; returns `valid`, `refused` or `legal`, and `unjudged` where no formula has the result.

    Raises:
        Finding: if the op did what it must not do.
    """
    op = schema.name.split("::")[1]
    rng = random.Random(f"{op} {seed}")
    torch.set_num_threads(rng.choice((1, 1, 2, 4)))
    case = CASES[op]
    given = case.draw(rng)
    names = [argument.name for argument in schema.arguments]
    assert sorted(given) == sorted(names), f"draw_{op}: expected arguments {names}, got {[*given]}"
    faults = [] if rng.random() < 0.3 else spoil(rng, schema, given)
    kinds = {fault.split(": ")[-1] for fault in faults}
    if show:
        print(f"{op} {seed}: {'; '.join(faults) or 'valid'}; threads: {torch.get_num_threads()}")
        for name in names:
            print(f"  {name} = {shown(given[name])}", flush=True)
    is_judged = not kinds & UNJUDGED
    before = copies(given) if is_judged else {}
    memories = read_memory(schema, given)
    signal.alarm(LIMIT_OF_A_CALL)
    try:
        result = getattr(OPS, op).default(**given)
    except Exception as error:
        signal.alarm(0)
        if any(tensors_of(value) for value in given.values()):  # torch chooses a kernel by a tensor
            check_error(op, error, faults)
        if op == "update_rows_" and "expected finite" in str(
            error
        ):  # it counts the rows that it refuses
            counts = {tensor.untyped_storage().data_ptr() for tensor in given["nonfinite"]}
            memories = [memory for memory in memories if memory.now.data_ptr() not in counts]
        is_unchanged = all(memory.is_unchanged(but_written=False) for memory in memories)
        if not is_unchanged and not (op in FILLS_A_MAP and "a full map" in str(error)):
            raise Finding(f"changed its arguments before it raised {first_line(error)}") from error
        return "refused"
    signal.alarm(0)
    if not all(memory.is_unchanged(but_written=True) for memory in memories):
        raise Finding("wrote outside of the arguments that it may write")
    end = "legal" if faults else "valid"
    if not is_judged:
        return f"{end}, unjudged"
    try:
        case.check(before, given, result)
    except Refused as rule:
        raise Finding(f"accepted arguments that break a rule: {rule}") from None
    except Unjudged:
        return f"{end}, unjudged"
    except AssertionError as difference:
        raise Finding(f"returned or wrote a wrong number: {first_line(difference)}") from None
    return end


def check_error(op: str, error: Exception, faults: list[str]) -> None:
    """Raises Finding for an error that a call must not raise."""
    if not faults:
        raise Finding(f"refused valid arguments: {first_line(error)}") from error
    if {fault.split(": ")[-1] for fault in faults} & OF_TORCH:
        return
    form = ERROR.search(str(error))  # torch puts the file and line before the text
    if (
        not isinstance(error, (RuntimeError, ValueError, MemoryError))
        or form is None
        or form[1] != op
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


def make_calls(
    schemas: dict[str, Any], first: int, calls: int, left_out: list[str], log: int
) -> None:
    """Calls the ops in turn; writes `op seed` to the file `log` before each call, then how the call ended."""
    if not SANITIZED:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    names = [*schemas]
    for seed in range(first, first + calls):
        op = names[seed % len(names)]
        if op in left_out:
            continue
        os.write(log, f"{op} {seed}\n".encode())
        try:
            end = make_call(schemas[op], seed)
        except Finding as finding:
            end = f"! {finding}"
        os.write(log, f"= {end}\n".encode())


def start_child(errors: Any, *calls: Any) -> tuple[int, TextIO]:
    """Makes calls in a child process; returns its process id and its log.

    A fork of this process, which makes no call itself: a new Python would read torch again after every crash.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(errors.fileno(), 2)
            make_calls(*calls, theirs)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(theirs)
    return child, os.fdopen(ours)


class Report:
    """The results of the calls of all child processes."""

    def __init__(self) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.ops: collections.Counter[str] = collections.Counter()
        self.crashes: collections.Counter[str] = collections.Counter()
        self.findings: collections.Counter[str] = collections.Counter()

    def add_finding(self, op: str, seed: int, text: str) -> None:
        """Prints a finding; the fourth of one kind and all later ones are only counted."""
        kind = f"{op} {re.sub(r'[0-9.e+-]*[0-9]|nan|inf', 'n', text)}"
        self.findings[kind] += 1
        if self.findings[kind] <= 3:
            print(
                f"FOUND {op} {text}\n      repeat: fuzz_ops.py --seed {seed} --op {op}", flush=True
            )

    def read(self, child: int, log: TextIO, errors: Any, until: float) -> int | None:
        """Reads the log of a child; returns the seed of the call that ended it, None if it made all calls."""
        op, seed, is_open, is_killed = "", -1, False, False
        for line in log:
            head, _, text = line.rstrip("\n").partition(" ")
            is_open = head != "="
            if is_open:
                op, seed = head, int(text)
                continue
            self.ops[op] += 1
            self.ends["found" if text.startswith("! ") else text] += 1
            if text.startswith("! "):
                self.add_finding(op, seed, text[2:])
            if time.monotonic() > until and not is_killed:
                os.kill(child, signal.SIGKILL)
                is_killed = True
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0 or is_killed:
            return None
        self.ops[op] += is_open
        words = last_words(errors)
        if SANITIZED and NO_MEMORY.search(words):
            self.ends["without memory"] += 1
            return seed
        self.ends["crash"] += 1
        self.crashes[op] += 1
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        when = "" if is_open else " after its call"  # memory that the call spoilt
        self.add_finding(op, seed, f"ended the process{when}: {how}")
        print(words, flush=True)
        return seed


def last_words(errors: Any) -> str:
    """Returns the lines of a crash report that say what happened and where in our files."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    telling = [
        line
        for line in lines
        if re.search(
            r"ERROR: \w+Sanitizer|runtime error|terminate|what\(\)|/csrc/\w|^\w*(Error|Exception)",
            line,
        )
    ]
    return "\n".join(f"      {line[:180]}" for line in (telling or lines)[:6])


def fuzz(schemas: dict[str, Any], first: int, seconds: float, calls: int) -> int:
    """Makes calls in child processes, one after another, until the time is up or all calls are made."""
    report, began = Report(), time.monotonic()
    until, seed, end = began + seconds, first, first + calls
    print(
        f"fuzz_ops: {len(schemas)} ops, from seed {first} on, library {torchrec_dyn._C.__file__}",
        flush=True,
    )
    while seed < end and time.monotonic() < until:
        left_out = [op for op, crashes in report.crashes.items() if crashes >= MOST_CRASHES]
        some = min(
            4000, end - seed
        )  # a new process now and then: memory that a call spoilt is not kept
        with tempfile.TemporaryFile() as errors:
            child, log = start_child(errors, schemas, seed, some, left_out)
            with log:
                crashed = report.read(child, log, errors, until)
        seed = seed + some if crashed is None else crashed + 1
    ends = ", ".join(f"{count} {end}" for end, count in sorted(report.ends.items()))
    seconds = time.monotonic() - began
    print(f"fuzz_ops: {sum(report.ops.values())} calls in {seconds:.0f} s: {ends}")
    missed = schemas.keys() - report.ops.keys()
    for kind, count in sorted(report.findings.items()):
        print(f"  {count} x {kind}")
    if missed:
        print(f"fuzz_ops: expected a call of every op, got none of {sorted(missed)}.")
    return 1 if report.findings or missed else 0


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
    schemas = registered_ops()
    check_every_op_has_a_case(schemas)
    if given.op:
        print(make_call(schemas[given.op], given.seed, show=True))
        return 0
    return fuzz(schemas, given.seed, given.seconds, given.calls)


if __name__ == "__main__":
    sys.exit(main())
