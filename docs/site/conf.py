"""Configure Sphinx for the site. Nothing here loads anything from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import streaming  # noqa: E402  the path is set above

project = "shardstream"
version = release = streaming.__version__
copyright = "the shardstream authors"  # noqa: A001  Sphinx's name
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Code on pages has `…` for what readers fill in, which no lexer knows.
suppress_warnings = ["misc.highlighting_failure"]
nitpicky = True
# Types of other packages have no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!streaming\.|shard_tools\.|infra\.).*"),
    ("py:.*", r".*\.base\..*"),
    ("py:.*", r".*\._T"),
]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning", "transformers", "accelerate", "nvidia"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 100

smartquotes = False  # options keep both their dashes
html_theme = "furo"
html_title = "shardstream"
html_favicon = str(HERE / "static" / "icon.svg")
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = ["find.js"]
html_search_scorer = str(HERE / "static" / "scorer.js")
html_show_search_summary = False  # it would fetch every page that is found, which files do not allow
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
