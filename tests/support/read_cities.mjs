// Does with cities what a request asks for, in any engine: what it returns can be written in JSON.
//
// {"cities": {name: {"path", "options", "rows": where all rows are saved, "records", "draws", "sticky"}}, "sticky_key"}:
// places are objects, random bytes hexadecimal; see tests/support/city_vectors.py. `load` and `save` move bytes.

const bytesOf = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (byte) => parseInt(byte, 16));

async function answer({ openCity, CityError }, asked, key, load, save) {
  const found = {};
  try {
    const city = await openCity(await load(asked.path), asked.options ?? {});
    found.opened = true;
    found.mechanism_sha256 = city.mechanismSha256;
    const tiles = [];
    for (let tile = 0; tile < city.tiles; tile++) tiles.push(await city.rows(tile));
    found.used = true;
    if (asked.rows) await save(asked.rows, new Blob(tiles));
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
      const sticky = { secret: bytesOf(key.secret), epoch: key.epoch };
      found.sticky.push((await city.sample(place, { user, sticky, placeKm: placeKm ?? undefined })).report.output);
    }
  } catch (error) {
    found.why = String(error.message);
    if (!(error instanceof CityError)) found.crashed = `${error}\n${error.stack}`;
  }
  return found;
}

export async function answers(reader, { cities, sticky_key: key }, load, save) {
  const found = {};
  for (const [name, asked] of Object.entries(cities)) found[name] = await answer(reader, asked, key, load, save);
  return found;
}
