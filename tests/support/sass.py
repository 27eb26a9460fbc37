"""Reads the machine code of kernels (SASS): their registers, instructions, and loads in flight.

A load of a GPU does not stop its thread. It takes one of six scoreboards; a later instruction names in
its control bits the scoreboards that it waits for, and waits for all loads that hold them. So loads
overlap as long as no instruction between them waits for one of them.
"""

import importlib.metadata
import re
import struct
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FATBIN = b"\x50\xed\x55\xba"
CUBIN = 2  # the kind of an entry that holds machine code; others hold PTX
SCOREBOARDS = 6
COMPRESSED = 0xA000  # flags of an entry: LZ4 or Zstandard


@dataclass(frozen=True)
class Instruction:
    """One instruction. `sets` is the scoreboard that it holds until its result is there, `waits` a mask."""

    guard: str
    opcode: str
    operands: str
    sets: int | None
    waits: int

    @property
    def is_load(self) -> bool:
        """True if it reads global memory, perhaps by a generic address."""
        return self.opcode.split(".")[0] in {"LDG", "LD"}

    @property
    def bits(self) -> int:
        """The bits that a thread loads."""
        sizes = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
        return next((sizes[part] for part in self.opcode.split(".") if part in sizes), 32)


@dataclass(frozen=True)
class Kernel:
    """The machine code of one kernel, with the functions that it calls behind it."""

    name: str
    registers: int
    frame: int  # bytes of local memory
    threads: int  # of a block
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @property
    def warps(self) -> int:
        """Warps that an SM of compute capability 9.0 holds; each quarter of it has 16,384 registers."""
        in_registers = 4 * (16_384 // (32 * (-(-self.registers // 8) * 8)))
        of_block = self.threads // 32
        return of_block * min(in_registers // of_block, 64 // of_block, 32)

    @property
    def local_accesses(self) -> int:
        """Instructions that read or write local memory: arrays and spilled registers."""
        return sum(one.opcode.split(".")[0] in {"LDL", "STL"} for one in self.instructions)

    def places(self, opcode: str) -> tuple[int, ...]:
        """The places of instructions whose name begins with these parts, such as "STG" or "LDG.E.128"."""
        return tuple(
            place
            for place, one in enumerate(self.instructions)
            if f"{one.opcode}.".startswith(f"{opcode}.")
        )

    def batches(self, bits: int) -> list[tuple[int, ...]]:
        """The places of loads of a size that are in flight together, for each first of them; most first."""
        batches = {
            tuple(
                place for place in self.batch_from(first) if self.instructions[place].bits == bits
            )
            for first, one in enumerate(self.instructions)
            if one.is_load and one.bits == bits
        }
        return sorted(batches, key=lambda batch: (-len(batch), batch))

    def most_in_flight(self, bits: int) -> tuple[int, ...]:
        """The places of the most loads of a size that are in flight together; of several such, those on the
        shortest way round.
        """
        batches = self.batches(bits)
        longest = [batch for batch in batches if len(batch) == len(batches[0])]
        return min(longest, key=lambda batch: len(self.way_round(batch)), default=())

    def way_round(self, through: tuple[int, ...]) -> tuple[int, ...]:
        """The shortest way through these places in their order and back to the first: once round a loop.
        Empty if there is no such way.
        """
        return self.way((*through, *through[:1]))

    def way(self, through: tuple[int, ...]) -> tuple[int, ...]:
        """The shortest way through these places in their order, without the last. Empty if there is none."""
        ways = [self._way(start, end) for start, end in pairwise(through)]
        return tuple(place for way in ways for place in way) if all(ways) else ()

    def latencies(self, way: tuple[int, ...]) -> int:
        """The number of loads a thread waits for one after the other, once round a loop. Of loads that are in
        flight together, the later ones cost nothing.
        """
        passed = [0]
        of_loads = [0] * SCOREBOARDS  # latencies that have passed when the loads of each are there
        for place in (*way, *way):
            one = self.instructions[place]
            waited = [of_loads[k] for k in range(SCOREBOARDS) if one.waits >> k & 1]
            passed.append(max(passed[-1], *waited, 0))
            if one.is_load and one.sets is not None:
                of_loads[one.sets] = passed[-1] + 1
        return passed[-1] - passed[len(way)]

    def batch_from(self, first: int) -> tuple[int, ...]:
        """The loads from a place on, in one line, before an instruction that waits for one of them."""
        held, loads = 0, []
        for place in range(first, len(self.instructions)):
            one = self.instructions[place]
            if one.waits & held:
                break
            if one.is_load:
                loads.append(place)
                held |= 0 if one.sets is None else 1 << one.sets
            if place + 1 not in self._next(place):
                break
        return tuple(loads)

    def _way(self, start: int, end: int) -> list[int]:
        """The shortest way of at least one step, without its end; empty if there is none."""
        before: dict[int, int] = {}
        queue = deque([start])
        while queue and end not in before:
            place = queue.popleft()
            for after in self._next(place):
                if after not in before:
                    before[after] = place
                    queue.append(after)
        if end not in before:
            return []
        way = [before[end]]
        while way[-1] != start:
            way.append(before[way[-1]])
        return way[::-1]

    def _next(self, place: int) -> tuple[int, ...]:
        """Where a thread may go on. A call returns, and a wait for other threads ends."""
        one = self.instructions[place]
        kind = one.opcode.split(".")[0]
        always = one.guard in {"", "@PT"}
        if kind in {"EXIT", "RET", "BRX", "KILL"}:
            return () if always else (place + 1,)
        if kind != "BRA":
            return (place + 1,)
        condition, label = re.fullmatch(r"(.*?)`\((\S+)\)", one.operands).groups()
        target = self.labels[label]
        return (target,) if always and not condition else (place + 1, target)


def cubins(object_file: bytes, architecture: int) -> Iterator[bytes]:
    """The machine code for one architecture in an object that nvcc made."""
    at = object_file.find(FATBIN)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", object_file, at)
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, start, length = struct.unpack_from("<HHIQ", object_file, entry)
            (its_architecture,) = struct.unpack_from("<I", object_file, entry + 28)
            (flags,) = struct.unpack_from("<Q", object_file, entry + 40)
            if kind == CUBIN and its_architecture == architecture:
                assert not flags & COMPRESSED, (
                    "nvcc packed its machine code: read it from nvcc -cubin"
                )
                yield object_file[entry + start : entry + start + length]
            entry += start + length
        at = object_file.find(FATBIN, at)


def listing(cubin: Path, *names: str) -> str:
    """Returns the listing of nvdisasm: of all functions, or of those with one of these parts of names."""
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    [tool] = [file.locate() for file in files if file.name == "nvdisasm"]
    command = [str(tool), "--print-instruction-encoding", str(cubin)]
    if names:
        numbers = [
            number
            for number, shown in _functions(cubin).items()
            if any(name in shown for name in names)
        ]
        command += ["--cuda-function-index", ",".join(map(str, numbers))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _functions(cubin: Path) -> dict[int, str]:
    """The names of the functions by the numbers of their symbols."""
    command = ["readelf", "--symbols", "--wide", str(cubin)]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # number: value, size, type, binding, visibility, other signs, section, name
    found = re.findall(r"^ *(\d+): +\w+ +\w+ +FUNC .* (\S+)$", table, re.M)
    shown = [_struct_of(name) for name in _demangled([name for _, name in found])]
    return {int(number): name for (number, _), name in zip(found, shown, strict=True)}


def compiler_of(text: str) -> str:
    """The version of the nvcc that made the code of a listing, such as "13.0"."""
    return re.search(r"Cuda compilation tools, release ([\d.]+)", text)[1]


def kernels(text: str) -> dict[str, Kernel]:
    """The kernels of a listing by the names of their structs, such as "PoolBags<float, float>"."""
    registers = _attributes(text, "REGCOUNT")
    frames = _attributes(text, "FRAME_SIZE")
    sections = {
        section.partition(",")[0]: section for section in re.split(r"\n\t\.section\t", text)
    }
    names = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    read = {}
    for name, shown in zip(names, _demangled(names), strict=True):
        if name not in registers:
            continue
        attributes = sections.get(f".nv.info.{name}", "")
        threads = re.search(r"EIATTR_MAX_THREADS.*?\.word\s+0x(\w+)", attributes, re.S)
        struct = _struct_of(shown)
        read[struct] = Kernel(
            struct,
            registers[name],
            frames.get(name, 0),
            int(threads[1], 16) if threads else 1024,
            *_code(sections[f".text.{name}"]),
        )
    return read


def _struct_of(shown: str) -> str:
    """The struct of a kernel, of the name of the function that runs it."""
    struct = shown.removeprefix("void ").replace("torchrec_dyn::", "").replace("> >", ">>")
    return re.sub(r"^simt::run_\w+<(.*)>\(.*", r"\1", struct).strip()


def _demangled(names: list[str]) -> list[str]:
    said = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return said.stdout.splitlines()


def _attributes(text: str, kind: str) -> dict[str, int]:
    found = re.findall(rf"EIATTR_{kind}\n.*?index@\((\S+)\)\n.*?\.word\s+0x(\w+)", text, re.S)
    return {name: int(number, 16) for name, number in found}


def _code(section: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions and labels of a section. Each instruction is 128 bits, shown in two lines."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    shown = ""
    for line in section.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif first := re.match(r"\s+/\*\w{4,}\*/\s+(.*?) ;\s+/\* 0x\w+ \*/", line):
            shown = first[1]
        elif shown and (second := re.match(r"\s+/\* 0x(\w+) \*/", line)):
            instructions.append(_instruction(shown, int(second[1], 16)))
            shown = ""
    return tuple(instructions), labels


def _instruction(shown: str, high: int) -> Instruction:
    """From its text and the upper 64 of its bits, the last of which are control bits."""
    guard, opcode, operands = re.fullmatch(r"(@\S+)?\s*(\S+)\s*(.*)", shown).groups()
    scoreboard = high >> 46 & 7
    return Instruction(
        guard or "", opcode, operands, None if scoreboard == 7 else scoreboard, high >> 52 & 63
    )
