"""The example's made-up click stream, its split over ranks, and its metrics."""

import numpy as np
import pytest
from example_criteo_files import line, write

from parts.click_source import FileSource, StreamSource, is_held_out  # isort: skip
from parts.click_stream import (  # isort: skip
    ClickStream,
)


def joined(chunks):
    chunks = list(chunks)
    return [np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in vars(chunks[0])]


def test_the_stream_is_a_function_of_its_seed():
    first, again, other = (ClickStream(seed, 64).chunk(5) for seed in (1, 1, 2))
    for one, same in zip(vars(first).values(), vars(again).values(), strict=True):
        np.testing.assert_array_equal(one, same)
    assert not np.isin(first.ids, other.ids).any()


def test_held_out_follows_the_training_in_the_stream():
    source = StreamSource(seed=0, batch_size=16, steps=3, held_out=64, rank=1, world_size=2)
    trained, held_out = list(source.training()), list(source.evaluation())
    assert (len(trained), len(held_out)) == (3, 2)
    expected = [ClickStream(0, 16).chunk(number).ids for number in (1, 3, 5, 7, 9)]
    for part, ids in zip([*trained, *held_out], expected, strict=True):
        np.testing.assert_array_equal(part.ids, ids)


@pytest.mark.parametrize("world_size", [1, 2, 3, 10])
def test_lines_of_a_file_are_each_read_once(tmp_path, world_size):
    path = write(tmp_path / "log", [line(I1=str(number)) for number in range(1, 1001)])
    trained, held_out = [], []
    for rank in range(world_size):
        source = FileSource(path, "error", 64, None, 10**6, rank, world_size)
        for part, numbers in ((source.training(), trained), (source.evaluation(), held_out)):
            mine = joined(part)[1][:, 0].astype(int).tolist()
            assert all(number % world_size == rank for number in mine)
            numbers += mine
    assert sorted(trained + held_out) == list(range(1, 1001))
    assert sorted(held_out) == [number for number in range(1, 1001) if is_held_out(number)]
    assert 80 <= len(held_out) <= 120
