"""How fast the reader in JavaScript opens a city and draws from it, in Node.

    python workflows/benchmarks/browser.py CITY.mdp [--draws 20000] [--repeats 5]

CITY.mdp is an exported city. Each figure is the best of the repeats, each in a process of its own, in elapsed
time of one thread.

- *open*: the header with all of its fields and digests, and the identity of the mechanism.
- *first draw*: sections are inflated; all rows of the place's tile are made and compared with their digest.
- *draw, warm*: at a place that has been asked for before, with fresh random bytes; *sticky*: by a key.
- *another record*: at places all over one tile, so that the weights of each are added up.
- *memory*: of the whole process, before the module is loaded and after all draws.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_READER = Path(__file__).resolve().parents[2] / "deploy" / "browser" / "mdpext.js"
_PROGRAM = """
import { readFileSync } from "node:fs";
const [module, path, draws] = process.argv.slice(1);
const memory = () => process.memoryUsage().rss / 2 ** 20;
const before = memory();
const { openCity } = await import(module);
const bytes = readFileSync(path);
const found = { size: bytes.length, before };
async function timed(name, times, action) {
  const start = performance.now();
  for (let k = 0; k < times; k++) await action(k);
  found[name] = (performance.now() - start) / times;
}
let city;
await timed("open", 1, async () => { city = await openCity(bytes); });
const { west, south, east, north, shape, spacing } = city.grid;
found.records = shape[0] * shape[1];
found.outputs = city.outputs.length;
found.version = process.version;
const place = { x: (west + east) / 2, y: (south + north) / 2 };
await timed("first", 1, () => city.sample(place));
for (let k = 0; k < 2000; k++) await city.sample(place);
await timed("warm", Number(draws), () => city.sample(place));
const sticky = { secret: new Uint8Array(32) };
await timed("sticky", 2000, () => city.sample(place, { sticky, user: "anna" }));
const beside = (k) => ({ x: place.x + (k % 20) * spacing / 2, y: place.y + (k % 7) * spacing });
await timed("another", 500, (k) => city.sample(beside(k)));
found.after = memory();
console.log(JSON.stringify(found));
"""


def measure(city: str, draws: int, repeats: int) -> dict[str, float]:
    """Return the least of every figure, in milliseconds and MiB.

    Raises
    ------
    SystemExit
        If Node is not installed.
    """
    node = shutil.which("node")
    if node is None:
        raise SystemExit("Node is not installed")
    command = [node, "--input-type=module", "-e", _PROGRAM, _READER.as_uri(), city, str(draws)]
    runs = [json.loads(subprocess.check_output(command, text=True)) for _ in range(repeats)]
    best: dict[str, float] = {key: min(run[key] for run in runs) for key in runs[0]}
    return best


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description="How fast the reader in JavaScript is.")
    parser.add_argument("city")
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    best = measure(given.city, given.draws, given.repeats)
    print(
        f"{given.city}, {best['size']:,} bytes, {best['records']:,} records x {best['outputs']:,} outputs, "
        f"Node {best['version']}, {os.cpu_count()} processors",
        file=sys.stderr,
    )
    lines = {
        "open": f"{best['open']:.0f} ms",
        "first draw": f"{best['first']:.0f} ms",
        "draw, warm": f"{1e3 * best['warm']:.1f} µs",
        "draw, sticky": f"{1e3 * best['sticky']:.0f} µs",
        "draw, another record": f"{1e3 * best['another']:.0f} µs",
        "memory": f"{best['after']:.0f} MiB, {best['before']:.0f} of them Node's own",
        "reader": f"{_READER.stat().st_size:,} bytes",
    }
    for name, value in lines.items():
        print(f"{name:<20}  {value}")


if __name__ == "__main__":
    main()
