"""The serving example runs, and says what it should."""

import re

from example_criteo_files import EXAMPLES  # noqa: F401  (puts the folder on the path)

import serve  # isort: skip


def test_the_story(capsys):
    serve.main(["--steps", "4"])
    said = capsys.readouterr().out
    assert "the same outputs: True" in said
    differences = [float(one) for one in re.findall(r"largest difference ([\d.e-]+)", said)]
    assert differences[0] < 0.01
    _, stale, applied = differences
    assert applied < 0.01 < stale
