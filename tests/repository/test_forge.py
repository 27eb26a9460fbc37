"""Workflows run what the Makefile has, for all versions that are supported, and may do no more than that.

CONTRIBUTING.md has the command that checks the syntax of workflows and issue forms.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrec_dyn.versions import TRIOS

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ALL = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def jobs_of(workflow: Path) -> dict[str, str]:
    """The text of each job by name."""
    _, _, text = workflow.read_text().partition("\njobs:\n")
    parts = re.split(r"^  (\w+):\n", text, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_kind_of_check_is_run() -> None:
    commands = [run for path in WORKFLOWS for run in re.findall(r"- run: (.*)", path.read_text())]
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert len(targets) == len(commands)
    assert {*targets} == {"lint", "test", "wheel", "docs", "test-deep", "planted", "sanitize"}
    assert not [name for name in targets if not re.search(rf"^{name}( [\w-]+)*:", MAKEFILE, re.M)]
    for command in commands:
        for variable in re.findall(r"(\w+)=", command):
            assert re.search(rf"\b{variable}\b", MAKEFILE), variable


def test_all_trios_and_pythons_are_tested() -> None:
    test = jobs_of(ROOT / ".github/workflows/ci.yml")["test"]
    pairs = re.findall(r'\{ trio: "(.+)", python: "(.+)" \}', test)
    assert {trio for trio, _ in pairs} == {trio["torchrec"] for trio in TRIOS}
    metadata = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    assert {python for _, python in pairs} == {*pythons}


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


def test_an_action_has_one_version_everywhere() -> None:
    used = {line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text())}
    assert len({line.partition("@")[0] for line in used}) == len(used)


@ALL
def test_no_job_runs_for_ever(workflow: Path) -> None:
    for name, job in jobs_of(workflow).items():
        assert len(re.findall(r"^    timeout-minutes: \d+$", job, re.M)) == 1, name


def test_a_bug_report_has_what_the_doctor_prints() -> None:
    form = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    assert "`python -m torchrec_dyn doctor`" in form and "SECURITY.md" in form
