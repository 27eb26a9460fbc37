"""Collections of one table group with and without policies, their batches, and the values to compare."""

import torch
from collection_oracle import POOL
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
OPTIMIZERS = [EmbOptimType[name] for name in (
    "EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM"
)]  # fmt: skip
LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
FEATURES = {"t": ["a", "b"], "u": ["b"], "v": ["c"]}
# Policies of the tables; the key says which tables have any.
LIVES = {
    "none": {},
    "one": {"u": {"eviction": (dyn.ExpireAfter(steps=2), LRU), "admission": dyn.AdmitAfter(2)}},
    "all": {
        "t": {"eviction": dyn.ExpireAfter(steps=2), "unseen": "initial"},
        "u": {"eviction": LFU, "admission": dyn.AdmitAfter(2)},
        "v": {"admission": dyn.AdmitWithProbability(0.5), "eviction": LRU, "unseen": "initial"},
    },
}


def make(names, lives, pooled=True, fused_params=ADAM, **options):
    """Returns a collection of tables of one group; tables that evict when full have few rows."""
    configs, dynamic = [], {}
    for name in names:
        life = lives.get(name, {})
        replaces = any(one in str(life.get("eviction")) for one in ("Recently", "Frequently"))
        common = {"num_embeddings": 12 if replaces else 1000, "embedding_dim": 4,
                  "name": name, "feature_names": FEATURES[name]}  # fmt: skip
        if pooled:
            configs.append(EmbeddingBagConfig(pooling=PoolingType.SUM, **common))
        else:
            configs.append(EmbeddingConfig(**common))
        dynamic[name] = dyn.DynamicTableConfig(initializer=dyn.Normal(0.0, 1.0), **life)
    options |= {"dynamic": dynamic, "fused_params": fused_params}
    if pooled:
        return dyn.DynamicEmbeddingBagCollection(configs, **options)
    return dyn.DynamicEmbeddingCollection(configs, **options)


def draw(dice, names, weighted=False, longest=3):
    """Returns one batch for each table alone and for all tables; at most 9 distinct ids per table."""
    pool = [*dice.sample(POOL, 4), dice.randint(1, 20)]
    bags = {f: [[dice.choice(pool) for _ in range(dice.randint(0, longest))] for _ in range(3)]
            for f in "abc"}  # fmt: skip

    def kjt(features):
        ids = [number for f in features for bag in bags[f] for number in bag]
        weights = None
        if weighted:
            weights = torch.linspace(0.5, 2.0, len(ids)).requires_grad_()
        lengths = torch.tensor([len(bag) for f in features for bag in bags[f]])
        return KeyedJaggedTensor(features, torch.tensor(ids, dtype=torch.int64), weights, lengths)

    return kjt(["a", "b", "c"]), {name: kjt(FEATURES[name]) for name in names}


def parts(outputs, names, alone=False):
    """Returns the outputs, [bags, D] or [ids, D], by table and feature."""
    values = outputs.to_dict() if not isinstance(outputs, dict) else outputs
    found = {}
    for name in names:
        for feature in FEATURES[name]:
            key = feature if alone or feature != "b" else f"b@{name}"
            one = values[key]
            found[name, feature] = one if isinstance(one, torch.Tensor) else one.values()
    return found


def learn(outputs):
    """Runs a backward with gradients that depend on the outputs; none if no output requires a gradient."""
    asking = {key: one for key, one in outputs.items() if one.requires_grad}
    if asking:
        grads = [
            one.detach() * 0.5 + sum(map(ord, "".join(key))) % 5 for key, one in asking.items()
        ]
        torch.autograd.backward(list(asking.values()), grads)


def state_of(collection, name):
    table = collection.local_tables().get(name)
    if table is None:
        return {}, {}
    state = {key: value.tolist() for key, value in table.export_state().items()}
    drop = {"probe_length_mean", "probe_length_max", "withheld"}
    return state, {key: one for key, one in table.stats().items() if key not in drop}
