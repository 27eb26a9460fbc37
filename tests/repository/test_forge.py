"""Workflows run what the Makefile has, for all versions that are supported, and may do no more than that.

CONTRIBUTING.md has the command that checks the syntax of workflows and issue forms.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ALL = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def test_every_kind_of_check_is_run() -> None:
    commands = [run for path in WORKFLOWS for run in re.findall(r"- run: (.*)", path.read_text())]
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert len(targets) == len(commands)
    assert {*targets} == {"lint", "test", "wheel", "docs", "test-deep", "planted", "sanitize"}
    assert not [name for name in targets if not re.search(rf"^{name}( [\w-]+)*:", MAKEFILE, re.M)]
    for command in commands:
        for variable in re.findall(r"(\w+)=", command):
            assert re.search(rf"\b{variable}\b", MAKEFILE), variable


@ALL
def test_actions_are_pinned_and_may_only_read(workflow: Path) -> None:
    text = workflow.read_text()
    assert "\npermissions:\n  contents: read\n\n" in text and text.count("permissions:") == 1
    assert not re.search(r"secrets\.|pull_request_target|write-all|: write", text)
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    # The token of a checkout would lie in the job's .git for all that runs later.
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
