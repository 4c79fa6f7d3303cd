"""Sphinx's configuration of the book: ``sphinx-build -W -c notebooks notebooks OUT``. Nothing is executed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fedjax_async
from notebooks import book, docstrings

project = "fedjax_async"
author = "The fedjax_async authors"
copyright = author
version = release = fedjax_async.__version__
html_title = f"fedjax_async {release}"

# the last one has the scripts and fonts of MathJax, so that formulas need no network
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx-mathjax-offline"]
root_doc = "README"
exclude_patterns = ["*.py", "matplotlibrc", "pictures"]
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = html_copy_source = html_show_sourcelink = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks have their outputs
nb_ipywidgets_js = {}  # none, and so no script from a network

autodoc_member_order = "bysource"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True


def setup(app):
    """Connect what the book adds to Sphinx."""
    docstrings.setup(app)
    book.setup(app)
