"""Commands that pages show are parsed, and run if they end at once; programs are those that tests run."""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pages
import pytest

from torchrec_dyn.__main__ import _arguments, main

yaml = pytest.importorskip("yaml")  # of the tools of docs, which need Python 3.11
ROOT = Path(__file__).resolve().parents[2]
SHOWN = [ROOT / "README.md", *sorted(ROOT.glob("docs/guide/**/*.md"))]
# Other commands: those that install are checked with the versions (test_versions.py, test_wheel.py), those of
# C++ in tests/serving/test_serving_without_python.py.
OTHERS = {
    "install.md": ("pip", "TORCHREC_DYN_BUILD"),
    "cpp.md": ("TORCH=", "CORE=", "FBGEMM=", "g++", "echo"),
}


def blocks(page: Path, word: str) -> list[str]:
    return [text for behind, text in pages.BLOCK.findall(page.read_text()) if behind == word]


def shell_commands() -> list[tuple[Path, str]]:
    return [
        (page, command)
        for page in SHOWN
        for block in blocks(page, "bash")
        for command in block.replace("\\\n", " ").splitlines()
        if command.strip() and not command.startswith("#")
    ]


def commands_in(node: object) -> list[str]:
    """The values of `command` in parsed YAML."""
    if isinstance(node, list):
        return [command for one in node for command in commands_in(one)]
    if not isinstance(node, dict):
        return []
    own = [shlex.join(node["command"])] if "command" in node else []
    return own + commands_in([*node.values()])


def yaml_commands() -> list[tuple[Path, str]]:
    return [
        (page, command)
        for page in SHOWN
        for block in blocks(page, "yaml")
        for command in commands_in(yaml.safe_load(block))
    ]


@functools.cache
def programs_of_tests() -> set[str]:
    """The names of all programs of examples/ that some test names."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")] + [
        (ROOT / "Makefile").read_text()
    ]
    names = {path.name for path in (ROOT / "examples").rglob("*.py")}
    return {
        name for name in names if any(name in text or f'"{name[:-3]}"' in text for text in texts)
    }


@pytest.mark.parametrize(
    ("page", "command"),
    [*shell_commands(), *yaml_commands()],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_command_of_a_page_is_one_that_runs(page, command):
    words = shlex.split(command, comments=True)
    if words[0] == "make" or command.strip().startswith(OTHERS.get(page.name, ("make ",))):
        return  # targets: test_docs.py
    if "torchrec_dyn" in words:
        _arguments().parse_args(words[words.index("torchrec_dyn") + 1 :])
        return
    named = re.findall(r"examples/[\w/]+\.py", command)
    assert named, f"{page.name}: {command}: no program of examples/, and no command of ours"
    for program in named:
        assert (ROOT / program).exists()
        assert Path(program).name in programs_of_tests(), f"no test runs {program}"


def test_the_size_of_a_page_is_what_the_command_prints():
    page = ROOT / "docs/guide/shard/memory.md"
    [command] = [one for of, one in shell_commands() if of == page and " size " in one]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(shlex.split(command)[shlex.split(command).index("torchrec_dyn") + 1 :])
    assert printed.getvalue().strip() in page.read_text()


def test_there_are_commands():
    assert len(shell_commands()) > 10 and len(yaml_commands()) > 1
