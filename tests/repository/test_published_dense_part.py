"""The code of docs/guide/serve/publish.md serves rows and dense part of one entry while others appear."""

from pathlib import Path
from typing import Any

import pages
import pytest
import torch.distributed.checkpoint as dcp

from torchrec_dyn import serving

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/serve/publish.md"


def names_of_page() -> dict[str, Any]:
    """Returns the names of the page after its first save, a follower, and `served_model`."""
    names: dict[str, Any] = {}
    for _, code in pages.python_blocks(PAGE.read_text()):
        if "sys.executable" in code:
            break
        exec(code, names)
    [block] = [one for _, one in pages.python_blocks(PAGE.read_text()) if "def served_model" in one]
    exec(block.partition("\n\n\nnow_served")[0], names)
    names["follower"].poll()  # in float32
    return names


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("place", "name"), [(serving, "ServingEmbeddingBagCollection"), (dcp, "load")]
)
def test_no_model_has_parts_of_two_entries(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, real, left = names_of_page(), getattr(place, name), [2]

    def call(*args: Any, **options: Any) -> Any:
        if left:
            names["train"](step=left.pop())
            names["follower"].poll()
        return real(*args, **options)

    monkeypatch.setattr(place, name, call)
    whole, model = names["served_model"](), names["model"].eval()
    assert not left and whole.over.weight.equal(model.over.weight)
    assert whole(names["batch"]).equal(model(names["batch"]))
    names["checkpoints"].close()
