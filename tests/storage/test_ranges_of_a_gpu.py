"""Address ranges of GPUs, and memory of the host for them, on a driver without a GPU (mock_driver.cpp)."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = 2 << 20
NO_MEMORY, OPERATING_SYSTEM, ILLEGAL_ADDRESS, CAPTURED = 2, 304, 700, 900
# What a range calls until its first rows have memory, in order.
CALLS = [
    *("cuDevicePrimaryCtxRetain", "cuDeviceGetCount", "cuCtxPushCurrent", "cuDeviceCanAccessPeer"),
    *("cuMemGetAllocationGranularity", "cuMemAddressReserve"),
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess"),
]
# What memory of the host calls, in order.
HOST_CALLS = [*CALLS[:3], "cuMemHostAlloc"]


def cuda_headers():
    """Returns the folder of CUDA's headers; None without CUDA."""
    nvcc = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        nvcc and Path(nvcc).resolve().parents[1],
    ]
    found = [Path(home, "include") for home in homes if home]
    return next((folder for folder in found if (folder / "cuda.h").exists()), None)


HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(
    HEADERS is None or shutil.which("g++") is None, reason="compiles against CUDA's headers"
)


def newest_change():
    """Returns when a source in csrc, this file or the mock driver was changed, in seconds."""
    files = [Path(__file__), ROOT / "tests/support/mock_driver.cpp"]
    files += [path for folder in ("csrc", "tests/csrc") for path in (ROOT / folder).rglob("*")]
    return max(file.stat().st_mtime for file in files)


@pytest.fixture(scope="module")
def library():
    made = ROOT / "build/simt/mock_driver.so"  # kept: g++ takes 7 s
    if not made.exists() or made.stat().st_mtime < newest_change():
        sources = ["csrc/storage/address_range.cu", "tests/csrc/ptx/virtual_memory.cpp"]
        sources += ["tests/support/mock_driver.cpp"]
        command = ["g++", "-std=c++20", "-Wall", "-shared", "-fPIC", "-Icsrc", f"-I{HEADERS}"]
        command += ["-DTORCHREC_DYN_PTX_DEVICES=3"]
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            new = Path(folder, made.name)
            subprocess.run([*command, "-x", "c++", *sources, "-o", new], check=True, cwd=ROOT)
            new.replace(made)
    library = ctypes.CDLL(str(made))
    for name in ("raise_lost_device", "new_range", "extend", "calls"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


class Driver:
    """The mock driver, with texts in place of bytes."""

    def __init__(self, library):
        self.library = library
        self.before = [0] * 3
        self.before = self.left()

    def new_range(self, bytes_=64 * PAGE, committed=PAGE, on_host=False):
        begin = ctypes.c_void_p()
        size, first = ctypes.c_int64(bytes_), ctypes.c_int64(committed)
        text = self.library.new_range(size, first, ctypes.c_bool(on_host), ctypes.byref(begin))
        return text.decode(), begin

    def extend(self, begin, bytes_):
        return self.library.extend(begin, ctypes.c_int64(bytes_)).decode()

    def fail(self, function="", error=0):
        self.library.fail(function.encode(), error)

    def on_stream(self, number, is_captured=False):
        self.library.set_stream(ctypes.c_void_p(number), is_captured)

    def calls(self):
        called = self.library.calls().decode().splitlines()
        assert not [call for call in called if call.startswith("WRONG")], called
        assert called.count("cuCtxPopCurrent") <= called.count("cuCtxPushCurrent")
        return called

    def left(self):
        """Contexts, ranges and pieces of memory that this test has not given back."""
        ours = self.library
        now = [ours.contexts(), ours.ranges(), ours.pieces()]
        return [count - before for count, before in zip(now, self.before, strict=True)]


@pytest.fixture
def driver(library):
    driver = Driver(library)
    yield driver
    driver.fail()
    library.end_captures()
    driver.on_stream(0)
    library.free_left()
    driver.calls()


def test_memory_is_open_to_every_gpu_that_can_reach_it(driver):
    _, begin = driver.new_range()
    assert driver.extend(begin, 9 * PAGE) == ""
    opened = [call for call in driver.calls() if call.startswith("cuMemSetAccess")]
    assert opened == ["cuMemSetAccess 0 1"] * 2
    for _ in range(2):
        driver.library.give_back(begin)
    assert driver.left() == [0, 0, 0]


@pytest.mark.parametrize("function", CALLS)
def test_a_range_that_fails_leaves_nothing_behind(driver, function):
    _, begin = driver.new_range()
    before = driver.left()
    for error, text in ((NO_MEMORY, "no memory"), (ILLEGAL_ADDRESS, f"expected {function} to")):
        driver.fail(function, error)
        assert text in driver.new_range()[0]
        assert driver.left() == before
        if function in CALLS[-3:]:  # growth
            assert text in driver.extend(begin, 9 * PAGE)
            assert driver.left() == before
    driver.fail()
    assert driver.extend(begin, 9 * PAGE) == ""
    for _ in range(2):
        driver.library.give_back(begin)
    assert driver.left() == [0, 0, 0]


@pytest.mark.parametrize("function", HOST_CALLS)
def test_memory_of_the_host_that_fails_leaves_nothing_behind(driver, function):
    for error, text in ((NO_MEMORY, "no memory"), (ILLEGAL_ADDRESS, f"expected {function} to")):
        driver.fail(function, error)
        assert text in driver.new_range(on_host=True)[0]
        assert driver.left() == [0, 0, 0]
    driver.fail(function, OPERATING_SYSTEM)  # as a limit of locked memory is told
    is_limit = function == "cuMemHostAlloc"
    text = "no memory" if is_limit else f"expected {function} to succeed on the GPU, got CUDA error"
    assert text in driver.new_range(on_host=True)[0]
    assert driver.left() == [0, 0, 0]


@pytest.mark.parametrize("bytes_", [1, PAGE - 1, 9 * PAGE])
def test_memory_of_the_host_is_there_at_once(driver, bytes_):
    """It grows in place to its end, by no call."""
    driver.calls()
    text, begin = driver.new_range(bytes_, 1, on_host=True)
    assert text == ""
    calls = driver.calls()
    assert [call for call in calls if call != "cuCtxPopCurrent"] == HOST_CALLS
    ctypes.memset(begin, 7, bytes_)
    assert driver.extend(begin, bytes_) == "" and driver.calls() == []
    assert ctypes.string_at(begin, bytes_) == b"\7" * bytes_
    driver.library.give_back(begin)
    assert driver.left() == [1, 0, 1] and driver.calls() == []
    driver.library.give_back(begin)
    assert driver.left() == [0, 0, 0]


KINDS = {False: "cuMemUnmap", True: "cuMemFreeHost"}  # on_host: what gives the memory back
both_kinds = pytest.mark.parametrize("on_host", KINDS)


@both_kinds
def test_a_range_is_given_back_after_its_kernels(driver, on_host):
    _, begin = driver.new_range(on_host=on_host)
    driver.calls()
    driver.library.give_back(begin)
    calls = driver.calls()
    assert calls.index("cudaDeviceSynchronize") < calls.index(KINDS[on_host])
    assert driver.left() == [0, 0, 0]


@both_kinds
def test_a_range_that_is_dropped_in_a_capture_waits_for_its_end(driver, on_host):
    """To wait for the GPU would end the capture, whichever thread asks."""
    _, begin = driver.new_range(on_host=on_host)
    before = driver.left()
    driver.on_stream(7, is_captured=True)
    driver.library.give_back(begin)
    assert driver.left() == before
    driver.on_stream(8)  # of another thread
    driver.library.free_left()
    assert driver.left() == before and "cudaDeviceSynchronize" not in driver.calls()
    driver.library.end_captures()
    _, other = driver.new_range()
    driver.library.give_back(other)
    assert driver.left() == [0, 0, 0]


@both_kinds
def test_a_range_waits_for_a_capture_that_only_the_driver_knows(driver, on_host):
    _, begin = driver.new_range(on_host=on_host)
    before = driver.left()
    driver.fail("cudaDeviceSynchronize", CAPTURED)
    driver.library.give_back(begin)
    assert driver.left() == before
    driver.fail()
    driver.library.free_left()
    assert driver.left() == [0, 0, 0]


@both_kinds
@pytest.mark.parametrize("function", ["cudaDeviceSynchronize", "cuCtxPushCurrent"])
def test_a_lost_gpu_is_asked_for_nothing_more(driver, function, on_host):
    """After a kernel's error, after a fork, at the end of a process."""
    _, begin = driver.new_range(on_host=on_host)
    driver.calls()
    driver.fail(function, ILLEGAL_ADDRESS)
    driver.library.give_back(begin)
    driver.fail()
    driver.library.free_left()
    assert KINDS[on_host] not in driver.calls()
    assert driver.left()[0] == 0, "contexts"


def test_only_a_lost_gpu_has_another_error_than_lack_of_memory(driver):
    for error in (0, NO_MEMORY):
        driver.fail("cudaMemGetInfo", error)
        assert driver.library.raise_lost_device() == b""
    driver.fail("cudaMemGetInfo", ILLEGAL_ADDRESS)
    text = driver.library.raise_lost_device().decode()
    assert text.startswith(
        "torchrec_dyn: expected an allocation to succeed on the GPU, got an illegal"
    )
    assert text.endswith("CUDA_LAUNCH_BLOCKING=1 shows it.")
