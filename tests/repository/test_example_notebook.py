"""The introduction runs, and shows below each cell what it keeps there."""

import ast
import contextlib
import io
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import run_ranks

NOTEBOOK = Path(__file__).parents[2] / "examples/introduction.ipynb"


def check_outputs() -> None:
    """Runs the code cells as one program, without Jupyter: what is printed, and the last expression."""
    import matplotlib

    matplotlib.use("agg")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        tree, shown = ast.parse("".join(cell["source"])), io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(shown):
            exec(compile(tree, "<cell>", "exec"), main.__dict__)
            result = last and eval(
                compile(ast.Expression(last.value), "<cell>", "eval"), vars(main)
            )
        texts = [
            output.get("text", output.get("data", {}).get("text/plain", []))
            for output in cell["outputs"]
        ]
        kept = "".join("".join(text) for text in texts)
        has_picture = any("image/png" in output.get("data", {}) for output in cell["outputs"])
        text = shown.getvalue() + ("" if result is None or has_picture else repr(result))
        assert text == kept, "".join(cell["source"])


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws with matplotlib")
def test_the_cells_show_what_the_notebook_keeps():
    ended = run_ranks(check_outputs, ranks=1, time_limit=120.0)
    assert not any(ended.codes), ended.stderr
