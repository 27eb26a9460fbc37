"""examples/compare.py end to end on small streams, and the generated stream."""

import importlib.util
import re
from collections import Counter

import numpy as np
import pytest
import torch
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES
from forked import run_script
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import compare  # isort: skip
from compare import SIZES, parse_options  # isort: skip
from parts.drifting_stream import SEEN_ONCE, DriftingStream  # isort: skip
from parts.fixed_rows import ManagedCollision, StaticRows  # isort: skip
from parts.parquet_clicks import read_clicks  # isort: skip

SCRIPT = str(EXAMPLES / "compare.py")
ROWS = SIZES["rows"][1]  # with --quick
CONTESTANTS = ["modulo", "MCH every step", "MCH every 10 steps"]
CONTESTANTS += ["vocabulary", "dynamic", "dynamic, policies"]
COLUMNS = ("auc", "rows", "bytes", "step", "sharing", "in_shared", "without")


def table_of(shown):
    """The printed table: the figures of each contestant by column."""
    heading, *lines = shown.splitlines()[: 1 + len(CONTESTANTS)]
    assert re.split("  +", heading.strip()) == [
        *("AUC", "rows", "bytes", "ms a step", "ids that shared a row"),
        *("lookups of shared rows", "lookups without a row"),
    ]
    table = {}
    for line in lines:
        name, *figures = re.split("  +", line)
        numbers = [float(figure.replace(",", "").rstrip("%")) for figure in figures]
        table[name] = dict(zip(COLUMNS, numbers, strict=True))
    assert list(table) == CONTESTANTS
    return table


def run(*arguments):
    """Runs the script in a process of its own. Returns what it shows."""
    ended = run_script(SCRIPT, "--quick", *arguments)
    assert ended.codes == [0], ended.stderr
    return ended.stdout, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The generated stream: the table, what was shown, and the picture."""
    picture = tmp_path_factory.mktemp("compare") / "compare.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    printed, shown = run(*plot)
    return table_of(printed), shown, picture


def test_a_row_for_each_id_has_the_highest_auc(alone):
    table, shown, _ = alone
    auc = {name: figures["auc"] for name, figures in table.items()}
    [best] = re.findall(r"has an AUC of (0\.\d+)", shown)
    assert 0.65 < auc["modulo"] < auc["MCH every 10 steps"] < auc["MCH every step"]
    assert auc["dynamic, policies"] > auc["modulo"] + 0.02  # of as many rows
    assert abs(auc["vocabulary"] - auc["dynamic"]) < 0.005 < float(best) - auc["vocabulary"]
    assert auc["dynamic, policies"] < auc["dynamic"]


def test_rows_stay_within_the_limit(alone):
    table, _, _ = alone
    for name in CONTESTANTS[:3]:
        assert table[name]["rows"] == 2 * ROWS  # two tables
    assert 2 * ROWS * 0.95 < table["dynamic, policies"]["rows"] <= 2 * ROWS
    assert table["dynamic"]["rows"] == table["vocabulary"]["rows"] > 6 * ROWS
    assert table["modulo"]["bytes"] == 2 * ROWS * (16 + 1) * 4  # weights and a float of state
    assert table["modulo"]["bytes"] < table["dynamic, policies"]["bytes"]
    assert table["dynamic, policies"]["bytes"] < table["dynamic"]["bytes"] / 2


def test_ids_share_rows_only_without_rows_of_their_own(alone):
    table, shown, _ = alone
    for name in CONTESTANTS[3:]:
        assert table[name]["sharing"] == table[name]["in_shared"] == 0
    ids = table["vocabulary"]["rows"]
    assert f"{ids:,.0f} ids" in shown
    assert table["modulo"]["sharing"] == ids and table["modulo"]["in_shared"] == 100.0
    often, rarely = (table[name] for name in CONTESTANTS[1:3])
    assert 0 <= often["sharing"] < rarely["sharing"] < ids
    assert often["in_shared"] < rarely["in_shared"] < 60
    without = {name: figures["without"] for name, figures in table.items()}
    assert 100 * SEEN_ONCE < without.pop("dynamic, policies") < 50
    assert not any(without.values())


def test_it_shows_and_draws_no_noise(alone):
    _, shown, picture = alone
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(shown)
    pytest.importorskip("matplotlib")
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG") and 10_000 < len(drawn) < 150_000


def test_a_row_that_mch_gives_to_another_id_starts_again():
    size, lr, initial = 4, 0.2, 0.01
    table = EmbeddingBagConfig(
        name="user",
        embedding_dim=4,
        num_embeddings=size,
        feature_names=["user"],
        weight_init_min=-initial,
        weight_init_max=initial,
    )
    rows = StaticRows([table], ManagedCollision([table], 1), lr)
    numbers = set()
    for ids in ([1, 2, 3], [4, 5, 6], [4, 5, 6], [7, 8, 9], [7, 8, 9]):
        batch = KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.ones(3).int())
        first = rows(batch)
        read = rows.rows_read()[0]
        new = torch.from_numpy(~np.isin(read, list(numbers)) & (read % size != size - 1))
        numbers |= set(read.tolist())
        assert (first[new].abs() <= initial).all()
        first.sum().backward()
        second = rows(batch)  # may move ids from the last row to rows of their own
        same = new & torch.from_numpy(read == rows.rows_read()[0])
        torch.testing.assert_close(second[same], first[same].detach() - lr)  # Adagrad's first step
    assert sum(number >= size for number in numbers) >= 3, "rows that got another id"


def write_parquet(path, **columns):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=300)
    return path


def test_a_file_of_the_reader(tmp_path):
    """The generated stream from a file: the same figures, but for what only the generator knows."""
    stream = DriftingStream(0, 128, 600, 40)
    batches = [stream.batch(number) for number in range(20)]
    users, items = np.concatenate([views.ids for views in batches], axis=1)
    labels = np.concatenate([views.labels for views in batches]).astype(np.int8)
    path = write_parquet(
        tmp_path / "clicks.parquet", user=users.view(np.uint64), label=labels, item=items
    )
    from_file, of_generator = (
        run(*arguments)[0]
        for arguments in (("--parquet", str(path)), ("--steps", str(len(batches))))
    )
    assert "hidden values" not in from_file
    expected = table_of(of_generator)
    for name, figures in table_of(from_file).items():
        assert figures | {"step": 0.0} == expected[name] | {"step": 0.0}
    names, ids, of_file = read_clicks(path, 100, 7)  # of parts that end with row groups
    assert names == ["user", "item"] and ids.shape == (7, 2, 100)
    np.testing.assert_array_equal(ids[:, 1].reshape(-1), items[:700])
    np.testing.assert_array_equal(of_file.reshape(-1), labels[:700])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1, 2]}, "expected a column `label` of 0 and 1; .* got the columns user"),
        ({"label": [0, 1]}, "expected a column `label`"),
        ({"label": [0, 1], "user": ["a", "b"]}, "column user: expected integers, got string"),
        ({"label": [0, 1], "user": [1, None]}, "column user: expected no nulls"),
        ({"label": [0, 2], "user": [1, 2]}, "column label: expected 0 and 1"),
        ({"label": [0], "user": [1]}, "expected at least two batches of 1 clicks, got 1 clicks"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path, columns, message):
    path = write_parquet(tmp_path / "wrong.parquet", **columns)
    with pytest.raises(ValueError, match=message):
        read_clicks(path, 1, None)


def test_a_file_of_another_kind_ends_with_a_message(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    path = tmp_path / "clicks.csv"
    path.write_text("label,user\n1,2\n")
    monkeypatch.setattr(compare.sys, "argv", [SCRIPT, "--parquet", str(path)])
    with pytest.raises(SystemExit, match=r"^compare\.py: .*clicks\.csv: expected a Parquet file"):
        compare.main()


@pytest.mark.parametrize(("option", "package"), [("plot", "matplotlib"), ("parquet", "pyarrow")])
def test_without_a_package_the_error_says_what_to_do(
    monkeypatch, capsys, tmp_path, option, package
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a_file").touch()
    with pytest.raises(SystemExit, match="2"):
        parse_options([f"--{option}", str(tmp_path / "a_file")])
    assert f"--{option}: expected {package}, got none. Run pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "expected at least 1, got 0"),
        (["--steps", "1"], "--steps: expected at least 2, half of them to measure, got 1"),
        (["--dim", "6"], "--dim: expected a multiple of 4, got 6"),
        (["--seed", "-1"], r"expected a number in \[0, 2\^63\), got -1"),
        (["--rows", "100"], r"--rows: expected at least --batch-size \(1024\), got 100"),
        (["--plot", "/nowhere/out"], "expected a file that can be written, got /nowhere/out"),
        (["--parquet", "/nowhere"], "expected a readable file, got /nowhere"),
    ],
)
def test_a_wrong_option_ends_with_a_usage_message(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments)
    assert re.search(message, capsys.readouterr().err)


STREAM = DriftingStream(seed=3, batch_size=500, living=300, lifetime=50)


def test_the_stream_is_a_function_of_its_seed_and_splits_over_ranks():
    views, again = STREAM.batch(7), STREAM.batch(7)
    other = DriftingStream(4, 500, 300, 50).batch(7)
    np.testing.assert_array_equal(views.ids, again.ids)
    np.testing.assert_array_equal(views.labels, again.labels)
    assert not np.isin(views.ids, other.ids).any()
    parts = [views.part(rank, 3) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([part.ids for part in parts], axis=1), views.ids)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), views.labels)
    assert views.features()["item"].values().tolist() == views.ids[1].tolist()


def test_ids_come_stay_for_their_lifetime_and_never_come_back():
    seen = {}
    occurrences = Counter()
    for step in range(200):
        ids = STREAM.batch(step).ids[0].tolist()
        occurrences.update(ids)
        for user in ids:
            seen.setdefault(user, [step, step])[1] = step
    spans = [last - first + 1 for first, last in seen.values()]
    assert 45 < max(spans) <= 50
    once = sum(occurrences[user] == 1 for user in occurrences) / occurrences.total()
    assert SEEN_ONCE < once < 1.5 * SEEN_ONCE
    arrivals = np.array([first for first, _ in seen.values()])
    per_quarter = np.histogram(arrivals[arrivals >= 40], bins=4)[0]
    assert per_quarter.min() > 0.8 * per_quarter.max()  # all the time, not all at once


def test_labels_follow_the_hidden_traits():
    views = [STREAM.batch(step) for step in range(40)]
    labels, truth = (
        np.concatenate([getattr(v, name) for v in views]) for name in ("labels", "probabilities")
    )
    for low in (0.0, 0.25, 0.5, 0.75):
        here = (truth >= low) & (truth < low + 0.25)
        assert labels[here].mean() == pytest.approx(truth[here].mean(), abs=0.03)
