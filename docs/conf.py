"""Settings of Sphinx; ``python -m sphinx -W -b html docs docs/_build`` makes the pages, without a network."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))  # for `generated`, which lies beside this file

import mdpext_dask  # noqa: E402

project = "mdpext_dask"
author = "the authors of mdpext_dask"
version = release = mdpext_dask.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "myst_nb", "generated"]
exclude_patterns = ["_build", "jupyter_execute", "*.py", "_made/*.md"]
html_theme = "furo"
html_title = "mdpext_dask"
html_show_copyright = False

# --- the API, from docstrings ---------------------------------------------------------------------
autosummary_generate = False  # tables of names; what they name is on the same page
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
python_maximum_signature_line_length = 88
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# --- Markdown, and the tutorial as a notebook -----------------------------------------------------
myst_enable_extensions = ["colon_fence"]
# As GitHub names them, so that links between headings work in both places.
myst_heading_anchors = 4
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_merge_streams = True
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
# What a cell writes to standard error is a warning, and warnings are errors.
nb_output_stderr = "remove-warn"
