"""Keeps links from pages to the rest of the repository working in the built site.

The site is complete without a network, so it does not link to a repository elsewhere. MyST turns a link to a
file that is not a page (../torchrec_dyn/lookup/table_group.py) into a download of a copy. This transform
handles the other links out of docs/:

- Markdown outside docs/, which MyST takes for a page, becomes a download, too;
- a folder becomes its index.md if it has one and is in docs/, else plain text.

Links to files that do not exist are left as they are, so MyST warns.
"""

import os
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform


class OutsideLinks(SphinxTransform):
    """Replaces links of a page that MyST could not resolve."""

    default_priority = 800  # before Sphinx collects the downloads

    def apply(self, **kwargs):
        """Visits the links of one document."""
        docs = Path(self.env.srcdir)
        here = Path(self.env.doc2path(self.env.docname)).parent
        for node in list(self.document.findall(addnodes.pending_xref)):
            target = node.get("reftarget", "")
            if node.get("reftype") != "myst":
                continue
            if node.get("refdomain") == "doc":
                page = Path(f"{docs / target}.md").resolve()
                if page.is_file() and not page.is_relative_to(docs.resolve()):
                    link = addnodes.download_reference("", "", *node.children)
                    link["reftarget"] = os.path.relpath(page, here)
                    link["refdoc"] = self.env.docname
                    node.replace_self(link)
            elif target and (here / target).is_dir():
                index = (here / target / "index.md").resolve()
                if index.is_relative_to(docs.resolve()) and index.is_file():
                    node["refdomain"] = "doc"
                    node["reftarget"] = self.env.path2doc(str(index))
                    node["reftargetid"] = None
                else:
                    node.replace_self(node.children or nodes.Text(target))


def setup(app):
    """Registers the transform."""
    app.add_transform(OutsideLinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
