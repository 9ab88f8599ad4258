"""Settings of the documentation site: `make docs` builds it without a network, and a warning is an error.

The pages are the Markdown files in docs, which are also read where the repository is hosted. What is done here makes
the same files work as a site: formulas become MathML, links that leave docs are followed or made plain, and
docstrings, which are plain text, become reStructuredText.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from glob import glob
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

from fedskew import __version__

ROOT = Path(__file__).parents[1]
project, author, release = "fedskew", "The fedskew maintainers", __version__
copyright = "2026, the fedskew maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_build", "gallery", "**/GALLERY_HEADER.rst", "generated/splits/sg_execution_times.rst"]
suppress_warnings = ["config.cache"]  # a function in the settings of sphinx-gallery
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
smartquotes = False  # they would change quotes in what readers copy

html_theme = "furo"
html_title = f"fedskew {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
templates_path: list[str] = []

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures would be longer than what they say


def pictures(block: Any, names: dict[str, Any], settings: dict[str, Any]) -> str:
    """For sphinx-gallery: moves the PNG files that a block of an example wrote to where the page shows them."""
    from sphinx_gallery.scrapers import figure_rst

    moved = []
    for made, wanted in zip(sorted(glob("*.png")), names["image_path_iterator"], strict=False):
        shutil.move(made, wanted)
        moved.append(wanted)
    return figure_rst(moved, settings["src_dir"])


sphinx_gallery_conf = {
    "examples_dirs": ["gallery"],
    "gallery_dirs": ["generated/splits"],
    "image_scrapers": (pictures,),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
    "remove_config_comments": True,
    "abort_on_example_error": True,
}


# --- formulas


def inline_formula(self: Any, node: Any) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_formula(self: Any, node: Any) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


# --- links that leave docs, and pages that come from outside

LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
MOVED = {
    "examples/README.md": "generated/examples.md",
    "docs/gallery/plot_splits.py": "generated/splits/plot_splits.rst",
}
LATER = ("board", "advise")  # in the list of pages as soon as they exist


def relink(text: str, source: Path, page: Path) -> str:
    """`text` of the file `source`, shown as `page` in docs, with links that the site can follow.

    source: its path in the repository. A README of results is a page of the site, and so is the list of examples; of
    other files outside docs the path is shown.
    """

    def one(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = Path(os.path.normpath(source.parent / target))
        known = MOVED.get(path.as_posix())
        if path.match("results/*/README.md"):
            known = f"generated/evidence/{path.parts[1]}.md"
        elif path.parts[0] == "docs" and known is None:
            known = path.relative_to("docs").as_posix()
        if known:
            return f"[{words}]({os.path.relpath(known, page.parent)}{anchor})"
        return f"`{path}`" if words.strip("`") in path.as_posix() else f"{words} (`{path}`)"

    return LINK.sub(one, text)


def write(page: str, text: str) -> None:
    """Write a generated page if it has changed, so that unchanged ones are not built again."""
    path = ROOT / "docs" / "generated" / page
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def collect_pages(app: Any) -> None:
    """Makes pages of the READMEs of results, of the examples and of the decisions."""
    for readme in sorted((ROOT / "results").glob("*/README.md")):
        page = f"evidence/{readme.parent.name}.md"
        write(page, relink(readme.read_text(), readme.relative_to(ROOT), Path("generated") / page))
    listed = "```{{toctree}}\n:maxdepth: 1\n:glob:\n\n{}\n```\n"
    write(
        "measured.md",
        "# Measured so far\n\nSettings, every figure, and what went badly; always the last round, never the best.\n\n"
        + listed.format("evidence/*"),
    )
    write(
        "decisions.md",
        "# Decisions\n\nChoices that someone may want to undo: context, choice, price.\n\n"
        + listed.format("/decisions/*"),
    )
    examples = "# Examples\n\nShort scripts that run as they stand; the tests run each of them.\n"
    for script in sorted((ROOT / "examples").glob("*.py")):
        about = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0]
        examples += f"\n## {script.name}\n\n{about}\n\n```{{literalinclude}} ../../examples/{script.name}\n```\n"
    write("examples.md", examples)


def on_read(app: Any, name: str, source: list[str]) -> None:
    page = Path(f"{name}.md")
    if not (ROOT / "docs" / page).exists() or page.parts[0] == "generated":
        return
    source[0] = relink(source[0], Path("docs") / page, page)
    if name == "index":
        missing = {later for later in LATER if not (ROOT / "docs" / f"{later}.md").exists()}
        source[0] = "\n".join(line for line in source[0].splitlines() if line not in missing)
    if name == "methods":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nmethods/*\n```\n"


# --- docstrings

FIELD = re.compile(r"(\*{0,2}\w[\w, ]*): (.*)")


def marked(text: str) -> str:
    """A line of plain text as reStructuredText: `code` in backticks, nothing else has a meaning."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(f"`{part}`" if part[:1] == "`" else re.sub(r"([*|_])", r"\\\1", part) for part in parts)


def paragraph(lines: list[str]) -> list[str]:
    """One paragraph of a docstring: an example, a list of arguments, text, or text and then an indented block."""
    if lines[0].lstrip().startswith(">>>"):
        return lines
    if FIELD.match(lines[0]) and all(line[:1] == " " or FIELD.match(line) for line in lines):
        made = list[str]()
        for line in lines:
            found = FIELD.match(line)
            made.append(f"- ``{found[1]}``: {marked(found[2])}" if found else f"  {marked(line.strip())}")
        return made
    text = [marked(line) for line in lines if line[:1] != " "]
    block = [line for line in lines if line[:1] == " "]
    return text + (["", "::", "", *block] if block else [])


def on_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    paragraphs = [part.split("\n") for part in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")) if part.strip()]
    lines[:] = [line for part in paragraphs for line in (*paragraph(part), "")]


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    app.connect("builder-inited", collect_pages, priority=100)
    app.connect("source-read", on_read)
    app.connect("autodoc-process-docstring", on_docstring)
