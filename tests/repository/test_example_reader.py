"""The example's reader of the Criteo log."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from example_criteo_files import NAMES, line, write

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


def test_commas_with_a_header_read_as_tabs_do(tmp_path):
    tabs = read(write(tmp_path / "tabs", [line(C3=""), line(label="0")]))
    commas = read(
        write(tmp_path / "commas", [",".join(NAMES), line(",", C3=""), line(",", label="0")])
    )
    for one, other in zip(vars(tabs).values(), vars(commas).values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gzip_is_told_by_its_content_not_its_name(tmp_path):
    text = f"{line()}\n{line(label='0')}\n".encode()
    for name in ("log.gz", "log"):
        (tmp_path / name).write_bytes(gzip.compress(text))
        assert read(tmp_path / name).labels.tolist() == [1, 0]


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


def test_a_gzip_that_breaks_off_is_named_or_read_as_far_as_it_goes(tmp_path, capsys):
    random = np.random.default_rng(0)
    lines = [line(C1=f"{value:016x}") for value in random.integers(0, 2**62, 5000)]
    path = tmp_path / "log.gz"
    whole = gzip.compress("".join(f"{text}\n" for text in lines).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadLine, match=r"log.gz, after line \d+: expected a whole gzip file"):
        read(path)
    assert 100 < len(read(path, "skip")) < 5000
    assert "whole gzip file" in capsys.readouterr().err


def test_batches_hold_the_clicks_in_order_and_the_last_one_is_shorter(tmp_path):
    path = write(tmp_path / "log", [line(I1=str(i)) for i in range(7)])
    batches = list(in_batches(read_clicks(path, lambda number: True), 3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert np.concatenate([batch.integers[:, 0] for batch in batches]).tolist() == list(range(7))
