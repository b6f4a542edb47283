"""What no Sphinx extension does: keys of the job file, and links for both the repository and the pages.

Markdown from elsewhere in the repository gets onto pages by ``{include}``; the command line is described by
Typer itself. Generated files go to ``_made``, which is not committed. Links in Markdown are those of the
repository, so that they work where it is browsed; here they become links between pages, and only the text
is left of a link to a file that is no page.
"""

import inspect
import os
import re
import shutil
import typing
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PROJECT = DOCS.parent
MADE = DOCS / "_made"
TUTORIAL = PROJECT / "workflows" / "tutorial.py"
_INCLUDE = re.compile(r"^```\{include\} (\.\./\S+)$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^(```|~~~|:::)")


def setup(app: Any) -> dict[str, bool]:
    """Make what is generated, and connect what rewrites sources; Sphinx calls this."""
    generate()
    app.connect("source-read", link_page)
    app.connect("include-read", link_included)
    # After numpydoc, which does it at 500.
    app.connect("autodoc-process-docstring", escape_bars, priority=900)
    return {"parallel_read_safe": True}


def generate() -> None:
    """Write the generated files anew."""
    shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir()
    (MADE / "commands.md").write_text(commands(), encoding="utf-8")
    (MADE / "job-keys.md").write_text(job_keys(), encoding="utf-8")
    # Sphinx reads notebooks below its own folder only.
    shutil.copyfile(TUTORIAL, MADE / "tutorial.py")


# --- links ----------------------------------------------------------------------------------------


def link_page(app: Any, page: str, source: list[str]) -> None:
    """Rewrite the links of a page."""
    path = Path(app.env.doc2path(page)).resolve()
    if path.suffix == ".md":
        source[0] = linked(source[0], path, path)


def link_included(_app: Any, original: Path, _page: str, source: list[str]) -> None:
    """Rewrite the links of Markdown that a page includes."""
    path = (DOCS / original).resolve()
    if path in (pages := including_pages()):
        source[0] = linked(source[0], path, pages[path])


def including_pages() -> dict[Path, Path]:
    """Return the page of each file of the repository that is on a page."""
    found = {TUTORIAL: MADE / "tutorial.py"}
    for page in DOCS.rglob("*.md"):
        if MADE not in page.parents:
            for name in _INCLUDE.findall(page.read_text(encoding="utf-8")):
                found[(page.parent / name).resolve()] = page
    return found


def linked(text: str, original: Path, page: Path) -> str:
    """Return Markdown whose links lead from page to page; blocks of code stay as they are.

    Parameters
    ----------
    text
        Markdown with links relative to the folder of ``original``.
    original
        The file that the text is from.
    page
        The page that shows it.
    """
    pages = including_pages()

    def link(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        name, _, anchor = target.partition("#")
        there = (original.parent / name).resolve()
        if not there.exists() and there != MADE / "tutorial.py":
            raise ValueError(f"{original}: there is no {target}")
        there = pages.get(there, there)
        if image or (DOCS in there.parents and there.suffix in (".md", ".py")):
            return f"{image}[{label}]({os.path.relpath(there, page.parent)}{'#' if anchor else ''}{anchor})"
        return label

    lines, fence = [], ""
    for line in text.split("\n"):
        found = _FENCE.match(line.strip())
        if found and not fence:
            fence = found[1]
        elif found and found[1] == fence:
            fence = ""
        lines.append(line if fence else _LINK.sub(link, line))
    return "\n".join(lines)


def escape_bars(*arguments: Any) -> None:
    """Keep M(y|x) in a docstring from being read as the beginning of a substitution."""
    lines: list[str] = arguments[-1]
    for number, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
        lines[number] = "``".join(parts)


# --- references -----------------------------------------------------------------------------------


def commands() -> str:
    """Return the reference of the command line, as Typer writes it, below the page's own title."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from mdpext_dask.cli.main import app

    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="mdpext")
    text = re.sub(r"^Example: (.*)$", r"Example: `\1`", text, flags=re.MULTILINE)
    return "## mdpext\n" + text.partition("\n")[2].replace("\n### ", "\n#### ").replace("\n## ", "\n### ")


def job_keys() -> str:
    """Return the reference of the job file's keys, from the docstrings of its sections."""
    from mdpext_dask.job.spec import JobSpec

    text = []
    for name, field in JobSpec.model_fields.items():
        section: Any = field.annotation
        about, described = described_keys(section)
        text += [f"## [{name}]", "", about, "", "| key | default | what it is |", "| --- | --- | --- |"]
        for key, of in section.model_fields.items():
            if key not in described:
                raise ValueError(f"{section.__name__}: its docstring does not say what {key} is")
            default = "required" if of.is_required() else _in_toml(of.get_default(call_default_factory=True))
            text.append(
                f"| `{key}` | {default} | {described[key]}{_choices(of.annotation, described[key])} |"
            )
        text.append("")
    return "\n".join(text)


def described_keys(section: type) -> tuple[str, dict[str, str]]:
    """Return what the docstring of a section of the job file says of it, and of its keys."""
    from numpydoc.docscrape import NumpyDocString

    found = NumpyDocString(inspect.cleandoc(section.__doc__ or ""))
    described = {}
    for parameter in found["Parameters"]:
        for key in parameter.name.split(","):
            described[key.strip()] = _in_markdown(" ".join(parameter.desc))
    about = " ".join([*found["Summary"], *found["Extended Summary"]])
    # The page's own heading names the section.
    return _in_markdown(re.sub(r"^``\[\w+\]``: (.)", lambda first: first[1].upper(), about)), described


def _in_markdown(text: str) -> str:
    """Return a docstring's text as Markdown: roles and doubled backticks become single ones."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return " ".join(re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|").split())


def _choices(annotation: Any, said: str) -> str:
    """Return the values that a key may have, if they are few words and not all of them have been said."""
    if typing.get_origin(annotation) is not typing.Literal:
        return ""
    words = [f'"{value}"' for value in typing.get_args(annotation)]
    return "" if all(word in said for word in words) else f" One of {', '.join(f'`{w}`' for w in words)}."


def _in_toml(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`"
