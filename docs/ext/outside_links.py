"""Keeps links from pages to the rest of the repository working in the built site.

The site is complete without a network, so it does not link to a repository elsewhere. MyST turns a link to a
file that is not a page (../torchrec_dyn/lookup/table_group.py) into a download of a copy. This transform
handles the other links out of docs/:

- a file that is a page of the site, too (README, whose place is taken by the landing page, CHANGELOG,
  CONTRIBUTING, LICENSE), becomes a link to that page;
- other Markdown outside docs/, which MyST takes for a page, becomes a download, too;
- a folder becomes its index.md if it has one and is in docs/, else plain text.

A page that includes a file of the root has that file's links, which are relative to the root.

Links to files that do not exist are left as they are, so MyST warns.
"""

import os
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

# Files of the root, and the pages that stand for them.
PAGES = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "LICENSE": "copyright",
}


class OutsideLinks(SphinxTransform):
    """Replaces links of a page that MyST could not resolve, or would leave the site by."""

    default_priority = 800  # before Sphinx collects the downloads

    def apply(self, **kwargs):
        """Visits the links of one document."""
        docs = Path(self.env.srcdir).resolve()
        here = Path(self.env.doc2path(self.env.docname)).resolve().parent
        pages = {docs.parent / name: page for name, page in PAGES.items()}
        from_root = self.env.docname in ("changelog", "contributing")
        for node in list(self.document.findall(addnodes.download_reference)):
            page = pages.get((here / node["reftarget"]).resolve())
            if page is not None:
                node.replace_self(self._link(node, page))
        for node in list(self.document.findall(addnodes.pending_xref)):
            target = node.get("reftarget", "")
            if node.get("reftype") != "myst" or not target:
                continue
            if node.get("refdomain") == "doc":
                file = Path(f"{docs / target}.md").resolve()
            else:
                file = (here / target).resolve()
            if from_root and not file.exists() and file.is_relative_to(docs):
                file = (docs.parent / file.relative_to(docs)).resolve()
            if file in pages:
                node.replace_self(self._link(node, pages[file]))
            elif file.is_dir():
                index = file / "index.md"
                if index.is_relative_to(docs) and index.is_file():
                    node.replace_self(self._link(node, self.env.path2doc(str(index))))
                else:
                    node.replace_self(node.children or nodes.Text(target))
            elif file.is_file() and not file.is_relative_to(docs):
                link = addnodes.download_reference("", "", *node.children)
                link["reftarget"] = os.path.relpath(file, here)
                link["refdoc"] = self.env.docname
                node.replace_self(link)

    def _link(self, node, page):
        """Returns a link to a page of the site with the text of a node."""
        link = addnodes.pending_xref("", *node.children)
        link.update_basic_atts({"classes": node["classes"]})
        link["refdomain"], link["reftype"], link["reftarget"] = "doc", "myst", page
        link["reftargetid"] = None
        link["refdoc"], link["refexplicit"] = self.env.docname, True
        return link


def setup(app):
    """Registers the transform."""
    app.add_transform(OutsideLinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
