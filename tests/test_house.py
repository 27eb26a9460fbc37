"""The rules of the house that a machine can check. A red test here names the rule and the file."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_dyn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchrec_dyn"
CORE = ROOT / "csrc"

# A file imports from lower floors, or from files named before it on its own floor.
# A new file: put its name where this holds.
FLOORS = (
    "ops initializers fan_initializers policies config",
    "optimizers row_numbers bag_layout clock cuts content_sums saved_config safetensors_file",
    "id_map row_store row_marks changes initial_rows scores waiting oldest age_limit row_life saved_life"
    " table_state table_stats table_checks insertion table_scores canonical_rows gradient_reduction",
    "table table_blocks training_step batch_rows lookup saved_tensor local_saving"
    " chunked_tensor reader_checks table_reader checkpoint_reader"
    " inspection_histograms inspection inspection_plot",
    "feature_ids input_ids input_weights bag_input tile_pooling row_pooling pooling_here"
    " table_configs optimizer_choice fused_optimizer carried_counts kernel"
    " local_table saved_state data_parallel table_handle local_lookup",
    "column_order output_order own_forwards row_wise output_dists table_layout batch_check mean_pooling"
    " grouped_lookups sharding sequence_sharding sequence_batch sent_once carry_over agreement id_exchange"
    " shard_stats whole_table sharded_table shardable_view",
    "saved_places staged_rows take_over shard_pieces load_session shard_source shard_model_source"
    " shard_model_entry"
    " shard_state_dict shard_optimizer_source shard_optimizer_entry aligned_state sharded_optimizer"
    " sharding_setup local_shards chunk_exchange moved_table resharding loaded_plain load_planner",
    "collection_tables embeddingbag_collection embedding_collection make_dynamic"
    " one_table dynamic_embedding dynamic_embedding_bag"
    " number_by_table block_embedding quotient_remainder_ids quotient_remainder_rows quotient_remainder"
    " from_static_rows from_static_optimizer from_static"
    " sharded_embeddingbag sharded_embedding across_ranks model_collections sharders feature_positions"
    " feature_processors stats_logger fair_cuts measured_constraints planner_storage plan_load planner"
    " rows_here safetensors_rows from_static_checkpoint"
    " model_tables deltas delta_rows read_delta apply_delta checkpoint",
    "serving_rows serving_files serving_maps serving_format serving_build serving_update"
    " serving_generation serving_unseen serving_int8 serving_lookup serving_traced serving_export serving",
    "__init__ __main__",
)
FIRST_FLOOR_WITH_TORCHREC = 4
IN_ORDER = [name for floor in FLOORS for name in floor.split()]

PUBLIC = [
    "AdmitAfter",
    "AdmitWithProbability",
    "BlockEmbeddingBagCollection",
    "Constant",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollection",
    "DynamicEmbeddingCollectionSharder",
    "DynamicFeatureProcessedEmbeddingBagCollectionSharder",
    "DynamicTableConfig",
    "ExpireAfter",
    "KaimingNormal",
    "KaimingUniform",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "Never",
    "Normal",
    "QuotientRemainderEmbeddingBagCollection",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "add_stats_hook",
    "assign_rows",
    "checkpoint",
    "erase_rows",
    "from_static",
    "log_stats",
    "lookup_rows",
    "make_dynamic",
    "read_counts",
    "read_ids",
    "read_last_seen",
    "read_num_rows",
    "read_stats",
]

# docs/glossary.md, column "do not say": as a whole word of a public name.
DO_NOT_SAY = {
    *("sign", "hash", "hashtable", "bucket", "buckets", "segment", "collision", "collisions"),
    *("priority", "timestamp", "purge", "variable", "utils", "util", "common"),
    *("helper", "helpers", "manager", "base", "misc"),
}

SOURCES = sorted(PACKAGE.glob("*.py"))
TREES = {path.stem: ast.parse(path.read_text()) for path in SOURCES}
every_module = pytest.mark.parametrize("name", sorted(TREES))


def imports(tree: ast.AST) -> set[tuple[str, str]]:
    """(package, module of ours or '') of every import, wherever it stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {tuple((alias.name + "..").split(".")[:2]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "torchrec_dyn":
            found |= {("torchrec_dyn", alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports of ours in full"
            found.add(tuple((f"{node.module}..").split(".")[:2]))
    return found


def functions(tree: ast.Module):
    """Public functions, and public methods of public classes whose interface is their own."""
    for node in tree.body:
        inside = [node]
        if isinstance(node, ast.ClassDef):
            inside = [] if node.bases or node.name.startswith("_") else node.body
        for function in inside:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                yield function


def test_every_file_has_a_floor():
    assert sorted(IN_ORDER) == sorted(TREES)


@every_module
def test_imports_obey_the_floors(name):
    below = IN_ORDER[: IN_ORDER.index(name)]
    ours = {module for package, module in imports(TREES[name]) if package == "torchrec_dyn"}
    assert ours <= {*below, "_C"}, f"{name} imports from above its floor"


def test_lower_floors_know_torch_only():
    for name in " ".join(FLOORS[:FIRST_FLOOR_WITH_TORCHREC]).split():
        packages = {package for package, _ in imports(TREES[name])}
        assert not packages & {"torchrec", "fbgemm_gpu"}, name


@every_module
def test_ops_are_spelled_in_one_file(name):
    source = ast.unparse(TREES[name])
    # FBGEMM's kernel for int8 rows is no op of ours.
    if name == "serving_int8":
        source = source.replace("torch.ops.fbgemm.", "")
    assert name == "ops" or ("torch.ops" not in source and "torchrec_dyn._C" not in source)


def declared_ops() -> list[str]:
    return re.findall(r'm\.def\(\s*"(\w+)\(', (CORE / "library.cpp").read_text())


def kernels(suffix: str) -> list[str]:
    text = "".join(path.read_text() for path in sorted(CORE.rglob(f"*_{suffix}")))
    return re.findall(r'm\.impl\("(\w+)"', text)


def test_library_declares_ops():
    assert len(declared_ops()) == len(set(declared_ops())) > 5


def test_every_op_has_one_cpu_kernel_and_no_kernel_lacks_a_schema():
    assert sorted(kernels("cpu.cpp")) == sorted(declared_ops())
    assert set(kernels("cuda.cu")) <= set(declared_ops())


@pytest.mark.parametrize("op", declared_ops())
def test_every_op_has_a_face_a_fake_and_a_sample(op):
    face = ast.unparse(TREES["ops"])
    assert any(function.name == op for function in functions(TREES["ops"])), "no Python face"
    assert f"'{op}'" in face or f"torchrec_dyn::{op}'" in face, "no fake kernel"
    assert re.search(rf"\b{op}\b", (ROOT / "tests/test_ops_contract.py").read_text()), "no sample"


def test_public_names_are_frozen():
    assert sorted(torchrec_dyn.__all__) == PUBLIC
    assert not [name for name in PUBLIC if not hasattr(torchrec_dyn, name)]


def words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


@every_module
def test_public_names_speak_the_glossary(name):
    tree = TREES[name]
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    named = [name, *classes, *(function.name for function in functions(tree))]
    assert not [said for said in named if words(said) & DO_NOT_SAY]


@every_module
def test_public_functions_tell_their_arguments(name):
    for function in functions(TREES[name]):
        arguments = function.args.args + function.args.kwonlyargs
        tensors = [
            argument.arg
            for argument in arguments
            if argument.annotation and re.search(r"\bTensor\b", ast.unparse(argument.annotation))
        ]
        if tensors and function.name not in {"state_dict", "load_state_dict"}:  # torch's words
            docstring = ast.get_docstring(function) or ""
            assert "Args:" in docstring, f"{name}.{function.name}: no Args"
            for tensor in tensors:
                assert f"{tensor}: " in docstring, f"{name}.{function.name}: {tensor} is not told"


def test_the_version_is_written_once():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    for path in itertools.chain(SOURCES, [ROOT / "setup.py"], CORE.rglob("*.*")):
        assert f'"{version[1]}"' not in path.read_text(errors="ignore"), path


def test_importing_leaves_cuda_alone():
    program = "import torchrec_dyn, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# ops.py may be longer: it is a list, one entry an op.
@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        ("torchrec_dyn/*.py", 300),
        ("torchrec_dyn/__init__.py", 100),
        ("csrc/*.*", 400),
        ("csrc/sanitize/*.*", 200),
        ("tests/*.py", 300),
        ("examples/*.py", 300),
        ("benchmarks/*.py", 300),
    ],
)
def test_files_are_short(pattern, limit):
    lengths = {path: path.read_text().count("\n") for path in ROOT.glob(pattern)}
    lengths.pop(PACKAGE / "ops.py", None)
    assert not {path.name: lines for path, lines in lengths.items() if lines > limit}
