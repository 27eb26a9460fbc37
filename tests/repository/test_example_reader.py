"""The example's reader of the Criteo log."""

from pathlib import Path

import numpy as np
import pytest
from example_criteo_files import line, write

from parts.criteo import BadLine, in_batches, read_clicks  # isort: skip


def read(path: Path, on_bad_line: str = "error", wanted=lambda number: True):
    return next(in_batches(read_clicks(path, wanted, on_bad_line), 10**6), None)


def test_a_line_becomes_label_integers_and_ids(tmp_path):
    clicks = read(write(tmp_path / "log", [line(), line(label="0", C1="ff")]))
    assert clicks.labels.tolist() == [1, 0]
    assert clicks.integers[0].tolist() == list(range(13))
    assert clicks.ids[0].tolist() == [0xA0 + i for i in range(26)]
    assert clicks.ids[1, 0] == 0xFF
    assert clicks.present.all()


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ("0", 0),
        ("05db9164", 0x05DB9164),
        ("FFFF", 0xFFFF),
        ("7fffffffffffffff", 2**63 - 1),
        ("8000000000000000", -(2**63)),
        ("ffffffffffffffff", -1),
    ],
)
def test_hexadecimal_is_the_id_over_the_whole_range(tmp_path, text, id_):
    clicks = read(write(tmp_path / "log", [line(C26=text)]))
    assert clicks.ids[0, 25] == id_
    assert clicks.to_batch().sparse_features["C26"].values().tolist() == [id_]


def test_empty_categorical_is_an_empty_bag_and_empty_integer_a_zero(tmp_path):
    path = write(tmp_path / "log", [line(C2="", I1=""), line(C2="0", I1="5"), line(C26="")])
    batch = read(path).to_batch()
    assert batch.sparse_features["C2"].lengths().tolist() == [0, 1, 1]
    assert batch.sparse_features["C2"].values().tolist() == [0, 0xA1]
    assert batch.sparse_features["C26"].lengths().tolist() == [1, 1, 0]
    assert batch.sparse_features["C1"].values().tolist() == [0xA0] * 3
    assert batch.dense_features[0, 0] == 0.0


BAD = [
    (line() + "\t", r"expected 40 fields, got 41"),
    (line(label="2"), r"label: expected 0 or 1, got '2'"),
    (line(I5="1.5"), r"I5: expected an integer of at most 18 digits, or nothing, got '1.5'"),
    (line(C7="xyz"), r"C7: expected 1 to 16 hexadecimal digits, or nothing, got 'xyz'"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path, bad, message, capsys):
    path = write(tmp_path / "log", [line(), bad, line(label="0")])
    with pytest.raises(BadLine, match=rf"log, line 2: {message}"):
        read(path)
    assert read(path, "skip").labels.tolist() == [1, 0]
    assert "log, line 2:" in capsys.readouterr().err


def test_batches_hold_the_clicks_in_order_and_the_last_one_is_shorter(tmp_path):
    path = write(tmp_path / "log", [line(I1=str(i)) for i in range(7)])
    batches = list(in_batches(read_clicks(path, lambda number: True), 3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert np.concatenate([batch.integers[:, 0] for batch in batches]).tolist() == list(range(7))
