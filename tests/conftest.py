"""Devices, marks, Hypothesis profiles and parts of the deep tests. Tests import nothing from here.

The process that hands out tests to those of xdist reads this file, too, before it starts any of them: torch
and the package, 5 s, are imported where they are used.
"""

import ctypes
import gc
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine
from shards import Shard, draw, part_of, read_shard

gc.disable()  # until all tests are collected: most of what is made till then lives to the end

_FIRM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=25, **_FIRM)
settings.register_profile("ci", max_examples=25, derandomize=True, **_FIRM)
settings.register_profile("deep", max_examples=2000, **_FIRM)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep",
        action="store_true",
        help="the soaks, and the property tests with 2,000 examples each; no other test",
    )
    parser.addoption(
        "--simt",
        action="store_true",
        help="the tests that run kernels of the simt library; no other test",
    )
    parser.addoption(
        "--shard",
        type=read_shard,
        default=Shard(1, 1),
        metavar="K/N",
        help="part K of N of the tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    everyday = "ci" if os.environ.get("CI") else "dev"
    is_deep = config.getoption("--deep")
    settings.load_profile("deep" if is_deep else everyday)
    if not is_deep:  # a constant of Hypothesis's pages, and no setting; the default is 5 minutes
        engine.MAX_SHRINKING_SECONDS = 15


def _has_cuda_kernels() -> bool:
    """Returns True if torch sees a device and our extension was built for it."""
    import torch

    import torchrec_dyn  # noqa: F401  registers the ops

    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    return torch.cuda.is_available() and any(op.startswith("torchrec_dyn::") for op in registered)


def _runs_simt(item: pytest.Item) -> bool:
    """Returns True for a test with the parameter "simt" or the mark of this name."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = any(isinstance(value, str) and value == "simt" for value in values)
    return named or item.get_closest_marker("simt") is not None


def _draw_cases(items: list[pytest.Item]) -> None:
    """Marks the cases of a test as deep that its mark `everyday` leaves out; it draws among the others."""

    def values_of(item: pytest.Item) -> list[str]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return [f"{name}={value!r}" for name, value in params.items()]

    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_drawn = not item.get_closest_marker("needs_cuda") and not item.get_closest_marker("deep")
        if item.get_closest_marker("everyday") and is_drawn:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, of_test in cases.items():
        (count,) = of_test[0].get_closest_marker("everyday").args
        for item in set(of_test) - set(draw(of_test, count, name, values_of)):
            item.add_marker(pytest.mark.deep)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Takes modules and tests out of garbage collection: each would take 0.5 s for them, of no use."""
    found = yield
    gc.freeze()
    gc.enable()
    return found


_LEFT_OUT = pytest.StashKey[Counter[str]]()


def _leave_out(config: pytest.Config, items: list[pytest.Item], reasons: dict[str, str]) -> None:
    """Removes the tests with a mark that has a reason; skips them where no other test would be left.

    To skip thousands of tests, one by one, takes 2 ms each. How many there are is told at the end.
    """
    because: dict[pytest.Item, str] = {}
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                because.setdefault(item, reason)
    if len(because) == len(items):
        for item, reason in because.items():
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    config.hook.pytest_deselected(items=[*because])
    items[:] = [item for item in items if item not in because]
    config.stash[_LEFT_OUT] = Counter(because.values())
    if hasattr(config, "workeroutput"):  # a process of xdist
        config.workeroutput["left_out"] = dict(config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over what a process of xdist has left out; all of them collect the same tests."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = Counter(left_out)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason, count in sorted(config.stash.get(_LEFT_OUT, Counter()).items()):
        terminalreporter.write_line(f"{count:,} tests not run: {reason}")


@pytest.hookimpl(trylast=True)  # after Hypothesis, which marks its tests there
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not _has_cuda_kernels():
        reasons["needs_cuda"] = "no CUDA device, or no CUDA kernels in torchrec_dyn._C"
    if os.environ.get("TORCHREC_DYN_REAL_DEVICE"):
        reasons["mock_only"] = "a GPU in place of the mock device notes nothing"
    else:
        reasons["real_only"] = "for a GPU in place of the mock device: TORCHREC_DYN_REAL_DEVICE=1"
    if not config.getoption("--simt"):
        _draw_cases(items)
    chosen = list(items)
    if config.getoption("--deep"):
        chosen = [
            item
            for item in items
            if item.get_closest_marker("deep") or item.get_closest_marker("hypothesis")
        ]
    else:
        reasons["deep"] = "a soak: make test-deep"
    if config.getoption("--simt"):
        chosen = [item for item in chosen if _runs_simt(item)]
    chosen = part_of(
        chosen, config.getoption("--shard"), lambda item: item.nodeid.partition("[")[0]
    )
    if left_out := set(items) - set(chosen):
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
    _leave_out(config, items, reasons)


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds what a test draws without a generator of its own: the same numbers, whatever tests ran before."""
    import torch

    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats the stack: 1 ms


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown() -> None:
    """Ends a worker of xdist after the test that broke its GPU, on which all later tests would fail."""
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_sessionfinish() -> None:
    """Writes which instructions ran, if the library of the simt tests is a ptx build (tests/csrc/ptx)."""
    if "TORCHREC_DYN_PTX_COVERAGE" not in os.environ or "device_ops" not in sys.modules:
        return
    from device_ops import LIBRARY, simt_library

    if simt_library.cache_info().currsize:
        ctypes.CDLL(str(LIBRARY)).torchrec_dyn_write_coverage()


@pytest.fixture(params=["cpu", "simt", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with the kernels of each device that there is; its tensors stay on the CPU."""
    if request.param != "cpu":
        from device_ops import use_kernels

        use_kernels(monkeypatch, request.param)
        monkeypatch.setenv(
            "TORCHREC_DYN_SYNC_ERRORS", "1"
        )  # errors as on the CPU: by the call itself
    return request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of torch and of our ops, and puts it back."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """A server of S3 on loopback (tests/support/object_store.py), which clients of this process use."""
    from object_store import S3

    server = S3()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()
