"""collection.table(name): rows read and edited by id, against a dict."""

import random

import pytest
import torch
from collection_oracle import POOL
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.distributed import ShardedTableHandle
from torchrec_dyn.modules import TableHandle

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}


def pooled() -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
    return dyn.DynamicEmbeddingBagCollection([config], fused_params=ADAGRAD)


def sequence() -> dyn.DynamicEmbeddingCollection:
    config = EmbeddingConfig(100, 4, "t", feature_names=["f"])
    return dyn.DynamicEmbeddingCollection([config], fused_params=ADAGRAD)


def bag(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


@pytest.mark.parametrize("make", [pooled, sequence])
def test_edits_agree_with_a_dict(make: object) -> None:
    handle, oracle, dice = make().table("t"), {}, random.Random(3)
    for step in range(30):
        ids = dice.sample(POOL, dice.randint(0, 12))
        if step % 3 == 2:
            gone = handle.erase(torch.tensor(ids, dtype=torch.int64))
            assert gone == sum(oracle.pop(id, None) is not None for id in ids)
        else:
            rows = torch.randn(len(ids), 4)
            handle.assign(torch.tensor(ids, dtype=torch.int64), rows)
            oracle.update(zip(ids, rows, strict=True))
        read, found = handle.lookup(torch.tensor(POOL))
        assert found.tolist() == [id in oracle for id in POOL]
        assert torch.equal(read, torch.stack([oracle.get(id, torch.zeros(4)) for id in POOL]))
        assert handle.num_rows == len(oracle) == len(handle.ids())
        assert set(handle.ids().tolist()) == set(oracle)
    assert handle.stats()["rows"] == handle.num_rows > 0
    assert handle.stats()["step"] == 0


def test_order_of_ids_tells_nothing_of_their_arrival() -> None:
    one, other = pooled().table("t"), pooled().table("t")
    one.assign(torch.tensor(POOL), torch.zeros(len(POOL), 4))
    other.assign(torch.tensor(POOL[::-1]), torch.zeros(len(POOL), 4))
    assert torch.equal(one.ids(), other.ids())


def test_the_model_sees_edits_and_the_handle_sees_training() -> None:
    ebc = pooled()
    handle = ebc.table("t")
    handle.assign(torch.tensor([5]), torch.full((1, 4), 2.0))
    output = ebc(bag(5, 5)).values()
    assert torch.equal(output, torch.full((1, 4), 4.0))
    output.sum().backward()
    assert handle.lookup(torch.tensor([5]))[0].max() < 2.0
    started = ebc(bag(6)).values().detach()
    ebc(bag(6)).values().sum().backward()
    assert handle.erase(torch.tensor([6, 7])) == 1
    assert torch.equal(ebc(bag(6)).values(), started)  # the same initial row again


def test_an_erased_id_keeps_its_row_for_the_pending_backward() -> None:
    ebc = pooled()
    handle = ebc.table("t")
    output = ebc(bag(1)).values()
    handle.erase(torch.tensor([1]))
    handle.assign(torch.tensor([2]), torch.zeros(1, 4))
    output.sum().backward()  # updates the orphan row, not the row of id 2
    assert torch.equal(handle.lookup(torch.tensor([2]))[0], torch.zeros(1, 4))
    assert handle.stats()["late_grads"] == 1


def test_a_handle_follows_conversions_loads_and_resets() -> None:
    ebc = pooled()
    handle = ebc.table("t")
    ebc(bag(1, 2))
    assert handle.num_rows == 2
    assert ebc.half().table("t").lookup(torch.tensor([1]))[0].dtype == torch.float16
    assert handle.lookup(torch.tensor([1]))[0].dtype == torch.float16
    empty = pooled().state_dict()
    ebc.load_state_dict(empty)
    assert handle.num_rows == 0
    ebc(bag(1, 2, 3))
    ebc.reset_parameters()
    assert handle.num_rows == 0 and handle.name == "t"


def test_edits_that_do_not_fit() -> None:
    handle = pooled().table("t")
    handle.assign(torch.tensor([1]), torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"assign: expected .*rows of shape \[2, 4\]"):
        handle.assign(torch.tensor([1, 2]), torch.ones(2, 3))
    for edit in (handle.lookup, handle.erase, lambda ids: handle.assign(ids, torch.ones(1, 4))):
        with pytest.raises(ValueError, match=r"expected ids \[M\] of int64, got .*int32"):
            edit(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="num_embeddings=100"):
        handle.assign(torch.arange(200), torch.zeros(200, 4))
    assert torch.equal(handle.lookup(torch.tensor([1, 2]))[0], torch.tensor([[1.0] * 4, [0.0] * 4]))
    assert handle.num_rows == 1


def test_an_unsharded_table_is_a_group_of_one_rank() -> None:
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
    policy = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    ebc = dyn.DynamicEmbeddingBagCollection([config], dynamic=policy, fused_params=ADAGRAD)
    handle = ebc.table("t")
    assert type(handle) is TableHandle is ShardedTableHandle
    assert (handle.name, handle.features, handle.columns) == ("t", ("f",), ((0, 4),))
    ebc(bag(1, 2, 2))
    handle.assign(torch.tensor([5]), torch.ones(1, 4))
    asked = torch.tensor([2, 5, 9])
    assert handle.read_ids().tolist() == handle.ids().tolist()
    assert set(handle.ids().tolist()) == {1, 2, 5}
    rows, has_row = handle.lookup_rows(asked)
    assert has_row.tolist() == [True, True, False]
    assert torch.equal(rows, handle.lookup(asked)[0])
    assert handle.read_counts(asked).tolist() == handle.count(asked).tolist() == [2, 0, 0]
    assert handle.read_last_seen(asked).tolist() == handle.last_seen(asked).tolist() == [1, 1, -1]
    assert handle.read_num_rows() == 3 and handle.read_stats() == handle.stats()
    assert handle.erase(asked) == 2
    assert repr(handle) == "TableHandle(name='t', num_rows=1)"
