"""What of the documentation is generated: copies of files from elsewhere, the command line, the job file.

All of it goes into a folder that is not committed. Links in Markdown are those of the repository, so that
they work where it is browsed; here they are turned into links between pages, and where they lead to a file
that is no page, only the text is left.
"""

import inspect
import os
import re
import shutil
import typing
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
MADE = "_made"
# In the index: where pages go that it does not name.
OTHERS = "ALL-OTHER-PAGES"
# Page -> what it is a copy of.
COPIES = {
    "readme.md": "README.md",
    "proof.md": "mdpext_dask/auditors/PROOF.md",
    "extension-graphs.md": "mdpext_dask/extend/GRAPH.md",
    "seed.md": "mdpext_dask/seed/README.md",
    "cells.md": "mdpext_dask/pipeline/cells/README.md",
    "deploy.md": "deploy/README.md",
    "published.md": "workflows/paper/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "tutorial.py": "workflows/tutorial.py",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^(```|~~~|:::)")


def generate(folder: Path) -> None:
    """Make all pages that are generated, in a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for page, original in COPIES.items():
        shutil.copyfile(PROJECT / original, folder / page)
    (folder / "command-line.md").write_text(command_line(), encoding="utf-8")
    (folder / "job-file.md").write_text(job_file(), encoding="utf-8")


# --- links ----------------------------------------------------------------------------------------


def with_links_between_pages(app: Any, page: str, source: list[str]) -> None:
    """Rewrite the links of a page; Sphinx calls this for every one it reads."""
    path = Path(app.env.doc2path(page)).resolve()
    if path.suffix == ".md":
        source[0] = linked(source[0], path)
    if page == "index":
        source[0] = source[0].replace(OTHERS, "\n".join(other_pages(source[0])))


def other_pages(index: str) -> list[str]:
    """Return the pages that the index does not name, in order: whoever writes one need not touch it."""
    pages = sorted(page.stem for page in (PROJECT / "docs").glob("*.md"))
    named = set(index.split())
    return [page for page in pages if page not in named and page != "index"]


def linked(text: str, page: Path) -> str:
    """Return Markdown whose links lead from page to page; blocks of code stay as they are.

    Parameters
    ----------
    text
        Of the page.
    page
        Its file, below the folder of this module.
    """
    docs = PROJECT / "docs"
    pages = {(PROJECT / original).resolve(): docs / MADE / copy for copy, original in COPIES.items()}
    original = PROJECT / COPIES[page.name] if page.parent == docs / MADE and page.name in COPIES else page

    def link(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        name, _, anchor = target.partition("#")
        there = (original.parent / name).resolve()
        if image:
            return f"![{label}]({os.path.relpath(there, page.parent)})"
        there = pages.get(there, there)
        if docs in there.parents and there.suffix in (".md", ".py"):
            return f"[{label}]({os.path.relpath(there, page.parent)}{'#' if anchor else ''}{anchor})"
        if not there.exists():
            raise ValueError(f"{original}: there is no {target}")
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


def with_plain_bars(*arguments: Any) -> None:
    """Let M(y|x) be what it is in a docstring, not the beginning of a substitution; Sphinx calls this."""
    lines: list[str] = arguments[-1]
    for number, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
        lines[number] = "``".join(parts)


# --- references -----------------------------------------------------------------------------------


def command_line() -> str:
    """Return the reference of the command line, from the application itself."""
    import typer
    from typer.main import get_command

    from mdpext_dask.cli.main import app

    text = [
        "# Command line",
        "",
        "Exit codes: 0 done, 1 guarantee or audit failed, 2 bad input, 3 incomplete (run again), 4 a linear "
        "program could not be solved, 70 a crash, 141 the output was not read to its end. With `--json`, one "
        "document goes to standard output, and nothing else.",
    ]
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=f"mdpext {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        text += ["", f"## mdpext {name}", "", "```text", usage, "```", "", command.help or "", ""]
        records = [parameter.get_help_record(context) for parameter in command.params]
        text += _table(
            ("option", "what it does"), [(f"`{option}`", said) for option, said in filter(None, records)]
        )
    return "\n".join([*text, ""])


def job_file() -> str:
    """Return the reference of the job file, from the sections that read it."""
    from mdpext_dask.job.spec import JobSpec

    text = [
        "# Job file",
        "",
        "TOML, with units in the keys. `--set section.key=value` overrides any key, and so does "
        "`JobSpec.replace` in Python.",
    ]
    for name, field in JobSpec.model_fields.items():
        section: Any = field.annotation
        about, described = described_keys(section)
        text += ["", f"## [{name}]", "", about, ""]
        rows = []
        for key, of in section.model_fields.items():
            if key not in described:
                raise ValueError(f"{section.__name__}: its docstring does not say what {key} is")
            default = "required" if of.is_required() else _in_toml(of.get_default(call_default_factory=True))
            rows.append((f"`{key}`", default, described[key] + _choices(of.annotation, described[key])))
        text += _table(("key", "default", "what it is"), rows)
    return "\n".join([*text, ""])


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
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")


def _choices(annotation: Any, said: str) -> str:
    """Return the values that a key may have, where they are few words and not all of them have been said."""
    words = _literals(annotation)
    return "" if all(word in said for word in words) else f" One of {', '.join(f'`{w}`' for w in words)}."


def _literals(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [f'"{value}"' for value in typing.get_args(annotation)]
    return []


def _in_toml(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return [f"| {' | '.join(' '.join(str(cell).split()) for cell in line)} |" for line in lines]
