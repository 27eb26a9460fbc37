"""`python -m torchrec_dyn inspect` of a real delta: it leads from one checkpoint to the next."""

import re

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from saved_cases import save_dict
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_dyn import DynamicEmbeddingBagCollection, DynamicTableConfig, LeastRecentlyUsed
from torchrec_dyn.__main__ import main
from torchrec_dyn.checkpoint import export_delta, mark


def train(collection, steps):
    draw = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        ids = torch.randint(500, (20,), generator=draw)
        collection(
            KeyedJaggedTensor(["f"], ids, lengths=torch.full((10,), 2))
        ).values().sum().backward()


def test_a_delta_begins_and_ends_at_full_checkpoints(tmp_path, capsys):
    config = EmbeddingBagConfig(
        name="user", embedding_dim=8, num_embeddings=60, feature_names=["f"]
    )
    collection = DynamicEmbeddingBagCollection(
        [config],
        dynamic=DynamicTableConfig(eviction=LeastRecentlyUsed()),
        fused_params={"optimizer": EmbOptimType.ADAM},
    )

    def save(name):
        state = {
            "model": collection.state_dict(),
            "optimizer": collection.fused_optimizer.state_dict(),
        }
        save_dict(state, tmp_path / name)

    def fingerprints(name):
        assert main(["inspect", str(tmp_path / name), "--verify"]) == 0
        text = capsys.readouterr().out
        assert name != "delta" or int(re.search(r"removed +(\d+) rows", text)[1]) > 0
        return re.findall(r"(?:fingerprint|optimizer state) +(\w{16}.*)", text)

    train(collection, 3)
    marker = mark(collection)
    save("before")
    train(collection, 4)
    export_delta(collection, tmp_path / "delta", since=marker)
    save("after")
    before, after = fingerprints("before"), fingerprints("after")
    assert len(before) == 4 and not set(before) & set(after)
    expected = [f"{base} -> {result}" for base, result in zip(before, after, strict=True)]
    assert fingerprints("delta") == expected
