"""Two GPUs for tests of host code without one: tensors say cuda:0 or cuda:1, and their memory is on the CPU.

    with MockDevice() as device:
        store = RowStore(4, 4, torch.float32, torch.device("cuda:0"))
        ...
    assert device.reads == []

Our ops run on the kernels of the simt build (csrc/simt.h), other ops on those of torch for the CPU. It shows
what a GPU makes slow or refuses: reads by the host, which wait for all kernels before them, or for an event;
tensors of two devices in one op, and ops of ours that have no kernel for CUDA.
"""

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from device_ops import DESCRIPTIONS, LIBRARY, kernels_of, leaves_of, mapped, simt_library
from mock_fbgemm import fbgemm_gradients, select_segments
from mock_gpus import CUDA, OTHER_GPU, CurrentStream, choose_gpu, exchange_gpu, gpu_of, is_cuda
from torch.overrides import TorchFunctionMode

from torchrec_dyn import ops
from torchrec_dyn.ranks import host_group

run_backward = torch.autograd._engine_run_backward
_patches = []  # of the devices that are entered; not in a device, which copies of its tensors copy
ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "torchrec_dyn", ROOT / "tests"  # not .venv, which has torch's files
TORCHREC = Path(importlib.util.find_spec("torchrec").origin).parent
HOST = torch.device("cpu")
aten = torch.ops.aten
# The shape of their result depends on the contents of their arguments, or their result is a number of Python.
READING = {
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.allclose),
    *(aten.nonzero, aten.masked_select, aten.bincount, aten.repeat_interleave),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),
}
# Results of our ops that describe other arguments: on the CPU for every device (torchrec_dyn/ops.py).
HOST_RESULTS = {
    **{"collect_new": {2}, "prepare_tables": {0}},
    **{"find_and_pool": {3}, "admit": {3}, "lowest_rows": {3}, "choose_listed": {2, 3}},
}
FAR = 2**61  # what the host reads of a copy that it has not waited for
COPIES = {aten._to_copy, aten.copy_, aten._copy_from}
# Functions of torch whose calls the device changes though none of their arguments may be a device, and never.
_CHANGED = {
    *(torch.Tensor.pin_memory, torch.Tensor.tolist, torch.Tensor.data_ptr),
    *(torch.Tensor.new_tensor, torch.Tensor.to, torch.Tensor.cuda),
}
_UNCHANGED = {torch.device, torch._C._nn._parse_to}


@functools.cache
def cuda_guard():
    """Returns a function that sets or unsets torch's guard and hooks for CUDA: see cuda_guard.cpp."""
    torch_folder = Path(torch.__file__).parent
    if torch.cuda.is_available():
        return lambda is_set: torch._C._ensureCUDADeviceGuardSet()
    source = Path(__file__).with_name("cuda_guard.cpp")
    library = LIBRARY.with_name(
        f"cuda_guard-{torch.__version__}.so"
    )  # built once, for all processes
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include"]
            command += [str(source), "-o", f"{folder}/it.so", f"-L{torch_folder}/lib"]
            subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
            Path(folder, "it.so").replace(library)
    return ctypes.CDLL(str(library)).set_cuda_guard


@functools.cache
def _chooser():
    """Returns the function of the simt build that chooses the GPU of its next calls; PTX has one GPU."""
    return getattr(ctypes.CDLL(str(LIBRARY)), "torchrec_dyn_choose_gpu", lambda gpu: None)


def _run_on(gpu):
    _chooser()(ctypes.c_int64(gpu.index))


class _Event:
    """Stands for torch's event."""

    def record(self, stream=None):
        """Does nothing: all work is done when it is queued, but for copies (_event_of)."""


class Note(NamedTuple):
    op: str
    place: str  # file and line of the package, or else of the test


class MockTensor(torch.Tensor):
    """A tensor of the mock device; `memory` is the tensor on the CPU."""

    @staticmethod
    def __new__(cls, memory, device, gpu):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=gpu,
        )

    def __init__(self, memory, device, gpu):
        self.memory = memory
        self.notes = device

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = next(one for one in leaves_of((args, kwargs)) if isinstance(one, MockTensor))
        return first.notes.run(func, args, kwargs)

    def record_stream(self, stream):
        self.notes.recorded.append((self, stream))
        if getattr(stream, "device", self.device) != self.device:
            self.notes._note(self.notes.mixed, "record_stream")

    def __repr__(self):
        return f"MockTensor({self.memory})"


class _Reentered(TorchFunctionMode):
    """Enters a device again where torch has left it."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """As the device."""
        return self._device.__torch_function__(func, types, args, kwargs)


class MockDevice(TorchFunctionMode):
    """While entered, tensors for CUDA are mock ones; notes what the device's owner should know.

    Attributes:
        is_mock: False for a GPU in its place (real_device.py), which notes nothing.
        reads: waits of the host for the device, in order.
        order: names of our ops that were called, and "wait" for each of `reads`, in order.
        mixed: calls with tensors of two devices.
        between: copies from one GPU to the other.
        without_kernel: calls of our ops that have no kernel for CUDA.
        recorded: tensors and streams of `record_stream`.
    """

    is_mock = True

    def __init__(self, streams=None):
        super().__init__()
        self.streams = streams
        self.reads, self.mixed, self.without_kernel, self.recorded = [], [], [], []
        self.order, self.between = [], []
        self.copies = []  # to the host, under way: the copy, and what it will hold
        simt_library()
        self._waits = ctypes.c_int64.in_dll(ctypes.CDLL(str(LIBRARY)), "torchrec_dyn_host_waits")

    def __enter__(self):
        cuda_guard()(True)
        fbgemm_gradients()
        patches = ExitStack()
        _patches.append(patches)
        for owner, name, replacement in (
            (ops, "has_cuda_kernels", lambda: True),  # the kernels of the simt build
            (torch.cuda, "current_device", lambda: exchange_gpu(-1)),
            (torch.cuda, "set_device", choose_gpu),
            (torch.cuda, "_exchange_device", exchange_gpu),  # of torch.cuda.device
            (torch.cuda, "_maybe_exchange_device", exchange_gpu),
            (torch.autograd, "_engine_run_backward", self._run_backward),
        ):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        if self.streams is not None:
            patches.enter_context(self.streams.installed())
        elif torch.cuda.current_stream.__module__ == "torch.cuda":  # not a test's own
            patches.enter_context(
                mock.patch.object(
                    torch.cuda, "current_stream", lambda one="cuda": CurrentStream(gpu_of(one))
                )
            )
        owned = torch.cuda.Event.__module__ != "torch.cuda.streams"  # by a test, or by `streams`
        event = _event_of(self, torch.cuda.Event if owned else _Event)
        patches.enter_context(mock.patch.object(torch.cuda, "Event", event))
        stream = type(torch.cuda.current_stream(CUDA))
        patches.enter_context(
            mock.patch.object(stream, "synchronize", lambda _: self.finish_copies(), create=True)
        )
        if not torch.cuda.is_available():
            patches.callback(self._kernels()._destroy)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _patches.pop().close()
        cuda_guard()(False)
        choose_gpu(CUDA)
        for gpu in (OTHER_GPU, CUDA):  # an error of this device must not be raised by the next test
            _run_on(gpu)
            try:
                simt_library().raise_errors(torch.empty(0))
            except RuntimeError:
                if error[0] is None:
                    raise

    def here(self):
        """Returns a context in which a thread that did not enter the device uses it."""
        return _Reentered(self)

    def of(self, memory, is_awaited=False, gpu=CUDA):
        """Returns the tensor of a GPU that has this memory.

        `is_awaited`: the host has waited for its contents.
        """
        made = MockTensor(memory, self, gpu)
        if self.streams is not None:
            self.streams.write(made, is_awaited)
        return made

    def forget(self):
        for notes in (self.reads, self.order, self.mixed, self.between):
            notes.clear()
        self.without_kernel.clear()
        self.recorded.clear()

    def finish_copies(self, copies=None):
        """Ends copies to the host, for which the host waits; by default all of them, if there are any."""
        ended = self.copies if copies is None else copies
        for copy, values in ended:
            copy.copy_(values)
        self.copies = [one for one in self.copies if not any(one is other for other in ended)]
        if copies is not None or ended:
            self._note(self.reads, "synchronize")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Changes calls for which torch wants a real device: those that name it, and two more."""
        kwargs = kwargs or {}
        if func in _UNCHANGED or not (func in _CHANGED or _names_cuda(args, kwargs)):
            return func(*args, **kwargs)
        kwargs = dict(kwargs)
        is_here = bool(args) and isinstance(args[0], MockTensor)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if is_here and func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if is_here and func is torch.Tensor.data_ptr:
            return args[0].memory.data_ptr()
        if is_here and func is torch.Tensor.new_tensor and not kwargs.get("device"):
            return self.of(args[0].memory.new_tensor(*args[1:], **kwargs), gpu=args[0].device)
        moves = func in (torch.Tensor.to, torch.Tensor.cuda)
        named = [one for one in args if isinstance(one, torch.device) or (moves and is_cuda(one))]
        if func is torch.Tensor.cuda:
            given = next(iter(args[1:]), None)
            named = [torch.device("cuda", given) if isinstance(given, int) else given or "cuda"]
        gpu = next(filter(None, map(gpu_of, [kwargs.get("device"), *named])), None)
        if gpu is None:
            return func(*args, **kwargs)
        if moves and is_here:  # another dtype may be named too
            dtypes = [value for value in args if isinstance(value, torch.dtype)]
            kwargs.pop("device", None)
            moved = args[0] if gpu == args[0].device else aten._to_copy(args[0], device=gpu)
            return moved.to(*dtypes, **kwargs) if dtypes or kwargs else moved
        if func is torch.Tensor.cuda:
            return self.of(args[0].clone(), gpu=gpu)
        args = [HOST if is_cuda(value) else value for value in args]
        if "device" in kwargs:
            kwargs["device"] = HOST
        made = func(*args, **kwargs)
        is_awaited = (moves or func is torch.tensor) and not kwargs.get("non_blocking")
        return self.of(made.detach(), is_awaited, gpu).requires_grad_(made.requires_grad)

    def run(self, func, args, kwargs):
        """Runs an op that has an argument on this device."""
        op, name = func.overloadpacket, func.name().split("::")[1]
        if op is aten.to:  # inside of another tensor's dispatch torch does not take it apart
            return func.decompose(*args, **kwargs)
        given = {**dict(zip(_arguments_of(func), args, strict=False)), **kwargs}
        ours = func.namespace == "torchrec_dyn"
        if ours:
            self.order.append(name)
        gpus = [one.device for one in leaves_of(given) if isinstance(one, MockTensor)]
        gpu = gpu_of(given.get("device")) or gpus[0]  # of the result
        if op in COPIES and {gpu, *gpus} == {CUDA, OTHER_GPU}:
            self._note(self.between, name)
        elif op not in COPIES and (
            len(set(gpus)) > 1 or any(_is_elsewhere(ours, *item) for item in given.items())
        ):
            self._note(self.mixed, name)
        if _is_read(op, given):
            self._note(self.reads, name)
        if self.streams is not None:
            self.streams.use(func, given, list(dict.fromkeys([*gpus[::-1], gpu])), _place)
        memories = {}  # the tensor of each memory: an op in place returns its argument
        args, kwargs = mapped(lambda value: _sent(value, memories), (args, kwargs))
        if ours and op.__name__ in kernels_of("simt"):
            func = getattr(simt_library(), op.__name__).default
            _run_on(gpu)
        elif ours:
            self._note(self.without_kernel, name)
        if func.namespace == "c10d":  # the memory is on the CPU; NCCL's groups do not send it
            args = [_for_host(value) for value in args]
        if name == "keyed_jagged_index_select_dim1":  # fbgemm has it for CUDA only
            func = select_segments
        waits = self._waits.value
        result = func(*args, **kwargs)
        for _ in range(self._waits.value - waits):
            self._note(self.reads, name)
        if op in COPIES and _is_read(op, given):
            return result
        if _is_begun(op, given):
            self.copies.append((result, result.clone()))
            return result.fill_(FAR)  # until an event after it has passed
        if ours and name in HOST_RESULTS:
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            for place in {*range(len(results))} - HOST_RESULTS[name]:
                results[place] = self.of(results[place], gpu=gpu)
            return results[0] if isinstance(result, torch.Tensor) else tuple(results)
        return mapped(lambda value: self._tensor(value, memories, gpu), result)

    def _kernels(self):
        """Returns kernels for CUDA of ops that C++ calls, where this mode does not see them."""
        kernels = torch.library.Library("aten", "IMPL")

        def empty(size, **options):
            gpu = gpu_of(options.pop("device", "cuda"))
            given = {name: value for name, value in options.items() if value is not None}
            return self.of(torch.empty(size, **given), gpu=gpu)

        kernels.impl("empty.memory_format", empty, "CUDA", allow_override=True)
        return kernels

    def _run_backward(self, *args, **kwargs):
        """Runs the engine in this thread: its threads for GPUs may have been started without this device.

        Calls of Python's functions of torch leave this mode; nodes of the graph need it.
        """
        with torch.autograd.set_multithreading_enabled(False), _Reentered(self):
            return run_backward(*args, **kwargs)

    def _tensor(self, value, memories, gpu):
        if not isinstance(value, torch.Tensor):
            return value
        return memories[id(value)] if id(value) in memories else self.of(value, gpu=gpu)

    def _note(self, notes, op):
        notes.append(Note(op, _place()))
        if notes is self.reads:
            self.order.append("wait")


@functools.cache
def _arguments_of(func):
    return [argument.name for argument in func._schema.arguments]


def _names_cuda(args, kwargs):
    """Returns True if an argument is a device for CUDA; only `device` may be a string."""
    for one in args:
        if isinstance(one, torch.device) and one.type == "cuda":
            return True
    return "device" in kwargs and is_cuda(kwargs["device"])


def _is_elsewhere(ours, argument, value):
    """Returns True for tensors on the other device than an op needs. torch sends numbers along."""
    tensors = [one for one in leaves_of(value) if isinstance(one, torch.Tensor)]
    if ours and argument in DESCRIPTIONS:
        return any(isinstance(one, MockTensor) for one in tensors)
    return any(not isinstance(one, MockTensor) and (ours or one.dim()) for one in tensors)


def _is_read(op, given):
    """Returns True if the host waits for an op of torch."""
    if op in (aten.index, aten.index_put, aten.index_put_):
        masks = [one for one in given["indices"] if one is not None]
        return any(one.dtype in (torch.bool, torch.uint8) for one in masks)
    if op is aten._to_copy:
        return given.get("device") is not None and not is_cuda(given["device"])
    if op is aten.copy_:
        return not isinstance(given["self"], MockTensor) and not _is_begun(op, given)
    return op in READING and given.get("output_size") is None


def _is_begun(op, given):
    """Returns True for a copy into memory of the host that the host does not wait for."""
    is_here = isinstance(given.get("self"), MockTensor)
    return op is aten.copy_ and not is_here and bool(given.get("non_blocking"))


def _event_of(device, base):
    """Returns a class of events that the host may wait for: then copies before the event have ended."""

    class Event(base):
        copies, gpu = (), None

        def record(self, stream=None):
            gpu = gpu_of("cuda") if stream is None else stream.device
            self.gpu = self.gpu or gpu
            if gpu != self.gpu:
                raise RuntimeError(f"expected a stream of {self.gpu} for its event, got {gpu}")
            super().record(stream)
            self.copies = list(device.copies)

        def synchronize(self):
            device.finish_copies(self.copies)

    return Event


def _sent(value, memories):
    if isinstance(value, MockTensor):
        memories[id(value.memory)] = value
        return value.memory
    return HOST if is_cuda(value) else value


def _for_host(value):
    """Returns the group for the CPU of a process group."""
    if not isinstance(value, torch.ScriptObject) or "ProcessGroup" not in str(value._type()):
        return value
    return host_group(dist.ProcessGroup.unbox(value)).boxed()


@functools.cache
def _named(file):
    """Returns the name of a source file for notes, and True if it is not a test's; None: it is not noted."""
    path = Path(file)
    if path.is_relative_to(TORCHREC):
        return path.relative_to(TORCHREC.parent), True
    if not any(map(path.is_relative_to, OURS)) or path == Path(__file__) or path.name == "ops.py":
        return None
    return path.relative_to(ROOT), path.is_relative_to(OURS[0])


def _place():
    """Returns the innermost line of the package below `ops`, or of TorchRec, or else of the caller."""
    frame, caller = sys._getframe(), "?:0"
    while frame is not None:
        if named := _named(frame.f_code.co_filename):
            path, is_of_package = named
            if is_of_package:
                return f"{path}:{frame.f_lineno}"
            caller = f"{path}:{frame.f_lineno}" if caller == "?:0" else caller
        frame = frame.f_back
    return caller


def run_lookups_backward(output, seed=0, grad=None):
    """Runs the backward of each lookup in the graph of an output of a collection, with random gradients.

    Autograd's engine wants a real device. Runs on the CPU, too; the same seed gives the same gradients.
    `grad`: that of the output of each lookup, instead of random numbers.
    """
    tensors = output if isinstance(output, dict) else {"": output}
    nodes, found = [tensors[key].values().grad_fn for key in sorted(tensors)], []
    for node in nodes:
        if node is not None and node not in found:
            found.append(node)
            nodes += [before for before, _ in node.next_functions]
    draw = torch.Generator().manual_seed(seed)
    returned = []
    for node in found:
        if hasattr(node, "lookup"):
            drawn = torch.randn(node.lookup.bags.elements, generator=draw)
            given = drawn if grad is None else grad.flatten()
            returned.append(node.apply(given.to(node.lookup.shown.device))[1])
    return returned


if os.environ.get("TORCHREC_DYN_REAL_DEVICE"):
    import real_device

    MockDevice = real_device.RealDevice
