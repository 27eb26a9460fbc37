"""examples/anchors.py end to end on a small stream: its figures agree with each other."""

import importlib.util
import json
from pathlib import Path

from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES
from forked import run_script

from parts.anchors_report import as_text  # isort: skip


def test_shared_and_old_rows_cost_auc_and_deltas_are_small(tmp_path: Path) -> None:
    out, picture = tmp_path / "results.json", tmp_path / "anchors.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    arguments = ["--quick", "--seeds", "1", "--json", str(out), *plot]
    ended = run_script(str(EXAMPLES / "anchors.py"), *arguments)
    assert ended.codes == [0], ended.stderr
    results = json.loads(out.read_text())
    [run] = results["runs"]
    assert 0.6 < run["shared"][-1]["auc"] < run["own"] - 0.01 < run["own"] < run["truth"]
    by_age = [run["own"], *(age["auc"] for age in run["ages"])]
    assert by_age == sorted(by_age, reverse=True) and by_age[-1] < run["own"] - 0.05
    for day in results["days"].values():  # served from files, and trained an hour before
        assert day["different"] == 0
        assert all(delta < full for delta, full in zip(day["deltas"], day["fulls"], strict=True))
    shown = ended.stdout + ended.stderr
    assert as_text(results) in shown
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(shown)
    assert not plot or picture.read_bytes().startswith(b"\x89PNG")
