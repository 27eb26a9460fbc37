"""Links names in inline code to the API reference, on pages and in docstrings, and checks them.

    `dyn.Never`, `dyn.Never()`,   Linked. A name that is not in the reference is a warning, which `make docs`
    `torchrec_dyn.planner.x`      turns into an error. Inside longer code (`admission=dyn.Never()`) names are
                                  checked but not linked.
    `torchrec_dyn.lookup`         A module or folder of the package without a place in the reference: it must
                                  exist, and is not linked. A name inside such a module is an unknown name.
    `checkpoint.mark`, `Never`,   Linked if exactly one public name ends with it. Otherwise left alone: it may
    `LoadPlanner()`               be a name of torch. Single lower-case words (`mark`, `build`) are left
                                  alone, too: they may be arguments or variables.

Files (`torchrec_dyn/lookup/table_group.py`) are checked by tests/repository/test_docs.py.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
PREFIXED = re.compile(r"(?<![\w./])(?:dyn|torchrec_dyn)((?:\.\w+)+)")
WHOLE = re.compile(r"([A-Za-z_][\w.]*\w)(\(.*\))?", re.S)
UNLINKED = (nodes.title, nodes.reference, nodes.term)


class SymbolLinks(SphinxPostTransform):
    """Replaces literal nodes by links to the objects that the Python domain knows."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs):
        """Visits the inline code of one document."""
        known = self.env.get_domain("py").objects
        endings = self._endings(known)
        for node in list(self.document.findall(nodes.literal)):
            code = node.astext()
            for match in PREFIXED.finditer(code):
                name = f"torchrec_dyn{match[1]}"
                if name not in known and not is_module(name):
                    logger.warning("%s: not in the API reference", match[0], location=node)
            whole = WHOLE.fullmatch(code)
            if whole is None or any(isinstance(above, UNLINKED) for above in parents(node)):
                continue
            full = re.sub(r"^dyn\.", "torchrec_dyn.", whole[1])
            name = full if full in known else endings.get(full)
            if name is not None:
                self._link(node, name, known[name])

    def _link(self, node, name, entry):
        builder = self.app.builder
        if (self.env.docname, entry.node_id) == enclosing(node, self.env.docname):
            return
        link = make_refnode(builder, self.env.docname, entry.docname, entry.node_id, None, name)
        node.replace_self(link)
        link += node

    def _endings(self, known):
        """Maps `Never`, `checkpoint.mark`, `TableHandle.freeze` to the one name that ends so."""
        found = {}
        for name, entry in known.items():
            if entry.aliased:
                continue
            parts = name.removeprefix("torchrec_dyn.").split(".")
            for begin in range(len(parts)):
                ending = ".".join(parts[begin:])
                is_method = begin == len(parts) - 1 and entry.objtype not in ("class", "function")
                if not is_method and (not ending.islower() or "_" in ending or "." in ending):
                    found.setdefault(ending, set()).add(name)
        return {ending: names.pop() for ending, names in found.items() if len(names) == 1}


def parents(node):
    """Yields the nodes around a node, from the inside."""
    while node.parent is not None:
        node = node.parent
        yield node


def enclosing(node, docname):
    """Returns the place of the object whose description holds the node; a link to it would lead nowhere."""
    for above in parents(node):
        if above.tagname == "desc":
            ids = above[0].get("ids", [])
            return docname, ids[0] if ids else None
    return None


def is_module(name):
    """Returns True if a dotted name is a folder or file of the package."""
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def setup(app):
    """Registers the transform."""
    app.add_post_transform(SymbolLinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
