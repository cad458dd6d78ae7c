"""Sphinx's settings for the documentation site; scripts/docs_site.py lays the pages that it reads.

Why Sphinx with MyST: both are released several times a year, MyST reads the Markdown as it lies in the repository, and warnings can
fail the build. The furo theme takes no font or script from another host. MkDocs 1 is no longer maintained and MkDocs 2 drops
plugins; its successor zensical is younger than 1.0.
"""

import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent / "src" / "trainstep" / "__init__.py"

project = "trainstep"
copyright = "the trainstep authors, Apache License 2.0"
release = version = re.search(r'__version__ = "(.+)"', _PACKAGE.read_text())[1]

extensions = ["myst_parser"]
root_doc = "index"
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # `page.md#a-heading` leads to the heading, as where the files are read on their own
suppress_warnings = [
    "toc.not_included",  # records' tables and code are reached by links
    "myst.header",  # records' tables begin at the third level
    "misc.highlighting_failure",  # a signature is no whole statement
]

html_theme = "furo"
html_title = f"trainstep {release}"
html_use_index = False  # nothing is indexed but by the search
html_copy_source = False
html_show_sourcelink = False
