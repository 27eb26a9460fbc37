"""examples/generative.py: it learns, its table stays bounded, and it goes on after a kill."""

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from forked import Ended, die_before_commit, run_ranks, run_script
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints

from generative import (  # isort: skip
    NextItem,
    draw_negatives,
    last_tokens,
    parse_options,
    sampled_softmax,
)
from parts.histories import Events, Histories, Sample, features_of  # isort: skip
from parts.item_stream import ItemStream  # isort: skip
from parts.ranking import ranks_by_popularity, ranks_by_score, sums_of, sums_of_random  # isort: skip

SCRIPT = EXAMPLES / "generative.py"
SMALL = ["--quick", "--windows", "6"]


def figures(ended: Ended) -> dict[str, list[float]]:
    """HR@10 and NDCG@10 by who ranks."""
    assert not any(ended.codes), ended.stderr
    found = re.findall(r"^(\w[\w ]+?) +(0\.\d{4}) +(0\.\d{4})$", ended.stdout, re.M)
    return {name: [float(number) for number in numbers] for name, *numbers in found}


def test_it_beats_popularity_in_a_bounded_table(tmp_path: Path) -> None:
    picture = tmp_path / "generative.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    ended = run_script(SCRIPT, "--quick", *plot)
    shown = figures(ended)
    best, model, popular, random = shown.values()
    for metric in (0, 1):
        assert best[metric] > model[metric] > 1.2 * popular[metric] > 2 * random[metric]
    rows, limit, items, evicted = (
        int(number.replace(",", "")) for number in re.findall(r"[\d,]+\d", ended.stdout)[-4:]
    )
    assert 140 <= rows <= limit == 150 and items > 250
    assert evicted >= items - 2 * limit
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(ended.stderr)
    assert not plot or picture.read_bytes().startswith(b"\x89PNG")


def run_and_watch(*arguments: str) -> None:
    """Runs the example in this process, looks at its table, and prints what it has seen."""
    sys.path.insert(0, str(EXAMPLES))
    import generative
    import torch.distributed as dist

    dist.init_process_group("gloo")
    seen = []
    evaluate = generative.Trainer._evaluate

    def contents(trainer):
        items = trainer._items
        ids = dyn.read_ids(items, "item")
        stats = dyn.read_stats(items, "item")
        return [ids.tolist(), dyn.read_counts(items, "item", ids).tolist(), stats["step"]]

    def evaluate_and_compare(trainer, trained, left_out):
        before = contents(trainer)
        result = evaluate(trainer, trained, left_out)
        seen.append({"before": before, "after": contents(trainer)})
        return result

    generative.Trainer._evaluate = evaluate_and_compare
    results = generative.run(parse_options([*arguments]))
    for one, result in zip(seen, results, strict=True):
        one["loss"] = result["loss"]
    if dist.get_rank() == 0:
        print(json.dumps(seen))


def watched(*arguments: str, ranks: int = 1) -> list[dict]:
    ended = run_ranks(run_and_watch, *arguments, ranks=ranks)
    assert not any(ended.codes), ended.stderr
    return json.loads(ended.stdout)


def test_only_trained_next_items_get_rows_and_are_counted() -> None:
    options = parse_options(SMALL)
    stream = ItemStream(
        0, options.users, options.window, options.groups, options.places, options.lifetime
    )
    histories = Histories(stream.events(6), options.window, options.length)
    roomy, full = (watched(*SMALL, "--rows", rows) for rows in ("10000", "100"))
    times: dict[int, int] = {}
    for window, (one, bounded) in enumerate(zip(roomy, full, strict=True)):
        for sample in histories.samples(window)[0]:
            for item in sample.following.tolist():
                times[item] = times.get(item, 0) + 1
        assert dict(zip(*one["before"][:2], strict=True)) == times
        assert one["after"] == one["before"], "an evaluation changes nothing"
        ids, counts, _ = bounded["before"]
        assert 90 <= len(ids) <= 100 and min(counts) > 0  # a row that is only read would have 0
        assert bounded["after"] == bounded["before"]
    assert len(times) > 120, "items drift"


@pytest.mark.parametrize(
    "sizes",
    [["--windows", "6"], ["--windows", "2", "--window", "60", "--batch-size", "1"]],
    ids=["usual", "a rank without a sample"],
)
def test_two_ranks_learn_what_one_learns(sizes: list[str]) -> None:
    roomy = ["--quick", *sizes, "--rows", "10000"]
    one, two = watched(*roomy), watched(*roomy, ranks=2)
    assert [seen["after"] for seen in one] == [seen["after"] for seen in two]
    np.testing.assert_allclose(
        [seen["loss"] for seen in two], [seen["loss"] for seen in one], rtol=1e-4
    )


def run_until(arguments: list[str], dies_at: int | None) -> None:
    """Runs the script; the rank that writes dies at the n-th entry, before its commit file is written."""
    if dies_at is not None and os.environ["RANK"] == "0":
        die_before_commit(dies_at)
    sys.argv = [str(SCRIPT), *arguments]
    sys.path.insert(0, str(EXAMPLES))
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), {"__name__": "__main__", "__file__": ""})


def test_a_killed_run_ends_with_the_same_figures_on_two_ranks(tmp_path: Path) -> None:
    options = ["--quick", "--windows", "6", "--save-every", "2"]
    whole = run_script(SCRIPT, *options, ranks=2)
    assert figures(whole)
    killed = [*options, "--folder", str(tmp_path)]
    assert -signal.SIGKILL in run_ranks(run_until, killed, 3, ranks=2).codes
    assert [one.step for one in Checkpoints(tmp_path).entries()] == [2, 4]
    other = run_script(SCRIPT, *killed, "--negatives", "32")
    assert other.codes == [1] and "expected the options of its run" in other.stderr
    again = run_script(SCRIPT, *killed, ranks=2)
    assert again.codes == [0, 0] and again.stdout == whole.stdout, again.stderr


def test_a_file_gives_what_the_stream_in_it_gives(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    options = parse_options(SMALL)
    stream = ItemStream(
        0, options.users, options.window, options.groups, options.places, options.lifetime
    )
    events = stream.events(6)
    order = np.random.default_rng(0).permutation(len(events.users))
    names = {"movie_id": events.items, "timestamp": events.times, "user_id": events.users}
    columns = {name: values[order] for name, values in names.items()}
    columns["rating"] = np.full(len(order), 3.5)
    file = tmp_path / "ratings.parquet"
    parquet.write_table(arrow.table(columns), file, row_group_size=500)
    of_file = run_script(SCRIPT, "--quick", "--parquet", str(file))
    generated = run_script(SCRIPT, *SMALL)
    shown = figures(generated)
    assert shown.pop("one who knows the stream")
    assert figures(of_file) == shown and len(shown) == 3
    parquet.write_table(arrow.table(columns).drop(["timestamp"]), file)
    broken = run_script(SCRIPT, "--quick", "--parquet", str(file))
    assert broken.codes == [1] and "expected columns of integers `user_id`" in broken.stderr


def test_the_corrected_loss_is_that_over_all_items() -> None:
    """With many draws the estimate is close to the cross-entropy over all items."""
    torch.manual_seed(0)
    states, rows = torch.randn(8, 4), torch.randn(50, 4)
    ids = torch.arange(50) * 7
    following = torch.randint(50, (8,))
    q = torch.rand(50, dtype=torch.float64) ** 3 + 0.01
    q /= q.sum()
    drawn = torch.multinomial(q, 400_000, replacement=True)
    exact = torch.nn.functional.cross_entropy(states @ rows.T, following, reduction="sum")
    loss = sampled_softmax(
        states, rows[following], ids[following], rows[drawn], ids[drawn], q[drawn]
    )
    torch.testing.assert_close(loss, exact, rtol=0.005, atol=0)


def test_a_negative_without_a_row_is_left_out() -> None:
    states, rows = torch.ones(1, 2), torch.tensor([[1.0, 0.0]])
    ids, drawn = torch.tensor([5]), torch.tensor([5, 6])
    negatives = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    loss = sampled_softmax(states, rows, ids, negatives, drawn, torch.tensor([0.5, 0.5]))
    assert loss == 0.0


def test_negatives_are_drawn_with_the_probabilities_that_are_told() -> None:
    item = EmbeddingConfig(10**6, 4, name="item", feature_names=["next"])
    items = dyn.DynamicEmbeddingCollection(
        [item],
        dynamic=dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed()),
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0},
    )
    seen = torch.arange(10).repeat_interleave(
        torch.arange(1, 11) ** 2
    )  # id k occurs (k + 1)^2 times
    items(KeyedJaggedTensor(["next"], seen, lengths=torch.tensor([len(seen)])))
    ids, probabilities = draw_negatives(items, 40_000, draw=1)
    shares = 0.5 / 10 + 0.5 * torch.arange(1, 11) ** 2 / len(seen)
    torch.testing.assert_close(probabilities, shares.double()[ids])
    assert (torch.bincount(ids) / 40_000 - shares).abs().max() < 0.01


def test_every_event_is_trained_once_and_left_out_before() -> None:
    random = np.random.default_rng(0)
    users, items = random.integers(0, 7, 300), np.arange(300)
    histories = Histories(Events(users, items, items), window=50, length=6)
    trained: set[int] = set()
    for window in range(6):
        samples, left_out = histories.samples(window)
        new = [item for sample in samples for item in sample.following.tolist()]
        assert len(new) == len({*new}) and not trained & {*new}
        trained |= {*new}
        for sample in [*samples, *left_out]:
            own = items[users == users[sample.event]].tolist()
            end = own.index(sample.event)
            assert sample.history.tolist() == own[max(end - 6, 0) : end]
            assert sample.following.tolist() == own[end - len(sample.following) + 1 : end + 1]
        asked = {sample.event for sample in left_out}
        until, active = users[: 50 * (window + 1)], users[50 * window : 50 * (window + 1)]
        assert asked == {int(np.flatnonzero(until == user).max()) for user in {*active.tolist()}}
        assert not asked & trained
    assert trained == {*range(300)} - asked


def test_a_state_depends_on_earlier_items_only() -> None:
    model = NextItem(parse_options(["--quick"]))
    nothing = torch.empty(0, dtype=torch.int64)

    def states(*histories: list[int]) -> list[torch.Tensor]:
        """The states of each sample, of its start and of each item."""
        samples = [
            Sample(np.array(items, dtype=np.int64), np.arange(1, len(items) + 2), 0)
            for items in histories
        ]
        out, _, _ = model(features_of(samples, nothing))
        return list(out.split([len(items) + 1 for items in histories]))

    states([], [1, 2, 3, 4, 5])  # next items 1 to 6 get rows
    model.eval()
    alone, beside, other = states([1, 2])[0], states([1, 2], [3, 4, 5, 6])[0], states([1, 3])[0]
    torch.testing.assert_close(beside, alone)
    torch.testing.assert_close(other[:2], alone[:2])
    assert not other[2].allclose(alone[2]) and not states([2, 1])[0][2].allclose(alone[2])


def test_tokens_that_predict_next_items() -> None:
    samples, tokens = last_tokens(torch.tensor([3, 0, 2]), torch.tensor([2, 0, 3]))
    assert samples.tolist() == [0, 0, 2, 2, 2] and tokens.tolist() == [2, 3, 0, 1, 2]


def test_figures_of_known_ranks() -> None:
    scores = torch.arange(12.0).repeat(4, 1)
    places = torch.tensor([11, 9, 0, -1])  # ranks 1, 3, 12, and no candidate
    assert ranks_by_score(scores, places).tolist() == [1, 3, 12, float("inf")]
    assert ranks_by_score(torch.zeros(1, 3), torch.tensor([1])).tolist() == [3]
    assert ranks_by_popularity(np.array([5, 7, 7]), torch.tensor([0, 1, 2, -1])).tolist() == [
        *(3, 1, 2),
        float("inf"),
    ]
    assert sums_of(ranks_by_score(scores, places)).tolist() == [2, 1 + 1 / np.log2(4)]
    of_one = sums_of_random(torch.tensor([0]), 100)
    torch.testing.assert_close(of_one[0], torch.tensor(0.1, dtype=torch.float64))
    assert sums_of_random(torch.tensor([0, -1]), 5)[0] == 1


def test_a_wrong_option_ends_with_a_usage_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--negatives", "3"])
    assert "--negatives: expected an even number" in capsys.readouterr().err
