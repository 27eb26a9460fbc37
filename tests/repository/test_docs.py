"""README and docs say what is true: their code runs, links lead somewhere, names exist.

As a script under torchrun this file runs the code of one page, top to bottom, in one namespace.
"""

import ast
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(lines before it, code) of every python block."""
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in BLOCK.finditer(text)
        if match[1] == "python"
    ]


def prose(page: Path) -> str:
    """The page without its python blocks."""
    return BLOCK.sub(lambda match: "" if match[1] == "python" else match[0], page.read_text())


def run_page(page: Path) -> None:
    namespace = {"__name__": "__main__"}
    for line, code in python_blocks(page.read_text()):
        # Empty lines before the code: a traceback names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    # torch 2.13: a gloo thread that drops its last tensor while the interpreter ends aborts the process.
    # Without the model nothing holds the process group, and its threads are joined here.
    namespace.clear()
    gc.collect()


def pages_with_code() -> list[Path]:
    return [page for page in PAGES if python_blocks(page.read_text())]


def test_there_is_code_to_run():
    assert {"README.md", "guide.md"} <= {page.name for page in pages_with_code()}


@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: page.name)
def test_code_runs_in_two_processes(page):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, __file__, str(page)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def anchors(page: Path) -> set[str]:
    """The places of a page that a link can name, as GitHub makes them of headings."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


@every_page
def test_make_targets_exist(page):
    named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", prose(page), re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert not [target for target in named if not re.search(rf"^{target}:", makefile, re.M)]


@every_page
def test_options_of_the_main_job_exist(page):
    spoken = re.findall(r'make train ARGS="([^"]*)"', prose(page))
    sources = "".join(path.read_text() for path in (ROOT / "examples").rglob("*.py"))
    known = set(re.findall(r'"(--[a-z-]+)"', sources))
    assert set(re.findall(r"--[a-z-]+", " ".join(spoken))) <= known | {"--help"}


FILE = re.compile(r"(?<![\w.*{/-])((?:\.{1,2}/)*(?:[\w-]+/)*[\w-]+\.(?:py|pyi|h|cpp|cu|md))\b")
CODE = [
    *(
        path
        for tree in ("torchrec_dyn", "csrc")
        for path in sorted((ROOT / tree).rglob("*.*"))
        if "__pycache__" not in path.parts
    ),
    *(
        path
        for tree in ("tests", "examples", "benchmarks")
        for path in sorted((ROOT / tree).rglob("*.py"))
    ),
    *(ROOT / name for name in ("setup.py", "Makefile", "csrc/sanitize/run")),
]
OTHER_PROJECTS = ("fbgemm_gpu/", "recis/", "torch/", "torchrec/")
# Named, and not there: the reader's own, of the past, to come.
ELSEWHERE = {
    "README.md": {"first.py"},
    "0023-rooms.md": {"lookup/row_update_cuda.cu", "tests/test_house.py"},
}


def is_there(name: str, named_in: Path) -> bool:
    """True if a file named in another one exists: from the root, the package, the core, or its own folder.

    A bare name is one of the own folder or the ground of its tree; on pages, and in tests, any file's.
    """
    roots = [ROOT, ROOT / "torchrec_dyn", ROOT / "csrc", ROOT / "tests", named_in.parent]
    if any((root / name).exists() for root in roots):
        return True
    is_of_package = named_in.is_relative_to(ROOT / "torchrec_dyn") or named_in.is_relative_to(
        ROOT / "csrc"
    )
    trees = ("torchrec_dyn", "csrc", "tests", "examples", "benchmarks", "docs")
    return (
        not is_of_package
        and "/" not in name
        and any(True for tree in trees for _ in (ROOT / tree).rglob(name))
    )


def said(path: Path) -> str:
    """What a file says in prose: a page, or the comments and docstrings of a program."""
    text = path.read_text(errors="ignore")
    if path.suffix == ".md":
        return prose(path)
    if path.suffix == ".py":
        tree = ast.parse(text)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = [
            ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
        ]
        comments = re.findall(r"#(?!!).*", text)
        return "\n".join([*docstrings, *comments])
    return "\n".join(re.findall(r"(?://|#(?!include)).*", text))


@pytest.mark.parametrize(
    "path", [*PAGES, *CODE], ids=lambda path: str(path.relative_to(ROOT)).replace("/", ".")
)
def test_files_named_exist(path):
    if path.suffix in {".so", ".typed"} or path.is_dir() or "saved_by" in str(path.parent):
        return
    named = set(FILE.findall(said(path))) - ELSEWHERE.get(path.name, set())
    ours = {name for name in named if not name.startswith(OTHER_PROJECTS)}
    assert not [name for name in sorted(ours) if not is_there(name, path)]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_readme_names_the_versions_of_the_makefile():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    table = readme[readme.index("## Versions") :]
    for variable in ("TORCH", "FBGEMM", "TORCHREC"):
        package, version = re.search(rf"^{variable} \?= (\S+)==(\S+)$", makefile, re.M).groups()
        assert package in table and version in table, variable


def test_changelog_has_the_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    headings = re.findall("^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert any(version in heading for heading in headings)


def test_decisions_are_numbered():
    assert [page.name[:4] for page in DECISIONS] == [f"{i + 1:04}" for i in range(len(DECISIONS))]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name[:4])
def test_decision_is_short_and_whole(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 40
    assert text.startswith(f"# {page.name[:4]} ")
    assert all(part in text for part in ("**Context.**", "**Decision.**", "**Cost.**"))


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
