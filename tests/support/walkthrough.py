"""Pages that are read as a path: their blocks, run one after the other in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# A block of code: ```sh, ```python, or ```text for what the commands before it print.
_BLOCK = re.compile(r"^```(sh|python|text)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
# What differs from one machine, or one moment, to the next.
_VARIES = re.compile(r"\d[\d.,]* (?:s|min|kB|MB)\b")


class Block(NamedTuple):
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page of Markdown, in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def run_block(block: Block, folder: Path) -> str:
    """Run a block as its reader would, and return what it prints on standard output."""
    shell = block.language == "sh"
    command = ["bash", "-euo", "pipefail", "-c"] if shell else [sys.executable, "-W", "error", "-c"]
    # The command beside this interpreter, and no browser.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [*command, block.text],
        cwd=folder,
        env={**environment, "PATH": programs, "COLUMNS": "80", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stderr}"
    return done.stdout


def follow(page: Path, folder: Path) -> int:
    """Run all blocks of a page; where it shows what they print, that must be so. Return how many it shows.

    Times and sizes of files may differ.
    """
    said, compared = "", 0
    for block in blocks_of(page):
        if block.language == "text":
            found, shown = (_VARIES.sub("…", each).strip() for each in (said, block.text))
            assert found == shown, f"{page.name} shows\n{shown}\nand not\n{found}"
            compared += 1
        else:
            said = run_block(block, folder)
    return compared
