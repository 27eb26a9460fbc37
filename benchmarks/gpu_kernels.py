"""Libraries with CUDA kernels for one kind of GPU: the kernels for all others are taken out.

FBGEMM's libraries have each kernel once for every kind of GPU, not packed. So two thirds of a library are of
no use to one machine. CUDA's nvprune takes them out of objects, but not out of libraries.

Source: CUDA's header fatbinary_section for the fat binary; its entries as `cuobjdump --list-elf` lists them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50  # of a fat binary
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
ENTRY = struct.Struct(
    "<HHIQ12xI"
)  # kind, version, bytes of this header, bytes after it, 12 bytes, GPU
MACHINE_CODE = 2  # a kind of entry; 1 is PTX


def _places(library: bytearray) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of each section of fat binaries in an ELF library of 64 bits."""
    (sections,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)

    def section(number: int) -> tuple[int, int, int]:
        name, begin, length = struct.unpack_from("<I20xQQ", library, sections + number * size)
        return name, begin, length

    texts = section(names)[1]
    for number in range(count):
        name, begin, length = section(number)
        if library.startswith(SECTION + b"\0", texts + name):
            yield begin, begin + length


def kernels_for(library: bytes, gpu: str) -> bytes:
    """Returns a library whose fat binaries have machine code for one kind of GPU only.

    Each fat binary keeps its address. Zeros take the place of the entries that are dropped, so the library
    keeps its size, and packs small.

    Args:
        library: an ELF file of 64 bits; without kernels it is returned as it is.
        gpu: for example "9.0".

    Raises:
        ValueError: a fat binary has no code for this GPU.
    """
    wanted, changed = int(gpu.replace(".", "")), bytearray(library)
    for place, end in _places(changed):
        while place < end:
            magic, version, header, length = HEADER.unpack_from(changed, place)
            if magic != MAGIC:  # zeros between two fat binaries
                place += 8
                continue
            entry, kept, others = place + header, b"", set()
            while entry < place + header + length:
                kind, _, own, rest, code_of = ENTRY.unpack_from(changed, entry)
                if (kind, code_of) == (MACHINE_CODE, wanted):
                    kept += changed[entry : entry + own + rest]
                others.add(code_of)
                entry += own + rest
            if not kept:
                raise ValueError(f"gpu_kernels: expected kernels for {wanted}, got {others}.")
            HEADER.pack_into(changed, place, magic, version, header, len(kept))
            changed[place + header : entry] = kept + bytes(length - len(kept))
            place = entry
    return bytes(changed)
