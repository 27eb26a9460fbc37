"""The machine code of the kernels that every step runs; their speed without a GPU to time them.

The bounds hold for one version of nvcc: another may do better or worse with the same source.
"""

from functools import cache
from pathlib import Path

import pytest
import sass

OBJECTS = Path(__file__).resolve().parents[2] / "build" / "objects" / "csrc"
NVCC = "13.0"
COMPUTE_CAPABILITY = 90


@cache
def kernels_of(name: str, folder: Path, *kernels: str) -> dict[str, sass.Kernel]:
    """The kernels that a file lists for nvcc, as `make build` has compiled them; `name`: "lookup/pooling".

    With parts of names of kernels only these are read: all of "lookup/row_update" take 12 s.
    """
    path = OBJECTS / f"{name}_launch.cu.o"
    if not path.exists():
        pytest.skip("there are no objects of nvcc")
    codes = list(sass.cubins(path.read_bytes(), COMPUTE_CAPABILITY))
    if not codes:
        pytest.skip(f"the kernels were not compiled for compute capability {COMPUTE_CAPABILITY}")
    cubin = folder / f"{path.name}.cubin"
    cubin.write_bytes(codes[0])
    text = sass.listing(cubin, *kernels)
    if sass.compiler_of(text) != NVCC:
        pytest.skip(f"the bounds are for nvcc {NVCC}, not for {sass.compiler_of(text)}")
    return sass.kernels(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "source",
    ["lookup/pooling", "lookup/row_update", "storage/storage", "life/life", "ranks/owners"],
)
def test_no_kernel_keeps_anything_in_local_memory(source, folder):
    kernels = kernels_of(source, folder)
    assert len(kernels) > 2
    assert not [one.name for one in kernels.values() if one.frame or one.local_accesses]


def test_a_find_reads_a_line_at_once(folder):
    kernel = kernels_of("storage/storage", folder, "FindRows")["FindRows"]
    assert kernel.warps >= 48
    line = kernel.most_in_flight(128)
    assert len(line) == 4
    [store, *_] = kernel.places("STG.E.64")
    way = kernel.way_round((*line, store))
    assert len(way) <= 130
    assert kernel.latencies(way) <= 4


def quickest(kernel: sass.Kernel, *ways: tuple[int, ...]) -> tuple[int, ...]:
    """Of these ways round that with the fewest latencies, and then instructions."""
    found = [way for way in map(kernel.way_round, ways) if way]
    assert found, "so many loads are nowhere in flight together"
    return min(found, key=lambda way: (kernel.latencies(way), len(way)))


ROWS = ["float", "Float16", "BFloat16"]
COLUMNS = 128  # bits of a row that a thread reads at once


@pytest.mark.parametrize("output", ROWS)
@pytest.mark.parametrize(
    "rows, warps, of_four", [("float", 40, 50), ("BFloat16", 32, 100), ("Float16", 32, 340)]
)
def test_the_forward_reads_four_rows_at_once(rows, output, warps, of_four, folder):
    """Four row numbers, then the four rows: two times of waiting for memory, and nothing else to wait for."""
    kernel = kernels_of("lookup/pooling", folder)[f"PoolBags<{rows}, {output}, true>"]
    assert kernel.warps >= warps
    numbers = [batch for batch in kernel.batches(64) if len(batch) == 4]
    units = [batch for batch in kernel.batches(COLUMNS) if len(batch) == 4]
    way = quickest(kernel, *((*n, *u) for n in numbers for u in units))
    assert len(way) <= of_four
    assert kernel.latencies(way) == 2


def test_the_forward_of_bags_of_one_id(folder):
    """A thread: the segment, the offsets, the row number, the row, and the store."""
    kernel = kernels_of("lookup/pooling", folder)["PoolBags<float, float, true>"]
    [store] = kernel.places("STG.E.128")
    units = [batch for batch in kernel.batches(COLUMNS) if len(batch) == 1]
    way = quickest(kernel, *((*unit, store) for unit in units))
    assert len(way) <= 120
    assert kernel.latencies(way) <= 5


@pytest.mark.parametrize("output", ROWS)
@pytest.mark.parametrize("rows", ROWS)
def test_weighted_bags_and_rows_of_several_blocks_are_read_four_at_once(rows, output, folder):
    kernel = kernels_of("lookup/pooling", folder)[f"PoolBags<{rows}, {output}, false>"]
    assert kernel.warps >= 32
    assert len(kernel.most_in_flight(COLUMNS)) == 4


TILES = [(4, 1, 28, 275), (4, 2, 24, 315), (8, 2, 24, 330), (16, 2, 24, 330), (16, 4, 16, 430)]


def of_tile(lanes: int, units: int) -> tuple[str, str]:
    """The two kernels of an update by rows of this width."""
    shape = f"unsigned int, TileShape<{lanes}, {units}, true, false>"
    return f"UpdateRows<float, {shape}, (Visit)0>", f"SumPieces<{shape}>"


@pytest.mark.parametrize(("lanes", "units", "warps", "most"), TILES)
def test_an_update_reads_row_state_and_gradient_at_once(lanes, units, warps, most, folder):
    """`most`: instructions of a warp, for 32 / lanes rows of one id each, by row-wise Adagrad."""
    updates, sums = of_tile(lanes, units)
    listed = [name for tile in TILES for name in of_tile(*tile[:2])]  # at once, for all tests
    kernels = kernels_of("lookup/row_update", folder, *listed)
    kernel = kernels[updates]
    assert kernel.warps >= warps
    batches = [kernel.batch_from(place) for place in range(len(kernel.instructions))]
    head = kernel.places("LDG.E.128")[:2]  # of the table
    row = next(batch for batch in batches if len(batch) >= 4 and batch[0] > head[1])
    assert max(kernel.instructions[place].bits for place in row) == 128
    store, *_ = kernel.places("STG.E.128")
    square = [place for place in kernel.places("SHFL.BFLY") if place < store][-1]
    assert len(kernel.way((0, *head, *row, square, store))) <= most
    pieces = kernels[sums]
    assert pieces.warps >= min(warps, 28)
    terms = pieces.most_in_flight(128)
    assert len(terms) == 4 * units
    assert pieces.latencies(pieces.way_round(terms)) == 1


LISTING = """
//--------------------- .text.turn --------------------------
\t.section\t.nv.info,"",@"SHT_CUDA_INFO"
\t//----- nvinfo : EIATTR_REGCOUNT
        /*0004*/ \t.word\tindex@(_Z4turni)
        /*0008*/ \t.word\t0x00000030
\t//----- nvinfo : EIATTR_FRAME_SIZE
        /*0010*/ \t.word\tindex@(_Z4turni)
        /*0014*/ \t.word\t0x00000008
\t.section\t.nv.info._Z4turni,"",@"SHT_CUDA_INFO"
\t//----- nvinfo : EIATTR_MAX_THREADS
        /*0018*/ \t.word\t0x00000100
\t.section\t.text._Z4turni,"ax",@progbits
.text._Z4turni:
"""
NONE = 7  # no scoreboard


def code(*lines: tuple[str, int, int] | str) -> dict[str, sass.Kernel]:
    """Reads a listing of labels and instructions, with the scoreboard that each sets, and a mask of those
    that it waits for.
    """
    shown = []
    for place, line in enumerate(lines):
        if isinstance(line, str):
            shown.append(f"{line}:")
            continue
        text, sets, waits = line
        shown.append(f"        /*{16 * place:04x}*/    {text} ;    /* 0x{place:016x} */")
        shown.append(f"    /* 0x{sets << 46 | waits << 52:016x} */")
    return sass.kernels(LISTING + "\n".join(shown) + "\n")


def test_the_reader_follows_scoreboards_and_branches():
    [kernel] = code(
        ".L_x_0",
        ("LDG.E.64 R2, desc[UR4][R8.64]", 0, 0),
        ("@P0 LDG.E.128 R4, desc[UR4][R8.64]", 1, 0),
        ("@P1 BRA `(.L_x_2)", NONE, 0),
        ("LD.E.128 R12, desc[UR4][R8.64]", 2, 0),
        ("FADD R4, R4, R12", NONE, 0b010),
        (".L_x_1"),
        ("@!P0 BRA `(.L_x_0)", NONE, 0b001),
        ("STL [R1], R4", NONE, 0b100),
        ("EXIT", NONE, 0),
        (".L_x_2"),
        ("LDG.E.128 R12, desc[UR4][R8.64]", 2, 0b011),
        ("LDG.E.128 R16, desc[UR4][R8.64]", 3, 0),
        ("FADD R4, R4, R12", NONE, 0b100),
        ("BRA `(.L_x_1)", NONE, 0),
    ).values()
    assert (kernel.name, kernel.registers, kernel.frame) == ("turn(int)", 48, 8)
    assert (kernel.threads, kernel.warps, kernel.local_accesses) == (256, 40, 1)
    assert kernel.places("LDG.E.128") == (1, 8, 9)
    assert kernel.most_in_flight(64) == (0,)
    assert kernel.most_in_flight(32) == ()
    assert kernel.batches(128) == [(1, 3), (8, 9), (3,), (9,)]
    assert kernel.most_in_flight(128) == (1, 3), "the line to .L_x_1 is shorter"
    way = kernel.way_round((1, 3))
    assert way == (1, 2, 3, 4, 5, 0)
    assert kernel.latencies(way) == 1
    assert kernel.latencies(kernel.way_round((8, 9))) == 2


@pytest.mark.parametrize("registers, warps", [(32, 64), (40, 48), (41, 40), (80, 24), (255, 8)])
def test_registers_limit_the_warps_of_an_sm(registers, warps):
    assert sass.Kernel("turn", registers, 0, 256, (), {}).warps == warps
