"""Tables in host memory, with frames on a mock GPU: the bits of the CPU, and the rows that cross the link."""

import copy
import pickle

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_device import CUDA, MockDevice, run_lookups_backward
from replica_cases import side_of, sync
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType

import torchrec_dyn as dyn
from torchrec_dyn import knobs, ops
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark
from torchrec_dyn.state_dict.loading import TableLoad

NAMES = ("a", "b")


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


def made(
    place,
    gpu_rows,
    kind="sum",
    optimizer=EmbOptimType.ADAM,
    dtype=DataType.FP32,
    limit=500,
    fused=(),
    **options,
):
    """Returns a collection of tables a (4 columns) and b (6, in memory of the device)."""
    is_pooled = kind != "sequence"
    config = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    more = {"pooling": PoolingType.MEAN} if kind == "mean" else {}
    more |= {"num_embeddings": limit, "data_type": dtype}
    tables = [
        config(name=name, embedding_dim=dim, feature_names=[name], **more)
        for name, dim in zip(NAMES, (4, 6 if is_pooled else 4), strict=True)
    ]  # fmt: skip
    if kind == "max":
        options["pooling"] = "max"
    storage = dyn.HostMemory(gpu_rows) if gpu_rows else None
    dynamic = {
        "a": dyn.DynamicTableConfig(storage=storage, **options),
        "b": dyn.DynamicTableConfig(**options),
    }
    collection = dyn.DynamicEmbeddingBagCollection if is_pooled else dyn.DynamicEmbeddingCollection
    more = {"is_weighted": True} if kind == "weighted" else {}
    fused = {"optimizer": optimizer, "learning_rate": 0.1, **dict(fused)}
    return collection(tables, dynamic=dynamic, device=place, fused_params=fused, **more)


class Twins:
    """A collection on the CPU, and its twin on a mock device that is entered, trained by the same batches."""

    def __init__(self, device, gpu_rows, **options):
        self.device, self.is_weighted = device, options.get("kind") == "weighted"
        self.both = [made("cpu", None, **options), made(CUDA, gpu_rows, **options)]
        self.step = 0

    def batch(self, ids, others=(1, 2, 3)):
        """Returns a batch of four bags, and its twin."""
        lengths = [len(ids) // 2, len(ids) - len(ids) // 2, 1, len(others) - 1]
        values = torch.tensor([*ids, *others])
        weights = torch.linspace(-1, 1, len(values)) if self.is_weighted else None

        def sent(tensor):
            return None if tensor is None else self.device.of(tensor.clone())

        batch = values, weights, torch.tensor(lengths)
        return [
            KeyedJaggedTensor(list(NAMES), *parts) for parts in (batch, tuple(map(sent, batch)))
        ]

    def forward(self, ids, others=(1, 2, 3)):
        outputs = [one(sent) for one, sent in zip(self.both, self.batch(ids, others), strict=True)]
        read = [tensors_of(output) for output in outputs]
        for here, there in zip(*read, strict=True):
            assert torch.equal(here.detach(), there.detach().cpu())
        return outputs

    def backward(self, outputs):
        for output in outputs:
            run_lookups_backward(output, seed=self.step)
        self.step += 1

    def train(self, *ids, others=(1, 2, 3)):
        self.backward(self.forward(ids, others))

    def tables(self, name="a"):
        return [one.table(name) for one in self.both]

    def compare(self):
        here, there = (one.state_dict() for one in self.both)
        assert here.keys() == there.keys()
        for key, value in here.items():
            assert torch.equal(value, there[key].cpu()), key
        states = [one.fused_optimizer.state_dict()["state"] for one in self.both]
        for key, value in states[0].items():
            for name, tensor in value.items():
                assert torch.equal(tensor, states[1][key][name].cpu()), (key, name)
        assert self.device.mixed == [] and self.device.without_kernel == []

    def copied(self):
        """Returns (rows_loaded, rows_written_back) of table a on the device."""
        stats = self.tables()[1].stats()
        return stats["rows_loaded"], stats["rows_written_back"]


def tensors_of(output):
    return [output.values()] if hasattr(output, "values") and not isinstance(output, dict) else [
        one.values() for one in output.values()
    ]  # fmt: skip


def skewed(draw, count, most):
    return (torch.rand(count, generator=draw) ** 3 * most).long().tolist()


class Frames:
    """The frames that a table should have: ids by the call that used them last, and the rows that cross."""

    def __init__(self, limit):
        self.limit, self.used, self.rows, self.now = limit, {}, {}, 0
        self.loaded = self.written = 0

    def call(self, ids):
        self.now += 1
        distinct = dict.fromkeys(ids)
        self.used.update((one, self.now) for one in distinct if one in self.used)
        missing = [one for one in distinct if one not in self.used]
        order = sorted(self.used, key=lambda one: (self.used[one], self.rows[one]))
        while len(self.used) + len(missing) > self.limit and self.used[order[0]] < self.now:
            del self.used[order.pop(0)]
            self.written += 1
        self.loaded += sum(one in self.rows for one in missing)
        for one in missing:
            self.rows.setdefault(one, len(self.rows))
        self.used.update(dict.fromkeys(missing, self.now))


@pytest.mark.parametrize("limit", [30, 60])
def test_rows_cross_as_a_cache_by_last_use_wants(device, limit):
    twins, model, draw = Twins(device, limit), Frames(limit), torch.Generator().manual_seed(limit)
    for _ in range(80):
        ids = skewed(draw, 20, 200)
        twins.train(*ids)
        model.call(ids)
        assert twins.copied() == (model.loaded, model.written)
    assert model.loaded > 100 and model.written > 100
    twins.compare()


KINDS = ("sum", "mean", "max", "weighted", "sequence")
POLICIES = {
    "none": {},
    "LRU": {"eviction": dyn.LeastRecentlyUsed()},
    "LFU": {"eviction": dyn.LeastFrequentlyUsed(), "admission": dyn.AdmitAfter(2)},
    "expires": {"eviction": (dyn.ExpireAfter(steps=4), dyn.LeastRecentlyUsed())},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu_rows", [1, 9, 40, 1000])
def test_any_number_of_frames_has_the_bits_of_the_cpu(device, kind, gpu_rows):
    twins, draw = (
        Twins(device, gpu_rows, kind=kind, unseen="initial"),
        torch.Generator().manual_seed(3),
    )
    for step in range(25):
        twins.train(*skewed(draw, 16, 120), others=skewed(draw, 4, 50))
        if step % 10 == 9:
            twins.compare()
    twins.compare()
    if gpu_rows > 1:  # the id that is in every batch keeps the only frame
        assert [count > 0 for count in twins.copied()] == [gpu_rows < 120] * 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.PARTIAL_ROWWISE_ADAM]
)
@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.BF16])
def test_policies_find_ids_whose_rows_are_in_either_memory(device, policy, optimizer, dtype):
    options = {"optimizer": optimizer, "dtype": dtype, "limit": 60, **POLICIES[policy]}
    twins, draw = Twins(device, 20, **options), torch.Generator().manual_seed(5)
    most = 60 if policy == "none" else 150
    for step in range(40):
        twins.train(*skewed(draw, 16, most), others=skewed(draw, 4, 50))
        if step % 10 == 9:
            twins.compare()
    assert min(twins.copied()) > 0
    stats = twins.tables()[1].stats()
    assert policy == "none" or stats["evicted_full"] + stats["evicted_expired"] > 0
    for name in ("rows", "waiting", "evicted_full", "evicted_expired", "late_grads"):
        assert stats[name] == twins.tables()[0].stats()[name]


def test_a_step_waits_no_longer_than_one_of_rows_in_the_gpus_memory(device):
    reads = []
    for gpu_rows in (None, 30):
        twins = Twins(device, gpu_rows)
        for step in range(12):
            twins.train(*range(step, step + 40))
        device.forget()
        twins.train(*range(0, 40))  # known, and not all in frames
        reads.append([note.op for note in device.reads])
        if gpu_rows:
            assert min(twins.copied()) > 0
    assert reads[0] == reads[1]


@pytest.mark.parametrize("rule", [dyn.Lion(0.9, 0.99, 0.1), dyn.LarsSGD(0.02, 0.9, 0.1)])
def test_a_rule_in_python_updates_rows_in_either_memory(device, rule):
    twins, draw = Twins(device, 9, optimizer=rule), torch.Generator().manual_seed(3)
    for _ in range(12):
        twins.train(*skewed(draw, 16, 60))
    twins.compare()
    assert min(twins.copied()) > 0


def test_deferred_updates_find_rows_that_have_left_the_frames(device):
    twins, draw = Twins(device, 9, fused={"defer_updates": True}), torch.Generator().manual_seed(3)
    for _ in range(8):
        for _ in range(3):  # micro-batches
            twins.train(*skewed(draw, 16, 60))
        for one in twins.both:
            one.fused_optimizer.step()
        twins.compare()
    assert min(twins.copied()) > 0


def test_updates_that_are_not_finite_are_refused_in_either_memory(device):
    twins = Twins(device, 6, on_nonfinite="skip")
    twins.train(*range(12))
    for ids in ((0, 1, 2, 3), (8, 9, 10, 11)):
        outputs = twins.forward(ids)
        grad = torch.ones(2, 10)
        grad[1, :4] = float("inf")  # of the second bag of table a
        for output in outputs:
            run_lookups_backward(output, grad=grad)
    twins.compare()
    assert [table.stats()["nonfinite"] for table in twins.tables()] == [4, 4]


@pytest.mark.parametrize("calls", [0, 1, 2, 4, 6])
def test_without_memory_for_rows_or_frames_nothing_changes(device, monkeypatch, calls):
    twins, grow, left = Twins(device, 30), ops.grow_block, [calls]
    monkeypatch.setattr(knobs, "PAGE_BYTES", 64)  # all grows
    twins.train(*range(6))

    def grown(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("grow_block: expected memory")
        return grow(*arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="no row has changed"):
        patched.setattr(ops, "grow_block", grown)
        twins.both[1](twins.batch(range(60))[1])
    twins.compare()
    for _ in range(3):
        twins.train(*range(60))
        twins.train(*range(0, 60, 2))
    twins.compare()


@pytest.mark.parametrize("policy", ["LRU", "LFU", "expires"])
def test_a_step_that_fails_leaves_the_rows_of_ids_that_it_would_have_evicted(
    device, monkeypatch, policy
):
    twins = Twins(device, 20, limit=40, **POLICIES[policy])
    for first in (*range(0, 40, 8), *range(0, 40, 8)):
        twins.train(*range(first, first + 8))
    ids = range(100, 112)  # ids without a row need those of others, which no frame has
    if policy == "LFU":  # admits at the second step
        twins.train(*ids)

    def failed(*_):
        raise MemoryError("commit_step_: expected memory")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(ops, "commit_step_", failed)
        twins.both[1](twins.batch(ids)[1])
    twins.compare()
    twins.train(*ids)
    twins.train(*range(8))
    twins.compare()


def test_a_step_that_fails_leaves_the_rows_of_ids_that_it_would_have_expired(device, monkeypatch):
    twins = Twins(device, 10, limit=100, eviction=dyn.ExpireAfter(steps=4))
    for first in (0, 12, 24, 36, 48):
        twins.train(*range(first, first + 12))
    removed, commit = [], ops.remove_rows_

    def remove(ids, *arguments):
        removed.append(len(ids))
        commit(ids, *arguments)

    def failed(*_):
        raise MemoryError("commit_step_: expected memory")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(ops, "remove_rows_", remove)
        patched.setattr(ops, "commit_step_", failed)
        twins.both[1](twins.batch(range(100, 106))[1])  # rows of 0 to 11
    assert removed == [12]
    twins.compare()
    twins.train(*range(100, 106))
    twins.train(*range(12))
    twins.compare()


def test_optimizer_state_is_loaded_after_a_first_step_that_failed(device, monkeypatch):
    twins = Twins(device, 20, **POLICIES["LRU"])

    def failed(*_):
        raise MemoryError("commit_step_: expected memory")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(ops, "commit_step_", failed)
        twins.both[1](twins.batch(range(8))[1])
    Edits.load_optimizer(twins)  # of no rows, while frames are those of rows to come
    twins.compare()
    twins.train(*range(30))
    twins.train(*range(30))
    twins.compare()


def test_without_memory_for_frames_the_present_ones_stay(device, monkeypatch):
    monkeypatch.setattr(knobs, "PAGE_BYTES", 512)  # the words of 60 frames are on one page
    grow = ops.grow_block

    def grown(block, *arguments, **options):
        if block.shape[1] > 1:
            raise MemoryError("grow_block: expected memory")
        return grow(block, *arguments, **options)

    copied = []
    for fails in (True, False):
        twins = Twins(device, 60)
        for table in twins.tables():
            table.assign(torch.arange(10), torch.arange(40.0).view(10, 4))
        twins.train(0)
        if fails:
            with monkeypatch.context() as patched, pytest.raises(MemoryError, match="no row has"):
                patched.setattr(ops, "grow_block", grown)
                twins.both[1](twins.batch(range(20, 60))[1])
        for first in (0, 30, 60, 90, 0):
            twins.train(*range(first, first + 10))
            twins.train(*range(first, first + 50))
        twins.compare()
        copied.append(twins.copied())
    assert copied[0] == copied[1] and min(copied[0]) > 0


def test_forwards_stay_open_while_their_rows_leave_the_frames(device):
    twins = Twins(device, 8)
    twins.train(*range(40))
    first = twins.forward(range(8))
    second = twins.forward(range(8, 16))  # takes all frames
    third = twins.forward(range(4, 12))
    for outputs in (second, first, third):
        twins.backward(outputs)
        twins.compare()


def test_gradients_of_weights_read_rows_where_they_are(device):
    twins, draw = Twins(device, 8, kind="weighted"), torch.Generator().manual_seed(9)
    for _ in range(8):
        batches = twins.batch(skewed(draw, 16, 40))
        for batch in batches:
            batch.weights().requires_grad_()
        outputs = [one(sent) for one, sent in zip(twins.both, batches, strict=True)]
        twins.forward(range(20, 28))  # takes all frames
        grads = [run_lookups_backward(output) for output in outputs]
        for here, there in zip(*grads, strict=True):
            assert here.any() and torch.equal(here, there.cpu())
    assert min(twins.copied()) > 0


def test_evaluation_reads_rows_where_they_are(device):
    twins = Twins(device, 8)
    twins.train(*range(40))
    before = twins.copied()
    for one in twins.both:
        one.eval()
    twins.forward(range(45))
    assert twins.copied() == before


class Edits:
    """Calls that read or write rows beside training; each takes both twins."""

    def erase(twins):
        for table in twins.tables():
            table.erase(torch.arange(3, 9))

    def assign(twins):
        ids = torch.tensor([5, 6, 400, 401])
        for table in twins.tables():
            table.assign(ids, torch.arange(16.0).view(4, 4))

    def load(twins):
        states = [one.state_dict() for one in twins.both]
        for one, state in zip(twins.both, states, strict=True):
            one.load_state_dict(state)

    def load_optimizer(twins):
        for one in twins.both:
            state = copy.deepcopy(one.fused_optimizer.state_dict())
            one.fused_optimizer.load_state_dict(state)

    def copied(twins):
        twins.both = [copy.deepcopy(one) for one in twins.both]

    def pickled(twins):
        twins.both = [pickle.loads(pickle.dumps(one)) for one in twins.both]

    def moved(twins):
        twins.both[1] = twins.both[1].to("cpu").to(CUDA)

    def frozen(twins):
        for table in twins.tables():
            table.freeze()
        twins.train(*range(2, 12))
        for table in twins.tables():
            table.unfreeze()


@pytest.mark.parametrize("edit", [name for name in vars(Edits) if not name.startswith("_")])
def test_edits_between_steps(device, edit):
    twins, draw = Twins(device, 12, unseen="initial"), torch.Generator().manual_seed(7)
    for _ in range(3):
        for _ in range(4):
            twins.train(*skewed(draw, 16, 60))
        getattr(Edits, edit)(twins)
        twins.compare()
        twins.train(*skewed(draw, 16, 60))
        twins.compare()


def test_a_copy_takes_no_memory_of_the_gpu_for_all_rows(device):
    twins = Twins(device, 12)
    twins.train(*range(40))
    state = twins.tables()[1].shards[0].__getstate__()["state"]
    assert state["ids"].device == CUDA  # where the copy is
    assert all(state[name].is_cpu for name in ("weight", "momentum1", "momentum2"))


def test_deltas_have_the_rows_that_changed_in_either_memory(device, tmp_path):
    twins = Twins(device, 12)
    twins.train(*range(40))
    former, since = copy.deepcopy(twins.both[0]), mark(twins.both[1])
    twins.train(3, 4, 5, 30, 31, 32, 50)
    export_delta(twins.both[1], tmp_path / "delta", since)
    apply_delta(former, tmp_path / "delta")
    twins.both[1] = former
    twins.compare()


@pytest.mark.parametrize("gpu_rows", [None, 300])
def test_rows_are_assigned_in_a_table_with_more_room_than_when_they_were_prepared(device, gpu_rows):
    twins = Twins(device, gpu_rows)
    twins.train(*range(40))
    ids, rows = torch.arange(300), torch.arange(1200.0).view(300, 4)
    for table in twins.tables():
        shard = table.shards[0]
        shard.erase(torch.arange(20))
        write = shard.prepare_assign(ids, rows)
        shard.reserve(450)  # as a step that then failed
        write()
    twins.compare()


def test_optimizer_state_is_not_loaded_for_frames_of_other_rows(device, monkeypatch):
    twins = Twins(device, 8, fused={"defer_updates": True})
    twins.train(*range(40))
    here = twins.both[1]
    here(twins.batch(range(8))[1])
    state, commit = here.fused_optimizer.state_dict(), TableLoad.commit

    def after_a_batch(load):
        here(twins.batch(range(20, 28))[1])  # of the same step, by another thread
        commit(load)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="expected the rows"):
        patched.setattr(TableLoad, "commit", after_a_batch)
        here.fused_optimizer.load_state_dict(state)


def test_replicas_merge_rows_of_either_memory(device):
    twins, others, draw = Twins(device, 12), Twins(device, 9), torch.Generator().manual_seed(2)
    for _ in range(6):
        twins.train(*skewed(draw, 16, 60))
        others.train(*skewed(draw, 16, 60))
    for pair in zip(twins.tables(), others.tables(), strict=True):
        sync([side_of(one.shards[0]) for one in pair])
    for one in (twins, others):
        one.compare()
        one.train(*range(20))
        one.compare()


@pytest.mark.parametrize("gpu_rows", [0, -1, 2.0, True, None])
def test_frames_are_a_positive_number(gpu_rows):
    with pytest.raises(
        ValueError, match=r"^HostMemory\.gpu_rows: expected at least 1, got .*\. Give"
    ):
        dyn.HostMemory(gpu_rows)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_history_has_the_bits_of_the_cpu(data):
    with MockDevice() as device:
        twins = Twins(
            device,
            data.draw(st.integers(1, 20)),
            **POLICIES[data.draw(st.sampled_from(list(POLICIES)))],
        )
        edits = [name for name in vars(Edits) if not name.startswith("_")]
        opened = []
        for _ in range(data.draw(st.integers(3, 12))):
            do = data.draw(st.sampled_from(["train", "train", "open", "close", *edits]))
            ids = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=20))
            if do == "train":
                twins.train(*ids)
            elif do == "open":
                opened.append(twins.forward(ids))
            elif do == "close" and opened:
                twins.backward(opened.pop(0))
            elif do != "close":
                opened.clear()
                getattr(Edits, do)(twins)
            twins.compare()
