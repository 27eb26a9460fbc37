"""README and docs say what is true: their code runs, links lead somewhere, names exist.

The build of the site (make docs) checks links between pages of docs/ and names of ours in inline code.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pages
import pytest
from another_process import run_program
from forked import run_ranks

import torchrec_dyn
from torchrec_dyn import checkpoint, planner, serving


def build(docs: Path, out: Path) -> None:
    """Builds the site into a folder."""
    ended = run_ranks(_build, docs, out, time_limit=300.0)
    assert ended.codes == [0], ended.stderr


def _build(docs: Path, out: Path) -> None:
    from sphinx.cmd.build import build_main

    code = build_main(["-W", "--keep-going", "-n", "-q", str(docs), str(out)])
    assert code == 0, "warnings are errors"


ROOT = Path(__file__).resolve().parents[2]
GUIDE = sorted(path for path in ROOT.glob("docs/guide/*/*.md") if path.name != "index.md")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its python blocks."""
    return pages.BLOCK.sub(lambda match: "" if match[1] == "python" else match[0], page.read_text())


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES[1:] if pages.python_blocks(page.read_text())],  # README: below
    ids=name_of,
)
def test_code_runs(page):
    pages.run(page)


def test_every_page_of_the_guide_has_code_to_run():
    without = [page.name for page in GUIDE if not pages.python_blocks(page.read_text())]
    # Tables of what others do.
    assert without == ["compared.md"]


def test_readme_code_runs_as_the_readme_says(tmp_path):
    """In a process of its own, with the end of the interpreter."""
    ((_, code),) = pages.python_blocks((ROOT / "README.md").read_text())
    (tmp_path / "first.py").write_text(code)
    done = run_program("first.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    [says] = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    assert done.stdout == f"{says}\n"


def test_the_index_of_the_guide_names_every_page():
    index = (ROOT / "docs/guide/index.md").read_text()
    linked = set(re.findall(r"\]\(([a-z_]+/[a-z_]+\.md)\)", index))
    assert {str(page.relative_to(ROOT / "docs/guide")) for page in GUIDE} <= linked
    assert len(GUIDE) <= 34


@pytest.mark.deep  # make lint builds it too
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")  # needs Python 3.11
    build(ROOT / "docs", tmp_path)
    pages_built = sorted(tmp_path.rglob("*.html"))
    assert len(pages_built) > len(GUIDE)
    landing = (tmp_path / "index.html").read_text()
    assert landing.count('class="toctree-l2') > 30, "pages below the sections of the sidebar"
    assert 'href="copyright.html">Copyright</a>' in landing and "BSD-3-Clause" in landing
    assert "images/compare.png" in landing
    assert "images/drawing.svg" in landing
    downloads = {path.name for path in (tmp_path / "_downloads").rglob("*.md")}
    assert not downloads & {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}, "pages of the site"
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>")
    assert not [found for page in pages_built for found in fetched.findall(page.read_text())]


def public_names() -> list[str]:
    """The names that the package and its public modules hand on, as a user writes them."""
    modules = (torchrec_dyn, checkpoint, planner, serving)
    names = [f"{module.__name__}.{name}" for module in modules for name in module.__all__]
    names.remove("torchrec_dyn.checkpoint")
    return [*names, "torchrec_dyn.optimizers.OptimizerKind", "torchrec_dyn.optimizers.RowOptimizer"]


def described_names() -> set[str]:
    """The names that the API reference describes."""
    described = set()
    for page in ROOT.glob("docs/api/*.md"):
        module = ""
        for kind, name in re.findall(
            r"^\.\. (currentmodule|autoclass|autoexception|autofunction):: ([\w.]+)",
            page.read_text(),
            re.M,
        ):
            if kind == "currentmodule":
                module = name
            else:
                described.add(name if name.startswith("torchrec_dyn.") else f"{module}.{name}")
    return described


def test_the_reference_describes_every_public_name():
    assert not {*public_names()} - described_names()


LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The places of a page that a link can name, as GitHub makes them of headings."""
    text = pages.BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_lead_somewhere():
    """Links from and to pages that are not in the site, as GitHub resolves them."""
    lost = []
    for page in PAGES:
        for target in LINK.findall(prose(page)):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            is_in_site = page.is_relative_to(ROOT / "docs") and file.is_relative_to(ROOT / "docs")
            if target.startswith("https://") or is_in_site:
                continue
            if not file.exists() or (anchor and anchor not in anchors(file)):
                lost.append(f"{name_of(page)}: {target}")
    assert not lost


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    assert not [
        f"{name_of(page)}: {target}"
        for page in PAGES
        for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", prose(page), re.M)
        if not re.search(rf"^{target}:", makefile, re.M)
    ]


FILE = re.compile(r"(?<![\w.*{/-])((?:\.{1,2}/)*(?:[\w-]+/)*[\w-]+\.(?:py|pyi|h|cpp|cu|md))\b")
OTHER_PROJECTS = (
    *("corelib/", "examples/hstu/", "fbgemm_gpu/", "recis/"),
    *("torch/", "torchrec/", "torchrec_dlrm/"),
)
READERS_OWN = {"first.py", "page.py"}  # the code of a page, saved
# Named, and not there: of the past, to come.
ELSEWHERE = {
    "CHANGELOG.md": {
        f"docs/{name}.md" for name in ("guide", "checkpoints", "migrating", "mixed_dimensions")
    },
    "0023-rooms.md": {"lookup/row_update_cuda.cu", "tests/test_house.py"},
}


def is_there(name: str, named_in: Path) -> bool:
    """True if a file named in another one exists: from the root, a tree, its own folder, or by its name."""
    roots = [ROOT, ROOT / "torchrec_dyn", ROOT / "csrc", ROOT / "tests", named_in.parent]
    return any((root / name).exists() for root in roots) or name in names_of_files()


@functools.cache
def names_of_files() -> set[str]:
    """The names of all files, without their folders."""
    trees = ("torchrec_dyn", "csrc", "tests", "examples", "benchmarks", "docs")
    return {path.name for tree in trees for path in (ROOT / tree).rglob("*.*")}


def missing_of(page: Path) -> list[str]:
    """The files that a page names, and that are not there."""
    named = set(FILE.findall(prose(page))) - READERS_OWN - ELSEWHERE.get(page.name, set())
    ours = {name for name in named if not name.startswith(OTHER_PROJECTS)}
    return [name for name in sorted(ours) if not is_there(name, page)]


def test_files_named_exist():
    missing = {name_of(page): missing_of(page) for page in PAGES}
    assert not {page: names for page, names in missing.items() if names}
