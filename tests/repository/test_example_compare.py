"""examples/compare.py end to end on small streams."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES
from forked import run_script

from compare import SIZES, parse_options  # isort: skip
from parts.drifting_stream import DriftingStream  # isort: skip
from parts.parquet_clicks import read_clicks  # isort: skip

ROWS = SIZES["rows"][1]  # with --quick
CONTESTANTS = ["modulo", "MCH every step", "MCH every 10 steps"]
CONTESTANTS += ["vocabulary", "dynamic", "dynamic, policies"]


def run(*arguments: str) -> tuple[dict[str, list[float]], str]:
    """Runs the script in a process of its own; returns the figures of each contestant, and the output."""
    ended = run_script(str(EXAMPLES / "compare.py"), "--quick", *arguments)
    assert ended.codes == [0], ended.stderr
    table = {}
    for line in ended.stdout.splitlines()[1 : 1 + len(CONTESTANTS)]:
        name, *figures = re.split("  +", line)
        table[name] = [float(figure.replace(",", "").rstrip("%")) for figure in figures]
    assert list(table) == CONTESTANTS
    return table, ended.stdout + ended.stderr


def test_a_row_for_each_id_has_the_highest_auc_within_the_limit(tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    table, shown = run(*plot)
    auc, rows = ({name: figures[place] for name, figures in table.items()} for place in (0, 1))
    assert 0.65 < auc["modulo"] < auc["MCH every 10 steps"] < auc["MCH every step"]
    assert auc["modulo"] + 0.02 < auc["dynamic, policies"] < auc["dynamic"]
    assert rows["modulo"] == 2 * ROWS >= rows["dynamic, policies"]  # two tables
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(shown)
    assert not plot or picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_clicks_is_read_as_it_was_written(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    batches = [DriftingStream(0, 128, 600, 40).batch(number) for number in range(8)]
    users, items = np.concatenate([views.ids for views in batches], axis=1)
    labels = np.concatenate([views.labels for views in batches]).astype(np.int8)
    columns = {"user": users.view(np.uint64), "label": labels, "item": items}
    parquet.write_table(arrow.table(columns), tmp_path / "clicks.parquet", row_group_size=300)
    names, ids, of_file = read_clicks(tmp_path / "clicks.parquet", 100, 7)
    assert names == ["user", "item"] and ids.shape == (7, 2, 100)
    np.testing.assert_array_equal(ids[:, 1].reshape(-1), items[:700])
    np.testing.assert_array_equal(of_file.reshape(-1), labels[:700])


def test_a_wrong_option_ends_with_a_usage_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--steps", "1"])
    assert "--steps: expected at least 2" in capsys.readouterr().err
