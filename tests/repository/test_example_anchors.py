"""examples/anchors.py end to end on a small stream: its figures agree with each other and with its files."""

import importlib.util
import json
import re

import numpy as np
import pytest
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES
from forked import run_script

import anchors  # isort: skip
from anchors import SHARES, copies, parse_options, rows_for  # isort: skip
from parts.anchors_report import as_text  # isort: skip
from parts.fixed_rows import measure_sharing  # isort: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Results, what was shown, and the picture."""
    folder = tmp_path_factory.mktemp("anchors")
    out, picture = folder / "results.json", folder / "anchors.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    arguments = ["--quick", "--seeds", "1", "--json", str(out), *plot]
    ended = run_script(str(EXAMPLES / "anchors.py"), *arguments)
    assert ended.codes == [0], ended.stderr
    return json.loads(out.read_text()), ended.stdout + ended.stderr, picture


def test_shared_rows_cost_auc(measured):
    [run] = measured[0]["runs"]
    assert [one["share"] for one in run["shared"]] == list(SHARES)
    for one in run["shared"]:
        assert one["of_ids"] == pytest.approx(one["share"], abs=0.03)
        assert one["lost"] < one["of_ids"]
    few, _, _, most = (one["auc"] for one in run["shared"])
    assert 0.6 < most < run["own"] - 0.01 < run["own"] < run["truth"]
    assert abs(few - run["own"]) < 0.005


def test_old_rows_cost_auc(measured):
    [run] = measured[0]["runs"]
    aucs = [run["own"], *(one["auc"] for one in run["ages"])]
    assert aucs == sorted(aucs, reverse=True) and aucs[-1] < run["own"] - 0.05
    of_age = {one["hours"]: one["auc"] for one in run["ages"]}
    for one in run["intervals"]:  # rows of all ages below the interval
        assert of_age.get(one["hours"], 0.0) < one["auc"] < run["own"]


def test_tables_served_from_files_predict_as_the_trainer_did_an_hour_before(measured):
    results = measured[0]
    days = results["days"].values()
    assert [day["different"] for day in days] == [0, 0]
    [every_hour] = [one["auc"] for one in results["runs"][0]["intervals"] if one["hours"] == 1]
    assert results["days"]["no policy"]["auc"] == every_hour


def test_deltas_are_smaller_than_full_saves(measured):
    results = measured[0]
    free, bounded = results["days"].values()
    for day in (free, bounded):
        assert len(day["deltas"]) == len(day["fulls"]) == results["hours"]
        for changed, rows in zip(day["changed"], day["rows"], strict=True):
            assert 0 < changed < rows
        for delta, full in zip(day["deltas"], day["fulls"], strict=True):
            assert delta < full
    assert sum(free["deltas"]) < sum(free["fulls"]) / 3
    assert max(bounded["rows"]) <= 2 * results["living"]  # two tables
    assert abs(free["rows"][-1] - 2 * results["runs"][0]["num_ids"]) <= 1  # its mean, rounded


def test_it_says_and_draws_what_it_measured(measured):
    results, shown, picture = measured
    assert as_text(results) in shown
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(shown)
    pytest.importorskip("matplotlib")
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG") and 10_000 < len(drawn) < 150_000


def test_sharing_is_counted_by_id_and_by_view():
    ids = np.array([0, 0, 0, 10, 3, 4, -6])  # modulo 10: 0 and 10 share a row, 4 and -6 share one
    assert measure_sharing(ids, ids % 10) == {
        "ids": 4,
        "of_ids": pytest.approx(4 / 5),
        "of_views": pytest.approx(6 / 7),
        "lost": pytest.approx(2 / 5),
    }


@pytest.mark.parametrize("share", SHARES)
def test_rows_are_chosen_for_a_share(share):
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 20_000)
    sharing = measure_sharing(ids, ids % rows_for(len(ids), share))
    assert sharing["of_ids"] == pytest.approx(share, abs=0.02)


def test_a_copy_predicts_each_batch_once():
    options = parse_options(["--hour", "4", "--hours", "6"])
    first, end = 48, 72  # two days before; the measured day
    for kind, of_kind in copies(options).items():
        for steps, ahead in of_kind.items():
            predicted = [
                (step + more, more)
                for step in range(end)
                for more in ahead(step - first)
                if first <= step + more < end
            ]
            assert sorted(number for number, _ in predicted) == list(range(first, end))
            ages = {age for _, age in predicted}
            assert ages == ({steps} if kind == "ages" else set(range(steps)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "expected at least 1, got 0"),
        (["--living", "100"], r"--living: expected at least --batch-size \(512\), got 100"),
        (["--plot", "/nowhere/out"], "expected a file that can be written, got /nowhere/out"),
    ],
)
def test_a_wrong_option_ends_with_a_usage_message(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_without_matplotlib_the_error_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(anchors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--plot", str(tmp_path / "out.png")])
    assert "--plot: expected matplotlib, got none. Run make build" in capsys.readouterr().err
