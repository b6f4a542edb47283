// Does with cities what a request on standard input asks for, and answers in JSON.
//
// {"module": path of mdpext.js, "cities": {name: {"path", "key", "rows": file for all rows, "records", "draws",
// "sticky"}}}: places are objects, random bytes hexadecimal; see tests/support/city_vectors.py.
import { readFile, writeFile } from "node:fs/promises";
import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";

const request = JSON.parse(await text(process.stdin));
const { openCity, CityError } = await import(pathToFileURL(request.module).href);
const bytesOf = (hex) => Uint8Array.from(Buffer.from(hex, "hex"));

async function answer(asked) {
  const found = {};
  try {
    const city = await openCity(await readFile(asked.path), asked.options ?? {});
    found.opened = true;
    found.mechanism_sha256 = city.mechanismSha256;
    const tiles = [];
    for (let tile = 0; tile < city.tiles; tile++) tiles.push(await city.rows(tile));
    found.used = true;
    if (asked.rows) await writeFile(asked.rows, Buffer.concat(tiles.map((rows) => Buffer.from(rows.buffer))));
    found.records = (asked.records ?? []).map(([place, placeKm]) => {
      const { i, j, outside } = city.record(place, placeKm ?? undefined);
      return [i, j, outside];
    });
    found.draws = [];
    for (const [place, hex] of asked.draws ?? []) {
      let bytes = bytesOf(hex);
      const entropyForTests = (n) => {
        const first = bytes.subarray(0, n);
        bytes = bytes.subarray(n);
        return first;
      };
      found.draws.push((await city.sample(place, { entropyForTests })).report.output);
    }
    found.sticky = [];
    for (const [place, user, placeKm] of asked.sticky ?? []) {
      const sticky = { secret: bytesOf(request.sticky_key.secret), epoch: request.sticky_key.epoch };
      found.sticky.push((await city.sample(place, { user, sticky, placeKm: placeKm ?? undefined })).report.output);
    }
  } catch (error) {
    found.why = String(error.message);
    if (!(error instanceof CityError)) found.crashed = error.stack;
  }
  return found;
}

const answers = {};
for (const [name, asked] of Object.entries(request.cities)) answers[name] = await answer(asked);
process.stdout.write(JSON.stringify(answers));
