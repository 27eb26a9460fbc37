"""Unsharded modules on a mock GPU: the bits of the CPU, and how often the host waits in a step."""

import copy
import io
import pickle
from itertools import pairwise

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from mock_device import CUDA, OTHER_GPU, MockDevice, run_lookups_backward
from table_cases import without_probes
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import mark
from torchrec_dyn.modules import UnshardedTable

GPUS = [CUDA, OTHER_GPU]
NAMES = ("a", "b", "c")
SEVERAL = 5  # tables: more than a step has waits
SPREAD = 2**58 + 1  # ids of both signs


@pytest.fixture
def device():
    torch.__future__.set_overwrite_module_params_on_conversion(
        True
    )  # for parameters of dense layers
    with MockDevice() as device:
        yield device
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def configs(kind, count=2, columns=4, dtype=DataType.FP32, limit=1000, **options):
    """Returns configs of tables a, b, ..., each with a feature of its name; table a also has feature c."""
    names = [chr(ord("a") + t) if t < 2 else f"t{t}" for t in range(count)]
    features = [[name] for name in names]
    features[0].append("c")
    return [
        kind(name=name, embedding_dim=columns, num_embeddings=limit, feature_names=of_table, data_type=dtype,
             **options)
        for name, of_table in zip(names, features, strict=True)
    ]  # fmt: skip


def fused(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD):
    return {"optimizer": optimizer, "learning_rate": 0.1}


def pooled(**options):
    return dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig), fused_params=fused(), **options
    )


def two_groups():
    tables = configs(EmbeddingBagConfig)
    tables[1].pooling = PoolingType.MEAN
    tables[1].embedding_dim = 8
    return dyn.DynamicEmbeddingBagCollection(tables, is_weighted=True, fused_params=fused())


def half_rows():
    tables = configs(EmbeddingConfig, dtype=DataType.FP16)
    return dyn.DynamicEmbeddingCollection(
        tables, need_indices=True, fused_params=fused(EmbOptimType.ADAM)
    )


def with_policies(**policies):
    options = dyn.DynamicTableConfig(**policies)
    tables = configs(EmbeddingBagConfig, limit=24)
    return dyn.DynamicEmbeddingBagCollection(tables, dynamic=options, fused_params=fused())


def partly_frozen():
    options = dyn.DynamicTableConfig(unseen="initial")
    made = pooled(dynamic=options)
    made.table("b").freeze()
    return made


class SingleTables(torch.nn.Module):
    """Modules of one table each, for features of a batch."""

    def __init__(self):
        super().__init__()
        self.rows = dyn.DynamicEmbedding(4, 1000, name="rows", fused_params=fused(), padding_idx=0)
        self.bags = dyn.DynamicEmbeddingBag(
            4, 1000, name="bags", mode="mean", is_weighted=True, fused_params=fused()
        )

    def forward(self, batch):
        bags = self.bags(batch["b"])
        bags = JaggedTensor(bags, lengths=torch.ones_like(bags[:, 0], dtype=torch.int64))
        return {"a": self.rows(batch["a"]), "b": bags}


MODULES = {
    "pooled": pooled,
    "two groups": two_groups,
    "half": half_rows,
    "replaces": lambda: with_policies(eviction=dyn.LeastRecentlyUsed()),
    "counts": lambda: with_policies(
        admission=dyn.AdmitAfter(2), eviction=dyn.LeastFrequentlyUsed()
    ),
    "expires": lambda: with_policies(eviction=dyn.ExpireAfter(steps=2)),
    "frozen": partly_frozen,
    "block": lambda: dyn.BlockEmbeddingBagCollection(
        configs(EmbeddingBagConfig, columns=8), 4, fused_params=fused()
    ),
    "quotient-remainder": lambda: dyn.QuotientRemainderEmbeddingBagCollection(
        configs(EmbeddingBagConfig), 5, fused_params=fused(), is_weighted=True
    ),
    "single": SingleTables,
}
UNPICKLED = ["two groups", "expires", "frozen", "block", "quotient-remainder", "single"]


def batch(step, device, varies=False):
    """Returns a batch of features a, c, b, or c, a, b: 3 bags each, with `varies` 1 to 3 bags."""
    keys = ["a", "c", "b"] if step % 3 else ["c", "a", "b"]
    draw = torch.Generator().manual_seed(step)
    sizes = [1, 3, 2] if varies else [3, 3, 3]
    lengths = torch.randint(0, 4, (sum(sizes),), generator=draw)
    ids = (torch.randint(0, 12, (int(lengths.sum()),), generator=draw) + step) * SPREAD
    weights = torch.rand(len(ids), generator=draw).to(device).requires_grad_()
    ids, lengths = ids.to(device), lengths.to(device)
    if not varies:
        return KeyedJaggedTensor(keys, ids, weights, lengths)
    inverse = torch.stack([torch.tensor([2, 0, 1, 0]) % size for size in sizes]).to(device)
    return KeyedJaggedTensor(
        keys, ids, weights, lengths,
        stride_per_key_per_rank=[[size] for size in sizes], inverse_indices=(keys, inverse),
    )  # fmt: skip


def values_of(output):
    """Returns all numbers of an output on the CPU, in one tensor."""
    if isinstance(output, dict):
        jagged = output.values()
        parts = [part for one in jagged for part in (one.values(), one.lengths().float())]
    else:
        parts = [output.values()]
    return torch.cat([on_cpu(part).flatten() for part in parts])


def on_cpu(tensor):
    return getattr(tensor, "memory", tensor).detach()


def train(module, device, steps=6, varies=False):
    """Returns the outputs of training steps, and of evaluation."""
    outputs = []
    for step in range(steps):
        output = module(batch(step, device, varies))
        of_weights = run_lookups_backward(output, seed=step)
        outputs += [values_of(output), *(on_cpu(grad) for grad in of_weights if grad is not None)]
    module.eval()
    outputs.append(values_of(module(batch(steps, device, varies))))
    module.train()
    return outputs


def states(module):
    """Returns all tensors of a module and of its optimizer, on the CPU."""
    kept = {"model": module.state_dict()}
    if hasattr(module, "fused_optimizer"):
        kept["optimizer"] = module.fused_optimizer.state_dict()
    leaves, found = [kept], {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, dict):
            leaves += leaf.values()
        elif isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            found[number] = on_cpu(leaf)
    return found


def assert_same(got, expected, rounds=False):
    """Asserts equal bits; `rounds`: numbers that differ by the order of a GPU's products of matrices."""
    assert len(got) == len(expected)
    keys = expected if isinstance(expected, dict) else range(len(expected))
    for key in keys:
        if rounds:
            torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(got[key], expected[key]), key


@pytest.mark.everyday(3)
@pytest.mark.simt
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*inverse")
def test_a_device_trains_as_the_cpu_does(device, name, gpu):
    torch.manual_seed(0)
    here = MODULES[name]()
    there = copy.deepcopy(here).to(gpu)
    rounds = name == "block" and not device.is_mock
    for varies in (False, name in ("pooled", "two groups")):
        outputs = train(there, gpu, varies=varies)
        assert_same(outputs, train(here, "cpu", varies=varies), rounds)
    assert device.mixed == []
    assert_same(states(there), states(here), rounds)


def waits(device, call):
    """Returns where the host waits for the device during a call."""
    device.forget()
    call()
    assert device.mixed == []
    return list(device.reads)


def step_of(module, ids):
    """Returns a training step on these ids, each in a bag of its own, for every feature of a module."""
    tables = module.table_configs()
    keys = [name for config in tables for name in config.feature_names]
    lengths = torch.ones(len(ids) * len(keys), dtype=torch.int32)
    features = KeyedJaggedTensor(keys, ids.repeat(len(keys)), lengths=lengths).to(CUDA)

    def step():
        run_lookups_backward(module(features))

    return step


@pytest.mark.mock_only
@pytest.mark.parametrize("count", [1, SEVERAL])
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_the_host_waits_once_in_a_step_and_twice_with_new_ids_after_none_for_long(
    device, kind, count
):
    collection, config = {
        "pooled": (dyn.DynamicEmbeddingBagCollection, EmbeddingBagConfig),
        "sequence": (dyn.DynamicEmbeddingCollection, EmbeddingConfig),
    }[kind]
    module = collection(configs(config, count), device="cuda", fused_params=fused())
    for last in (5, 5, 9, 14, *[20] * 17, 20):
        reads = waits(device, step_of(module, torch.arange(last)))
        assert [note.op for note in reads] == ["find_and_pool"], reads
    for last, often in ((21, 2), (22, 1)):
        reads = waits(device, step_of(module, torch.arange(last)))
        assert [note.op for note in reads] == ["find_and_pool"] * often, reads


@pytest.mark.mock_only
@pytest.mark.parametrize("count", [1, SEVERAL])
def test_the_host_waits_once_in_an_evaluation_with_initial_rows(device, count):
    options = dyn.DynamicTableConfig(unseen="initial")
    tables = configs(EmbeddingBagConfig, count)
    module = dyn.DynamicEmbeddingBagCollection(
        tables, device="cuda", dynamic=options, fused_params=fused()
    )
    step_of(module, torch.arange(5))()
    module.eval()
    keys = [name for config in tables for name in config.feature_names]
    ids, lengths = torch.arange(3, 9).repeat(len(keys)), torch.ones(6 * len(keys)).int()
    features = KeyedJaggedTensor(keys, ids, lengths=lengths).to(CUDA)
    reads = waits(device, lambda: module(features))
    assert [note.op for note in reads] == ["find_and_pool"], reads


POLICIES = {
    "replaces": (590, {"eviction": dyn.LeastRecentlyUsed()}),
    "replaces by count": (590, {"eviction": dyn.LeastFrequentlyUsed()}),
    "expires": (640, {"eviction": dyn.ExpireAfter(steps=3)}),
    "counts": (640, {"admission": dyn.AdmitAfter(2)}),
    "both": (590, {"admission": dyn.AdmitAfter(2), "eviction": dyn.LeastRecentlyUsed()}),
    "by chance": (640, {"admission": dyn.AdmitWithProbability(0.5)}),
}


def lists_rows(reads):
    """Returns True if rows were listed by a search, or a log was sifted, which is rare: more is read then."""
    noted = [note.op for note in reads]
    return ("lowest_rows", "_to_copy") in pairwise(noted)


TABLES = [(policy, 1) for policy in POLICIES] + [("both", SEVERAL), ("expires", SEVERAL)]


@pytest.mark.mock_only
@pytest.mark.everyday(3)
@pytest.mark.parametrize(("policy", "count"), TABLES)
def test_the_host_waits_four_times_at_most_with_a_policy(device, policy, count):
    limit, options = POLICIES[policy]
    module = dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig, count, limit=limit),
        device="cuda",
        dynamic=dyn.DynamicTableConfig(**options),
        fused_params=fused(),
    )
    for _ in range(2):
        step_of(module, torch.arange(580))()
    ordinary = []
    for step in range(6):
        reads = waits(device, step_of(module, torch.arange(9) + 570 + 5 * step))
        if not lists_rows(reads):
            ordinary.append(len(reads))
    assert len(ordinary) > 1 and max(ordinary) <= 4, ordinary


ACTS = ("evicted_expired", "evicted_full", "counters_dropped", "inserted", "refused")


@pytest.mark.mock_only
def test_the_host_waits_seven_times_at_most_with_several_policies(device):
    """In steps where each of them acts, also while changes are recorded."""
    options = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(3, counters=640),
        eviction=(dyn.ExpireAfter(steps=60), dyn.LeastFrequentlyUsed()),
    )
    module = dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig, 1, limit=640),
        device="cuda",
        dynamic=options,
        fused_params=fused(),
    )
    table, marker, ordinary = module.table("a"), None, {False: set(), True: set()}
    for step in range(90):
        if step == 80:
            marker = mark(module)
        often = torch.arange(3 + step // 5)  # more and more new ids
        ids = torch.cat(
            [often * SPREAD + step, *(often + 20 * max(0, step - n) for n in (0, 1, 3))]
        )
        before = table.stats()
        reads = waits(device, step_of(module, ids))
        if not lists_rows(reads) and all(table.stats()[name] > before[name] for name in ACTS):
            ordinary[marker is not None].add(len(reads))
    assert all(max(waits) <= 7 for waits in ordinary.values())


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", ["two groups", "half", "counts", "expires"])
def test_trained_modules_move_between_devices(device, name):
    here = MODULES[name]()
    train(here, "cpu")
    there = copy.deepcopy(here).to("cuda")
    assert_same(states(there), states(here))
    back, other = copy.deepcopy(there).cpu(), copy.deepcopy(there).to(OTHER_GPU)
    for moved in (back, other):
        assert_same(states(moved), states(here))
    assert device.mixed == []
    expected = train(here, "cpu"), states(here)
    for moved, place in ((there, CUDA), (back, "cpu"), (other, OTHER_GPU)):
        assert_same(train(moved, place), expected[0])
        assert_same(states(moved), expected[1])
    loaded = MODULES[name]()
    loaded.load_state_dict(there.state_dict())
    loaded.fused_optimizer.load_state_dict(there.fused_optimizer.state_dict())
    assert_same(states(loaded), states(here))


class PicklerTo(pickle.Pickler):
    """Pickles tensors as `torch.load(map_location=)` reads them: all of them are on one device."""

    def __init__(self, file, place):
        super().__init__(file)
        self.place = place

    def reducer_override(self, value):
        if self.place == "cpu" and isinstance(value, torch.nn.Parameter):
            return (torch.nn.Parameter, (on_cpu(value), value.requires_grad))
        if self.place == "cpu" and isinstance(value, torch.Tensor) and value.is_cuda:
            return on_cpu(value).__reduce_ex__(4)
        if self.place == CUDA and type(value) is torch.Tensor and not value.is_meta:
            return (there_again, value.__reduce_ex__(4)[:2])
        return NotImplemented


def there_again(rebuild, args):
    return rebuild(*args).to(CUDA)


def unpickled(module, place):
    file = io.BytesIO()
    PicklerTo(file, place).dump(module)
    return pickle.loads(file.getvalue())


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", UNPICKLED)
def test_a_module_lives_where_it_was_unpickled(device, name):
    here = MODULES[name]()
    train(here, "cpu", steps=2)
    there = copy.deepcopy(here).to("cuda")
    moved = [(unpickled(one, place), place) for one, place in ((there, "cpu"), (here, CUDA))]
    for one, _ in moved:
        one.half().float()  # a conversion without a device
    here.half().float()
    expected = train(here, "cpu", steps=2), states(here)
    for one, place in moved:
        for module in one.modules():
            if isinstance(module, UnshardedTable):
                assert module.device == module.rows().device == torch.device(place)
        rounds = name == "block" and place == CUDA and not device.is_mock
        assert_same(train(one, place, steps=2), expected[0], rounds)
        assert_same(states(one), expected[1], rounds)
    assert device.mixed == []


def test_a_module_of_the_meta_device_can_be_made_on_a_device(device):
    made = dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig), device="meta", fused_params=fused()
    )
    made.to_empty(device="cuda")
    here = pooled()
    assert_same(train(made, CUDA), train(here, "cpu"))
    made = dyn.DynamicEmbeddingBagCollection(
        configs(EmbeddingBagConfig), device="cuda", fused_params=fused()
    )
    assert_same(train(made, CUDA, steps=1), train(pooled(), "cpu", steps=1))
    tables = made.local_tables()
    before = [table.generation for table in tables.values()]
    made.to("cuda").cuda()  # is there already
    assert [table.generation for table in tables.values()] == before
    with pytest.raises(ValueError, match="expected a real device, got meta"):
        made.to("meta")


def test_a_handle_reads_and_edits_rows_of_a_device(device):
    here = pooled()
    there = copy.deepcopy(here).to("cuda")
    ids, rows = torch.arange(3) * SPREAD, torch.arange(12.0).view(3, 4)
    for module, place in ((here, "cpu"), (there, CUDA)):
        train(module, place, steps=2)
        module.table("a").assign(ids.to(place), rows.to(place))
        assert module.table("a").erase(ids[:1].to(place)) == 1
    numbers, found = there.table("a").lookup(ids.to(CUDA))
    assert found.tolist() == [False, True, True]
    assert torch.equal(on_cpu(numbers)[1:], rows[1:])
    assert without_probes(there.table("a").stats()) == without_probes(here.table("a").stats())
    assert_same(states(there), states(here))


WRONG: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "too few": (torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 0]), None),
    "negative": (torch.tensor([3, -1, 1, 0, 0, 0, 0, 0, 0]), None),
    "overflow": (torch.tensor([2**62, 2**62, 2**62, 2**62, 3, 0, 0, 0, 0]), None),
    "other offsets": (
        torch.tensor([1, 1, 1, 0, 0, 0, 0, 0, 0]),
        torch.tensor([0, 1, 1, 3, 3, 3, 3, 3, 3, 3]),
    ),
}


@pytest.mark.everyday(4)
@pytest.mark.parametrize("lengths", WRONG)
@pytest.mark.parametrize("name", ["pooled", "two groups", "half", "replaces", "expires", "frozen"])
def test_wrong_lengths_change_nothing(device, name, lengths):
    module = MODULES[name]()
    wrong = KeyedJaggedTensor(["a", "c", "b"], torch.arange(3), torch.ones(3), *WRONG[lengths])
    with pytest.raises(ValueError, match=r"expected (lengths|offsets)") as of_cpu:
        module(wrong)
    train(module.to("cuda"), CUDA, steps=3)
    before = states(module)
    with pytest.raises(ValueError) as of_device:
        module(wrong.to(CUDA))
    assert str(of_device.value) == str(of_cpu.value)
    assert_same(states(module), before)


def test_a_batch_of_another_device_is_an_error(device):
    module = pooled().to("cuda")
    train(module, CUDA, steps=1)
    before = states(module)
    with pytest.raises(ValueError, match="where the rows are, got a tensor on cpu"):
        module(batch(3, "cpu"))
    with pytest.raises(ValueError, match="on cpu, where the rows are, got a tensor on cuda:0"):
        pooled()(batch(3, CUDA))
    if CUDA != OTHER_GPU:
        with pytest.raises(
            ValueError, match="on cuda:0, where the rows are, got a tensor on cuda:1"
        ):
            module(batch(3, OTHER_GPU))
        with pytest.raises(ValueError, match="where the rows are, got a tensor on cuda:0"):
            module.to(OTHER_GPU)(batch(3, CUDA))
    assert_same(states(module), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_torch_raises_its_error_and_nothing_changes():
    module = pooled()
    train(module, "cpu", steps=2)
    before = states(module)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        module.to("cuda", torch.float16)
    assert_same(states(module), before)
    with pytest.raises(ValueError, match=r"expected (a device that torch can use|rows on the CPU)"):
        train(pooled(device="cuda"), "cpu")
