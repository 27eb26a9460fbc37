"""What we override, call and read of TorchRec is as it was when it was written against.

`torchrec_seams/` has one record for each minor version of TorchRec that we support. After an upgrade a
difference shows where to look; once our side follows (or needs not to), `python
tests/repository/test_torchrec_seams.py` writes the record of the installed version anew.
"""

import ast
import difflib
import importlib
import importlib.metadata
import inspect
import pathlib
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import torchrec_dyn

MINOR = ".".join(importlib.metadata.version("torchrec").split(".")[:2])
RECORD = pathlib.Path(__file__).with_name("torchrec_seams") / f"{MINOR}.txt"

CALLED = [
    "torchrec.distributed.embedding.ShardedEmbeddingCollection.prefetch",
    "torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup.__init__",
    "torchrec.distributed.embedding_lookup.GroupedPooledEmbeddingsLookup.__init__",
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection.prefetch",
    "torchrec.distributed.sharding.twrw_sharding.TwRwPooledEmbeddingDist._create_output_dist_modules",
    "torchrec.distributed.sharding.twrw_sharding.TwRwPooledEmbeddingSharding.create_output_dist",
    "torchrec.modules.embedding_modules.get_embedding_names_by_table",
    "torchrec.optim.fused.FusedOptimizer.__init__",
]

# Private names that functions of ours, not subclasses, read of TorchRec's objects or set there.
_SHARDING = ["_device", "_env", "_grouped_embedding_configs_per_rank", "_pg", "_rank"]
_STITCHED = ["_combined_embedding_dims", "_combined_embedding_names", "_embedding_dims",
             "_embedding_names", "_embedding_order", "_init_combined_embeddings"]  # fmt: skip
_BY_NODE = ["_intra_pg"]
_PACKAGE = "torchrec.distributed"
READ = {
    f"{_PACKAGE}.sharding.tw_sharding.TwPooledEmbeddingSharding": _SHARDING,
    f"{_PACKAGE}.sharding.rw_sharding.RwPooledEmbeddingSharding": _SHARDING,
    f"{_PACKAGE}.sharding.tw_sequence_sharding.TwSequenceEmbeddingSharding": _SHARDING,
    f"{_PACKAGE}.sharding.rw_sequence_sharding.RwSequenceEmbeddingSharding": _SHARDING,
    f"{_PACKAGE}.sharding.cw_sequence_sharding.CwSequenceEmbeddingSharding": _SHARDING,
    f"{_PACKAGE}.sharding.cw_sharding.CwPooledEmbeddingSharding": [*_SHARDING, *_STITCHED],
    f"{_PACKAGE}.sharding.twcw_sharding.TwCwPooledEmbeddingSharding": [*_SHARDING, *_STITCHED],
    f"{_PACKAGE}.sharding.twrw_sharding.TwRwPooledEmbeddingSharding": [*_SHARDING, *_BY_NODE],
    f"{_PACKAGE}.sharding.grid_sharding.GridPooledEmbeddingSharding": [
        *_SHARDING, *_BY_NODE, *_STITCHED,
    ],
    f"{_PACKAGE}.sharding.grid_sharding.GridPooledEmbeddingDist": ["_callbacks", "_cross_dist"],
    f"{_PACKAGE}.sharding.rw_sharding.RwPooledEmbeddingDist": ["_codecs", "_dist", "_pg"],
    f"{_PACKAGE}.sharding.rw_sharding.RwSparseFeaturesDist": ["_dist", "_world_size"],
    f"{_PACKAGE}.sharding.twrw_sharding.TwRwPooledEmbeddingDist": [
        "_cross_dist", "_intra_codecs", "_intra_dist", "_intra_pg", "_variable_intra_dist",
    ],
    f"{_PACKAGE}.sharding.twrw_sharding.TwRwSparseFeaturesDist": [
        "_dist", "_local_size", "_sf_staggered_shuffle", "_sf_staggered_shuffle_tensor",
        "_world_size",
    ],
    f"{_PACKAGE}.embedding_lookup.GroupedPooledEmbeddingsLookup": [
        "_dummy_embs_tensor", "_emb_modules", "_feature_splits",
    ],
    f"{_PACKAGE}.embedding_lookup.GroupedEmbeddingsLookup": [
        "_dummy_embs_tensor", "_emb_modules", "_feature_splits",
    ],
    f"{_PACKAGE}.model_parallel.DistributedModelParallel": ["_env", "_sharder_map"],
    f"{_PACKAGE}.planner.types.ShardingOption": ["_tensor"],
    f"{_PACKAGE}.embedding.EmbeddingCollectionAwaitable": ["_awaitables_per_sharding"],
    "torchrec.sparse.jagged_tensor.KeyedJaggedTensor": [
        "_inverse_indices", "_jt_dict", "_length_per_key", "_lengths", "_lengths_offset_per_key",
        "_offset_per_key", "_offsets", "_stride", "_stride_per_key", "_stride_per_key_per_rank",
        "_values", "_variable_stride_per_key", "_weights",
    ],
}  # fmt: skip


def our_subclasses() -> list[type]:
    """Our classes that have a class of TorchRec's among their bases and no class of ours below them."""
    found = []
    for info in pkgutil.walk_packages(torchrec_dyn.__path__, "torchrec_dyn."):
        if info.name.startswith("torchrec_dyn._"):
            continue
        module = importlib.import_module(info.name)
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and any(_bases(kind)):
                found.append(kind)
    above = {part for kind in found for part in _parts(kind)[1:]}
    return [kind for kind in found if kind not in above]


def _parts(kind: type) -> list[type]:
    """A class of ours, and those of its bases that are ours."""
    return [part for part in kind.__mro__ if part.__module__.startswith("torchrec_dyn.")]


def _nodes(kind: type) -> Iterator[ast.stmt]:
    """The statements of a class of ours and of its bases that are ours."""
    return (node for part in _parts(kind) for node in _source(part).body)


def _bases(kind: type) -> Iterator[type]:
    return (base for base in kind.__mro__ if base.__module__.startswith("torchrec."))


def _said(path: str, thing: Any) -> str:
    """One line: a path, and the names and defaults of the parameters of what stands there."""
    while isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    if isinstance(thing, property):
        return f"{path} is a property"
    if not callable(thing):
        return f"{path} is a value"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
    ]
    return f"{path}({', '.join(map(str, parameters))})"


def overridden() -> set[str]:
    """The methods of TorchRec's that ours replace."""
    lines = set()
    for kind in our_subclasses():
        for name in map(_method, _nodes(kind)):
            bases = [base for base in _bases(kind) if name in vars(base)]
            if bases:
                path = f"{bases[0].__module__}.{bases[0].__qualname__}.{name}"
                lines.add(_said(path, vars(bases[0])[name]))
    return lines


def _method(node: ast.stmt) -> str | None:
    """The name of a method that is defined in a class, or is a function of its module."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        return ast.unparse(node.targets[0])
    return node.name if isinstance(node, ast.FunctionDef) else None


def called() -> set[str]:
    """What we call, or TorchRec calls of ours."""
    return {_said(path, _at(path)) for path in CALLED}


def _at(path: str) -> Any:
    """What stands at a dotted path; the last names may lie in a class."""
    names = path.split(".")
    for split in range(len(names) - 1, 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(names[:split]))
        except ModuleNotFoundError:
            continue
        for name in names[split:]:
            thing = getattr(thing, name)
        return thing
    raise ModuleNotFoundError(path)


def read() -> set[str]:
    """The private names of TorchRec's objects that our code uses, and whether they are there."""
    lines = set()
    for path, names in READ.items():
        lines |= {_has(path, _at(path), name) for name in names}
    for kind in our_subclasses():
        base = next(_bases(kind))
        path = f"{base.__module__}.{base.__qualname__}"
        made = set().union(*map(_made_by, _parts(kind)))
        lines |= {
            _has(path, base, node.attr)
            for statement in _nodes(kind)
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute)
            and re.fullmatch("_[a-z].*", node.attr)
            and ast.unparse(node.value) in ("self", "super()")
            and (node.attr not in made or _is_there(base, node.attr))
        }
    return lines


def _has(path: str, kind: type, name: str) -> str:
    return f"{path} has{'' if _is_there(kind, name) else ' no'} {name}"


def _is_there(kind: type, name: str) -> bool:
    return any(name in _made_by(base) for base in _bases(kind))


@cache
def _made_by(kind: type) -> set[str]:
    """The names that a class defines, and those that its methods give to `self`."""
    names = set(vars(kind))
    for node in ast.walk(_source(kind)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer":
            names |= {word.value for word in node.args[:1] if isinstance(word, ast.Constant)}
    return names


@cache
def _source(kind: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree


def record() -> list[str]:
    """The lines of the file."""
    return sorted(overridden() | called() | read())


def test_torchrec_is_as_recorded() -> None:
    recorded = RECORD.read_text().splitlines()
    change = "\n".join(
        difflib.unified_diff(recorded, record(), "recorded", "installed", n=0, lineterm="")
    )
    assert not change, f"TorchRec, or what we use of it, has changed:\n{change}\n{__doc__}"


def test_nothing_that_we_use_is_missing() -> None:
    assert not [line for line in record() if " has no " in line]


if __name__ == "__main__":
    RECORD.write_text("\n".join(record()) + "\n")
