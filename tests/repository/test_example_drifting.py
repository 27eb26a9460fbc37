"""examples/drifting_ids.py end to end, and its stream."""

import importlib.util
import json
import re
import sys
from collections import Counter

import numpy as np
import pytest
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES
from forked import run_script

import drifting_ids  # isort: skip
from drifting_ids import SIZES, parse_options  # isort: skip
from parts.drifting_report import runs_as_text, summarize  # isort: skip
from parts.drifting_stream import SEEN_ONCE, DriftingStream  # isort: skip

SCRIPT = str(EXAMPLES / "drifting_ids.py")
LIMIT = SIZES["limit"][1]  # with --quick
FOREVER, RECENT, ADMITTED, EXPIRED, MODULO, MANAGED = range(6)  # the runs, in order


def run(folder, *arguments):
    """Runs the script in a process of its own."""
    out = folder / "looks.json"
    ended = run_script(SCRIPT, "--quick", "--json", str(out), *arguments)
    assert ended.codes == [0], ended.stderr
    return json.loads(out.read_text()), ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process: results, what was shown, and the picture."""
    folder = tmp_path_factory.mktemp("alone")
    picture = folder / "drift.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    return *run(folder, *plot), picture


@pytest.fixture(scope="module")
def runs(alone):
    return list(alone[0]["runs"].values())


def test_rows_stay_within_the_limit_where_ids_are_evicted(runs):
    for looks in runs[RECENT:]:
        assert max(look["rows"] for look in looks) <= 2 * LIMIT  # two tables
    assert runs[RECENT][-1]["rows"] > 2 * LIMIT * 0.95  # a 64th is freed at a time
    assert runs[FOREVER][-1]["rows"] > 6 * LIMIT


def test_without_eviction_rows_grow_for_ever(runs):
    rows = [look["rows"] for look in runs[FOREVER]]
    assert rows == sorted(rows)
    assert rows[-1] - rows[len(rows) // 2] > 0.3 * rows[-1]
    assert runs[FOREVER][-1]["bytes"] > 2 * runs[RECENT][-1]["bytes"]


def test_evicting_costs_little_of_hit_rate_and_loss(alone, runs):
    results, _, _ = alone
    forever, recent, *_, modulo, managed = map(summarize, runs)
    assert forever["hit_rate"] - 0.05 < recent["hit_rate"] <= forever["hit_rate"]
    assert recent["loss"] < forever["loss"] + 0.02
    assert recent["loss"] + 0.01 < managed["loss"] < modulo["loss"]  # of as many rows
    for looks in runs:
        assert results["loss_of_truth"] < summarize(looks)["loss"]
        assert summarize(looks)["loss"] < results["loss_of_constant"] - 0.05


def test_each_policy_does_its_own(runs):
    last = [looks[-1] for looks in runs[:MODULO]]
    assert [look["refused"] > 0 for look in last] == [False, False, True, False]
    assert [look["evicted_full"] > 0 for look in last[:3]] == [False, True, True]
    assert [look["evicted_expired"] > 0 for look in last] == [False, False, False, True]
    assert last[ADMITTED]["evicted_full"] < last[RECENT]["evicted_full"] / 2
    assert last[EXPIRED]["rows"] < last[RECENT]["rows"]


def test_it_says_what_it_saw(alone, runs):
    _, shown, _ = alone
    assert runs_as_text(alone[0]["runs"]) in shown
    assert f"{runs[RECENT][-1]['rows']:,}" in shown
    assert "Loss of a constant" in shown
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(shown)


def test_it_draws_a_picture(alone):
    pytest.importorskip("matplotlib")
    picture = alone[2].read_bytes()
    assert picture.startswith(b"\x89PNG") and 10_000 < len(picture) < 150_000


@pytest.mark.deep
def test_two_processes_with_whole_tables_see_the_same(tmp_path, runs):
    out = tmp_path / "looks.json"
    arguments = ["--quick", "--json", str(out), "--world-size", "2", "--plan", "table_wise"]
    ended = run_script(SCRIPT, *arguments, ranks=2)
    assert ended.codes == [0, 0], ended.stderr
    results = json.loads(out.read_text())
    of_one = runs[:-1]  # TorchRec's MCH runs on one process alone
    for mine, theirs in zip(results["runs"].values(), of_one, strict=True):
        for look, other in zip(mine, theirs, strict=True):
            assert look.pop("loss") == pytest.approx(other["loss"], abs=1e-3)
            exact = {key: value for key, value in other.items() if key != "loss"}
            assert look == pytest.approx(exact, rel=0, abs=0, nan_ok=True)


def test_several_processes_are_started_by_torchrun(monkeypatch):
    asked = []
    monkeypatch.setattr(drifting_ids, "start_processes", lambda *given: asked.append(given) or 3)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--quick", "--world-size", "2"])
    assert drifting_ids.main() == 3
    assert asked == [(SCRIPT, ["--quick", "--world-size", "2"], 2)]


def test_without_matplotlib_the_error_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--plot", str(tmp_path / "out.png")])
    assert "--plot: expected matplotlib, got none. Run make build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "expected at least 1, got 0"),
        (["--steps", "10"], "--steps: expected at least 50"),
        (["--seed", "-1"], r"expected a number in \[0, 2\^63\), got -1"),
        (["--limit", "100"], r"--limit: expected at least --batch-size \(1024\), got 100"),
        (
            ["--quick", "--world-size", "129"],
            r"--batch-size: expected at least --world-size \(129\)",
        ),
        (["--plot", "/nowhere/out"], "expected a file that can be written, got /nowhere/out"),
        (["--plan", "diagonal"], "invalid choice: 'diagonal'"),
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
