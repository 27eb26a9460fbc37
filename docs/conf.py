"""The site: Sphinx over the Markdown pages of this folder and the docstrings of public names (make docs).

GitHub shows the same pages: they are plain Markdown with relative links. MyST checks links between pages and
their anchors, ext/outside_links.py handles links out of this folder, ext/symbol_links.py links names in code
to the API reference. Nothing is fetched from a network, neither by the build nor by the browser.
"""

import re
import sys
from pathlib import Path

import tomllib
from sphinx.ext.napoleon import GoogleDocstring

import torchrec_dyn  # noqa: F401  imported by autodoc, FBGEMM would log each library that it loads

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "ext"))

project = "torchrec_dyn"
author = "the torchrec_dyn authors"
copyright = f"2026, {author}. BSD-3-Clause"  # in the footer, with a link to copyright.md
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_codeautolink",
    "sphinx_copybutton",
    "outside_links",
    "symbol_links",
]
exclude_patterns = ["ext", "_static"]

html_theme = "furo"
release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 4  # slugs as GitHub makes them
highlight_language = "none"

# Docstrings: Google style, single backticks are code.
default_role = "literal"
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True

# Types in signatures. Types of torch, TorchRec and Python have no page here. Types of ours must have
# one, except two abstract classes, of which only subclasses are public, and the table behind a handle.
nitpick_ignore_regex = [
    ("py:.*", r"(?!torchrec_dyn\b).*"),
    ("py:class", r"torchrec_dyn\.modules\.unsharded_collections\.UnshardedCollection"),
    ("py:class", r"torchrec_dyn\.initializers\.Initializer"),
    ("py:class", r"torchrec_dyn\.ranks\.table\.Table"),
    ("py:class", r"torchrec_dyn\.migration\.stock_collections\._Model"),
]

# The blocks of a page are one program.
codeautolink_concat_default = True


def skip_member(app, what, name, member, skip, options):
    """Leaves out the members that a class inherits from torch and TorchRec."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    module = getattr(function, "__module__", None) or ""
    return None if module.startswith("torchrec_dyn") else True


def whole_section(docstring, preprocess_types=False):
    """Reads a Returns section as text. Napoleon would take words before a colon for the type."""
    lines = docstring._dedent(docstring._consume_to_next_section())
    return [("", "", lines)] if lines else []


def whole_property(docstring):
    """Reads the docstring of a property as text, for the same reason."""
    return "", docstring._dedent(docstring._consume_to_end())


signatures = {}  # of classes, as they are shown, by name
lookup_annotation = GoogleDocstring._lookup_annotation


def note_signature(app, what, name, obj, options, signature, return_annotation):
    """Notes the signature of a class before its docstring is read."""
    if what == "class":
        signatures[name] = signature or ""


def type_of_attribute(docstring, name):
    """Returns the type of an attribute that the signature of its class does not show."""
    if re.search(rf"\b{re.escape(name)}: ", signatures.get(docstring._name, "")):
        return ""
    # A dotted name after ~ is shown without its module, as in signatures.
    return re.sub(r"(?<![\w.])(?=\w+\.)", "~", lookup_annotation(docstring, name))


# Types are in the signatures. Napoleon has no option for this; its version is pinned (Makefile).
GoogleDocstring._consume_returns_section = whole_section
GoogleDocstring._consume_inline_attribute = whole_property
GoogleDocstring._lookup_annotation = type_of_attribute


def setup(app):
    """Registers the rules for members and for types of attributes."""
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-signature", note_signature)
