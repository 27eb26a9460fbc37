"""The words of a saved checksum: as many as the last state needs, and old ones stay where they were."""

import pytest
import torch

from torchrec_dyn.checkpoint_format.content_sums import (
    MODEL_TENSORS,
    OPTIMIZER_TENSORS,
    OPTIMIZER_WORDS,
    as_words,
    from_words,
)


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ({"step": 3, "config": 4}, [0, 0, 3, 4]),
        ({"momentum1": 1, "momentum2": 2, "step": 3, "config": 4}, [1, 2, 3, 4]),
        ({"momentum1": 1, "step": 3, "config": 4, "row_counter": 5}, [1, 0, 3, 4, 5]),
        ({"step": 3, "config": 4, "row_counter": 0}, [0, 0, 3, 4, 0]),
    ],
)
def test_words_end_with_the_last_state(sums, words):
    saved = as_words(sums, OPTIMIZER_TENSORS)
    assert saved.tolist() == words and saved.shape in OPTIMIZER_WORDS
    assert from_words(saved, OPTIMIZER_TENSORS) == {**dict.fromkeys(OPTIMIZER_TENSORS, 0), **sums}


@pytest.mark.parametrize("order", [MODEL_TENSORS, OPTIMIZER_TENSORS])
def test_other_numbers_of_words_are_refused(order):
    for count in (3, len(order) + 1):
        with pytest.raises(ValueError, match="zip"):
            from_words(torch.zeros(count, dtype=torch.int64), order)
