"""The example's reader of the Criteo log."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from example_criteo_files import NAMES, line, write

from parts.criteo import BadLine, in_batches, parse_click, read_clicks  # isort: skip


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


def test_integers_are_signed_logarithms(tmp_path):
    path = write(tmp_path / "log", [line(I1="0", I2="-3", I3="260.0", I4="9")])
    dense = read(path).to_batch().dense_features
    expected = np.array([0.0, -np.log(4.0), np.log(261.0), np.log(10.0)])
    torch.testing.assert_close(dense[0, :4], torch.from_numpy(expected).float())


def test_all_fields_but_the_label_may_be_empty():
    label, integers, ids, present = parse_click("0" + "\t" * 39)
    assert (label, sum(integers), sum(ids), any(present)) == (0, 0.0, 0, False)


def test_commas_with_a_header_read_as_tabs_do(tmp_path):
    tabs = read(write(tmp_path / "tabs", [line(C3=""), line(label="0")]))
    commas = read(
        write(tmp_path / "commas", [",".join(NAMES), line(",", C3=""), line(",", label="0")])
    )
    for one, other in zip(vars(tabs).values(), vars(commas).values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_and_a_last_line_without_one(tmp_path, ending):
    path = tmp_path / "log"
    path.write_bytes(ending.join([line(), line(label="0")]).encode())
    assert read(path).labels.tolist() == [1, 0]


def test_gzip_is_told_by_its_content_not_its_name(tmp_path):
    text = f"{line()}\n{line(label='0')}\n".encode()
    for name in ("log.gz", "log"):
        (tmp_path / name).write_bytes(gzip.compress(text))
        assert read(tmp_path / name).labels.tolist() == [1, 0]


BAD = [
    (line() + "\t", r"expected 40 fields, got 41"),
    ("1\t2\t3", r"expected 40 fields, got 3"),
    ("", r"expected 40 fields, got 1"),
    (line(label="2"), r"label: expected 0 or 1, got '2'"),
    (line(label=""), r"label: expected 0 or 1, got ''"),
    (line(label="yes"), r"label: expected 0 or 1, got 'yes'"),
    (line(I5="x"), r"I5: expected an integer of at most 18 digits, or nothing, got 'x'"),
    (line(I5="1.5"), r"I5: expected an integer"),
    (line(I5="nan"), r"I5: expected an integer"),
    (line(I5="1_0"), r"I5: expected an integer"),
    (line(I5="٣"), r"I5: expected an integer"),
    (line(I5="9" * 400), r"I5: expected an integer .* got '9{40}'"),
    (line(C7="xyz"), r"C7: expected 1 to 16 hexadecimal digits, or nothing, got 'xyz'"),
    (line(C7="0xff"), r"C7: expected 1 to 16 hexadecimal digits"),
    (line(C7="-ff"), r"C7: expected 1 to 16 hexadecimal digits"),
    (line(C7=" ff"), r"C7: expected 1 to 16 hexadecimal digits"),
    (line(C7="f" * 17), r"C7: expected 1 to 16 hexadecimal digits"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path, bad, message, capsys):
    path = write(tmp_path / "log", [line(), bad, line(label="0")])
    with pytest.raises(BadLine, match=rf"log, line 2: {message}"):
        read(path)
    assert read(path, "skip").labels.tolist() == [1, 0]
    assert "log, line 2:" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(line().encode() + b"\n\xff\xfe\x00\n")
    with pytest.raises(BadLine, match="line 2: expected 40 fields"):
        read(path)


def test_a_header_elsewhere_than_on_line_1_is_a_bad_line(tmp_path):
    path = write(tmp_path / "log", [line(","), ",".join(NAMES)])
    with pytest.raises(BadLine, match="line 2: label: expected 0 or 1, got 'label'"):
        read(path)


def test_many_skipped_lines_are_counted_not_all_named(tmp_path, capsys):
    read(write(tmp_path / "log", ["bad"] * 30 + [line()]), "skip")
    told = capsys.readouterr().err
    assert told.count("expected 40 fields") == 5
    assert "30 lines" in told


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


def test_a_gzip_with_damaged_bytes_is_named(tmp_path):
    path = tmp_path / "log.gz"
    whole = bytearray(gzip.compress("".join(f"{line()}\n" for _ in range(100)).encode()))
    whole[-6] ^= 0xFF  # in the checksum
    path.write_bytes(whole)
    with pytest.raises(BadLine, match="expected a whole gzip file"):
        read(path)


def test_lines_of_others_are_not_parsed(tmp_path):
    path = write(tmp_path / "log", ["bad", line(), "bad", line()])
    assert len(read(path, wanted=lambda number: number % 2 == 0)) == 2


def test_an_empty_file_has_no_clicks(tmp_path):
    assert read(write(tmp_path / "log", [])) is None


def test_batches_hold_the_clicks_in_order_and_the_last_one_is_shorter(tmp_path):
    path = write(tmp_path / "log", [line(I1=str(i)) for i in range(7)])
    batches = list(in_batches(read_clicks(path, lambda number: True), 3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert np.concatenate([batch.integers[:, 0] for batch in batches]).tolist() == list(range(7))
