"""examples/mixed_dimensions.py: every kind of table trains, and holds what it should."""

from example_criteo_files import EXAMPLES  # noqa: F401  (puts the folder on the path)

import mixed_dimensions  # isort: skip

SMALL = ["--steps", "12", "--batch-size", "256", "--held-out", "2048", "--buckets", "64"]


def test_the_table(capsys):
    mixed_dimensions.main(SMALL)
    heading, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert heading == ["tables", "rows", "MB", "AUC", "NE"]
    kinds = [line[0] for line in lines]
    assert kinds == list(mixed_dimensions.KINDS)
    rows, megabytes, auc = (
        {line[0]: float(line[column].replace(",", "")) for line in lines} for column in (1, 2, 3)
    )
    assert rows["full"] == rows["block"] and megabytes["block"] < 0.7 * megabytes["full"]
    for kind in ("mult", "add", "concat", "folded"):
        assert rows[kind] <= 26 * 2 * 64 and megabytes[kind] < 0.5 * megabytes["full"]
    assert megabytes["concat"] < megabytes["mult"] == megabytes["add"]
    assert min(auc.values()) > 0.55
