"""Makes deploy/browser/mdpext.min.js: the reader in JavaScript without comments and long names.

    python workflows/minify_reader.py

Needs Node's npx, and the network the first time. The first line names the file that it was made from by its
SHA-256, so that the tests see where it is out of date.
"""

import hashlib
import subprocess
from pathlib import Path

TERSER = "terser@5.51.4"
SOURCE = Path(__file__).resolve().parents[1] / "deploy" / "browser" / "mdpext.js"
MINIFIED = SOURCE.with_name("mdpext.min.js")


def first_line(source: bytes) -> str:
    """Return what a minified file of this source begins with."""
    return f"// mdpext.js {hashlib.sha256(source).hexdigest()[:8]}\n"


def main() -> None:
    """Write the minified file, and say how large it is."""
    options = ["--module", "--ecma", "2022", "--compress", "passes=3", "--mangle"]
    made = subprocess.check_output(["npx", "--yes", TERSER, str(SOURCE), *options], text=True)
    content = first_line(SOURCE.read_bytes()) + made.strip() + "\n"
    MINIFIED.write_text(content, encoding="utf-8")
    print(f"{MINIFIED}: {len(content.encode()):,} bytes")


if __name__ == "__main__":
    main()
