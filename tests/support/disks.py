"""A small disk of one's own, to be filled or made read-only in the middle of something."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A file system of some kilobytes in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def fill(self) -> None:
        """Take all that is left."""
        with (self.folder / "ballast").open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        assert os.statvfs(self.folder).f_bavail == 0

    def remount(self, option: str) -> None:
        """Make it ``ro``, ``rw``, or of another ``size=...``."""
        subprocess.run(["mount", "-o", f"remount,{option}", self.folder], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[Disk]:
    """Mount a disk on a folder; skip the test where that is not allowed."""
    folder.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
