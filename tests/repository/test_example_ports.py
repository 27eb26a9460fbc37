"""The three ports run on two ranks and learn, and the guide shows how they differ from the originals."""

import json
import re
import sys
from pathlib import Path

import pytest
from another_process import run_program
from forked import run_script

ROOT = Path(__file__).parents[2]
PORTS = sorted((ROOT / "examples/ports").glob("*.py"))
PAGE = (ROOT / "docs/guide/port/port.md").read_text()


def output_of(name: str, steps: int) -> str:
    script = str(ROOT / "examples/ports" / name)
    ended = run_script(script, "--steps", str(steps), ranks=2, time_limit=200.0)
    assert not any(ended.codes), ended.stderr[-4000:]
    return ended.stdout


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_two_towers_find_items_of_the_users_taste() -> None:
    first, last, fit = numbers_in(output_of("two_tower.py", 100))
    assert last < first - 1 and fit > 0.8  # by chance a twentieth


@pytest.mark.deep
def test_masked_items_are_found() -> None:
    first, last = numbers_in(output_of("sequences.py", 150))
    assert first < 0.1 and last > 0.5


@pytest.mark.deep
def test_clicks_are_predicted() -> None:
    said = output_of("click_loop.py", 240)
    rates = [float(rate) for rate in re.findall(r"learning rate ([\d.]+)", said)]
    users = [int(count) for count in re.findall(r"users (\d+)", said)]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[2]
    assert users == sorted(users) and users[0] < users[2]
    assert numbers_in(said)[-1] > 0.7


@pytest.mark.parametrize("port", PORTS, ids=lambda path: path.name)
def test_the_guide_shows_lines_of_the_port(port: Path) -> None:
    (section,) = [part for part in PAGE.split("\n## ") if f"ports/{port.name})" in part]
    code = re.sub(r"\s+", "", port.read_text())
    lines = re.search(r"```diff\n(.*?)```", section, re.S)[1].splitlines()
    for line in filter(None, lines):
        text = re.sub(r"\s+", "", line[1:])
        assert (text in code) == (line[0] != "-"), line


def test_pyright_accepts_the_ports_as_a_user_runs_it(tmp_path: Path) -> None:
    settings = {"include": [str(port) for port in PORTS], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = run_program("-m", "pyright", "--pythonpath", sys.executable, "-p", tmp_path)
    assert "0 errors" in done.stdout, done.stdout


MIGRATED = """
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection

import torchrec_dyn as dyn


def use(module: nn.Module) -> None: ...


def migrate(pooled: EmbeddingBagCollection, sequence: EmbeddingCollection) -> None:
    bags: dyn.DynamicEmbeddingBagCollection = dyn.from_static(pooled, num_embeddings=9)
    words: dyn.DynamicEmbeddingCollection = dyn.from_static(sequence, num_embeddings={"t": 9})
    use(bags), use(words)
"""


def test_pyright_knows_what_from_static_returns(tmp_path: Path) -> None:
    (tmp_path / "migrated.py").write_text(MIGRATED)
    settings = {"include": ["migrated.py"], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = run_program("-m", "pyright", "--pythonpath", sys.executable, "-p", tmp_path)
    assert "0 errors" in done.stdout, done.stdout
