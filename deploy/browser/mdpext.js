// @ts-check
/**
 * Opens exported cities and draws reports from them, in browsers and in Node 20 or newer, without other code.
 *
 * docs/city-file.md says what every byte means; its section is named where a step is made. Rows are used only
 * if their SHA-256 is the certified one, so an engine that computed otherwise would be refused, and not believed.
 *
 *     const city = await openCity(await file.arrayBuffer());
 *     const { report, notes } = await city.sample({ lon: -73.98, lat: 40.75 });
 *
 * `report` alone may leave the device: `notes` say something of the true place.
 */

/** A file that is not used, and why. */
export class CityError extends Error {}

/**
 * @typedef {{lon: number, lat: number, accuracy?: number} | {x: number, y: number, accuracy?: number}} Place
 *   Degrees, or km in the plane; the accuracy in metres, as browsers give it.
 * @typedef {{output: number, lon: number | null, lat: number | null, x: number, y: number}} Report
 * @typedef {{secret: Uint8Array | CryptoKey, epoch?: string}} StickyKey
 * @typedef {{placeKm?: number, outside?: "nearest" | "drop" | "error", user?: string, sticky?: StickyKey,
 *   entropyForTests?: (bytes: number) => Uint8Array}} SampleOptions
 * @typedef {null | boolean | bigint | number | string | Json[] | {[key: string]: Json}} Json
 * @typedef {any} Header  Its fields have been checked, and all of its numbers are numbers.
 * @typedef {(name: string, value: any) => void} Check
 */

const VERSION = 1, KEY_VERSION = 2, PREFIX_BYTES = 16, START = 48, LARGEST_HEADER = 2 ** 25;
const MOST_CELLS = 1e8, MOST_OUTPUTS = 1e7, MOST_SUBDIVISIONS = 1e6, LONGEST_AXIS = 2 ** 31;
const LARGEST_TILE_BYTES = 2 ** 28, ROUNDING = 1e-6, BORDER_KM = 1e-6;
const MOST_NOISE_CELLS = 2e7, MOST_MASSES = 2 ** 25, MOST_PER_CELL = 32;
const LOWEST_SCORE = -700, SMALLEST = 2 ** -36, LARGEST_TOTAL = 2;
const CACHE_BYTES = 2 ** 27, BLOCK = 64, PIECE = 2 ** 14;
const RADIANS = Math.PI / 180, HEX = /^[0-9a-f]{64}$/;

/** @param {string} why @returns {never} */
function refuse(why) {
  throw new CityError(why);
}

/** @param {string} why @returns {never} */
function invalid(why) {
  throw new RangeError(why);
}

/** @param {string} what @param {number} found @param {number} known */
function refuseNewer(what, found, known) {
  if (found > known) refuse(`has ${what} format ${found}, newer than ${known}, the newest that is read here; upgrade mdpext.js`);
}

/** @param {Uint8Array} bytes */
const toHex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
/** @param {BufferSource} bytes */
const sha256 = async (bytes) => toHex(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)));
/** @param {string} text */
function fromHex(text) {
  const bytes = new Uint8Array(text.length / 2);
  for (let at = 0; at < bytes.length; at++) bytes[at] = parseInt(text.slice(2 * at, 2 * at + 2), 16);
  return bytes;
}
/** @param {string} text */
const utf8 = (text) => /** @type {Uint8Array<ArrayBuffer>} */ (new TextEncoder().encode(text));
/** Rounds half to even, below 2^51. @param {number} x */
const rint = (x) => x + 6755399441055744 - 6755399441055744;

// --- the header: JSON (section 2) -------------------------------------------------------------------

const TOKENS = /\\.|"|[\w.+-]+/gs, NUMBER = /^-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?$/;

/**
 * Parses JSON; whole numbers become BigInt, so that 2 and 2.0 stay two things: texts and numbers are marked, and the
 * engine's own parser sees texts alone.
 * @param {string} text
 * @returns {Json}
 */
function parseJson(text) {
  const wrong = () => refuse("its JSON is damaged, or nested too deeply");
  let inText = false;
  // Token by token: a pattern of whole texts would be tried again at every quote of one that does not end.
  const marked = text.replace(TOKENS, (token) => {
    if (token === '"') return (inText = !inText) ? '"t' : token;
    if (inText || /^(null|true|false)$/.test(token)) return token;
    return NUMBER.test(token) ? `"n${token}"` : wrong();
  });
  /** @param {any} v @param {number} depth @returns {Json} */
  const meant = (v, depth) => {
    if (depth > 500) wrong();
    if (Array.isArray(v)) return v.map((entry) => meant(entry, depth + 1));
    if (v === null || typeof v === "boolean") return v;
    if (typeof v === "string") {
      const content = v.slice(1);
      if (v[0] === "t") return content;
      if (/[.eE]/.test(content)) return Number(content);
      return /^-?\d{4301}/.test(content) ? wrong() : BigInt(content);
    }
    const found = /** @type {{[key: string]: Json}} */ (Object.create(null));
    for (const key in v) found[key[0] === "t" ? key.slice(1) : wrong()] = meant(v[key], depth + 1);
    return found;
  };
  try {
    return meant(JSON.parse(marked), 0);
  } catch {
    return wrong();
  }
}

/** The same with numbers for BigInt. @param {Json} v @returns {any} */
function plain(v) {
  if (typeof v === "bigint") return Number(v);
  if (Array.isArray(v)) return v.map(plain);
  return v && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([key, inner]) => [key, plain(inner)])) : v;
}

/** The text that a signature is of: sorted, ASCII, floats as Python writes them (section 7). @param {Json} v @returns {string} */
function canonical(v) {
  if (typeof v === "string") {
    return JSON.stringify(v).replace(/[^ -~]/g, (unit) => "\\u" + unit.charCodeAt(0).toString(16).padStart(4, "0"));
  }
  if (typeof v === "number") {
    if (!Number.isFinite(v)) refuse("its signature is of something else");
    const size = Math.abs(v), sign = v < 0 || Object.is(v, -0) ? "-" : "";
    const [digits, power] = size.toExponential().split("e"), e = Number(power);
    if (size && (e < -4 || e >= 16)) return `${sign}${digits}e${e < 0 ? "-" : "+"}${String(Math.abs(e)).padStart(2, "0")}`;
    return `${sign}${size}${Number.isInteger(v) ? ".0" : ""}`;
  }
  if (Array.isArray(v)) return `[${v.map(canonical).join(",")}]`;
  if (v === null || typeof v !== "object") return String(v);
  // By code points, which UTF-16 does not sort by.
  const order = (/** @type {string} */ key) => Array.from(key, (c) => String(c.codePointAt(0)).padStart(7, "0")).join();
  const keys = Object.keys(v).map((key) => [order(key), key]).sort((a, b) => (a[0] < b[0] ? -1 : 1));
  return `{${keys.map(([, key]) => `${canonical(key)}:${canonical(v[key])}`).join(",")}}`;
}

// --- the header: every field (section 3) ------------------------------------------------------------

/** @param {string} name @returns {never} */
const badField = (name) => refuse(`its header is not one of a city: ${name}`);
/** @param {number} low @param {number} high @returns {Check} */
const number = (low, high) => (name, v) => {
  if (!((typeof v === "number" || typeof v === "bigint") && low <= v && v <= high)) badField(name);
};
/** @param {number} low @param {number} high @returns {Check} */
const whole = (low, high) => (name, v) => {
  if (typeof v !== "bigint") badField(name);
  number(low, high)(name, v);
};
/** @param {RegExp} pattern @returns {Check} */
const text = (pattern) => (name, v) => {
  if (!(typeof v === "string" && pattern.test(v))) badField(name);
};
/** @param {null | string} other @param {Check} check @returns {Check} */
const or = (other, check) => (name, v) => {
  if (v !== other) check(name, v);
};
/** @param {Check} check @param {number} least @param {number} most @returns {Check} */
const each = (check, least, most) => (name, v) => {
  if (!(Array.isArray(v) && least <= v.length && v.length <= most)) badField(name);
  for (const entry of v) check(name, entry);
};
/** @param {Check} one @param {Check} other @returns {Check} */
const pair = (one, other) => (name, v) => {
  if (!(Array.isArray(v) && v.length === 2)) badField(name);
  one(name, v[0]);
  other(name, v[1]);
};
/** @param {{[key: string]: Check}} needed @param {{[key: string]: Check}} optional @param {boolean} more @returns {Check} */
const object = (needed, optional = {}, more = false) => (name, v) => {
  const fields = { ...needed, ...optional };
  if (v === null || typeof v !== "object" || Array.isArray(v)) badField(name);
  for (const key in v) if (!more && !Object.hasOwn(fields, key)) badField(`${name}.${key}`);
  for (const key in needed) if (!(key in v)) badField(`${name}.${key} is missing`);
  for (const key in fields) if (key in v) fields[key](`${name}.${key}`, v[key]);
};

/** @param {Check} check */
const column = (check) => each(check, 1, MOST_OUTPUTS);
const KM = number(-1e9, 1e9), LENGTH = number(1e-9, 1e9), EPSILON = number(1e-12, 1e12);
const LON = number(-360, 360), LAT = number(-90, 90), FIT = number(1e-9, 90), CELLS = whole(1, MOST_CELLS);
const DIGEST = text(HEX), SUBDIVISIONS = whole(1, MOST_SUBDIVISIONS);
const TABLE = each(each(number(-1e6, 1e6), 1, 16), 1, 16);
const HEADER = object(
  {
    epsilon_per_km: EPSILON, epsilon_certified: EPSILON, quantisation_km: LENGTH,
    metric_p: or("inf", number(1, 1e300)), content_sha256: DIGEST,
    grid: object({
      west_km: KM, south_km: KM, cells_x: CELLS, cells_y: CELLS, cell_km: LENGTH, refine: each(SUBDIVISIONS, 1, 64),
    }),
    kept: or(null, text(/^[0-9a-f]*$/)), // its length is known
    projection: or(null, object({ centre_lon: LON, centre_lat: LAT }, { rotation_deg: LON })),
    plane_fit: or(null, object({ half_lon: FIT, middle_lat: LAT, half_lat: FIT, x: TABLE, y: TABLE })),
    outputs: object({ lon: column(or(null, LON)), lat: column(or(null, LAT)), x: column(KM), y: column(KM) }),
    remap: or(null, column(whole(0, MOST_OUTPUTS))),
    packing: text(/^(seed|noise|rows)$/), tile_cells: pair(CELLS, CELLS),
    sections: each(pair(whole(1, 2 ** 62), DIGEST), 1, MOST_CELLS), rows_sha256: each(DIGEST, 1, MOST_CELLS),
  },
  {
    noise: object({ per_cell: SUBDIVISIONS, per_record: SUBDIVISIONS, reach: whole(0, MOST_CELLS), floor: number(0, 1) }),
    epsilon_planar_per_km: EPSILON, distortion: number(0, 1), certificate_sha256: DIGEST, mechanism_sha256: DIGEST,
    signature: object({ public_key: DIGEST, signature: text(/^[0-9a-f]{128}$/) }),
  },
  true,
);

// --- sections: zlib and planes of bytes (section 4) ---------------------------------------------------

/** @returns {never} */
const damaged = () => refuse("a section is damaged");

/**
 * Inflates a whole zlib stream to exactly so many bytes; of one that makes more, a piece is inflated beyond them at most.
 * @param {Uint8Array<ArrayBuffer>} input
 * @param {number} size
 */
async function inflate(input, size) {
  // No byte of a stream makes more than 1032: room is not made for what cannot come.
  if (size > 1032 * input.length) damaged();
  const out = new Uint8Array(size);
  let given = 0, done = 0;
  // In pieces: Firefox and WebKit make all that a piece holds at once, however much it is.
  const pieces = new ReadableStream({
    pull(to) {
      if (given < input.length) to.enqueue(input.subarray(given, (given += PIECE)));
      else to.close();
    },
  });
  for (const reader = pieces.pipeThrough(new DecompressionStream("deflate")).getReader(); ; ) {
    const { value } = await reader.read().catch(damaged);
    if (!value) return done === size ? out : damaged();
    if (done + value.length > size) {
      await reader.cancel();
      damaged();
    }
    out.set(value, done);
    done += value.length;
  }
}

/** Returns the bytes of numbers from all first bytes, all second bytes and so on. @param {Uint8Array<ArrayBuffer>} packed @param {number} width @param {number} count */
async function unpacked(packed, width, count) {
  const planes = await inflate(packed, width * count);
  // Engines differ in whether more may follow a stream: one that ends before its last byte is refused.
  if (await inflate(packed.subarray(0, -1), width * count).then(() => true, () => false)) damaged();
  const bytes = new Uint8Array(width * count);
  for (let plane = 0; plane < width; plane++) {
    for (let k = 0, from = plane * count, to = plane; k < count; k++, to += width) bytes[to] = planes[from + k];
  }
  return bytes.buffer;
}

// --- rows (section 5) -----------------------------------------------------------------------------------

const EIGHT = new Float64Array(8);

/**
 * The sum of n numbers in the certified order: pairs of halves down to 128, eight at once.
 * @param {Float64Array | Float32Array} a @param {number} from @param {number} n @returns {number}
 */
function sum(a, from, n) {
  if (n > 128) {
    const half = (n >> 1) & ~7;
    return sum(a, from, half) + sum(a, from + half, n - half);
  }
  const most = n & ~7;
  EIGHT.fill(0);
  for (let k = 0; k < most; k++) EIGHT[k & 7] += a[from + k];
  const [r0, r1, r2, r3, r4, r5, r6, r7] = EIGHT;
  let total = r0 + r1 + (r2 + r3) + (r4 + r5 + (r6 + r7));
  for (let k = most; k < n; k++) total += a[from + k];
  return total;
}

const TAYLOR = [479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1].map((n) => 1 / n);
const POWERS = Float64Array.from({ length: 2047 }, (_, k) => 2 ** (k - 1023));

/** e^x for |x| ≤ 700, of sums and products alone. @param {number} x */
function exponential(x) {
  const power = rint(x * 1.4426950408889634);
  const rest = x - power * 6.93147180369123816490e-1 - power * 1.90821492927058770002e-10;
  let value = TAYLOR[0];
  for (let k = 1; k < 13; k++) value = value * rest + TAYLOR[k];
  return value * POWERS[power + 1023];
}

/**
 * Interpolates between the seeds of one line: K numbers for each of its records.
 * @param {Float64Array} scores @param {number} first  Of the line's first seed.
 * @param {number} cells @param {number} factor @param {number} outputs
 */
function interpolated(scores, first, cells, factor, outputs) {
  const fine = new Float64Array((cells * factor + 1) * outputs);
  for (let cell = 0, to = 0; cell < cells; cell++) {
    const from = first + cell * outputs;
    for (let part = 0; part < factor; part++) {
      const t = part / factor;
      for (let k = 0; k < outputs; k++) fine[to++] = (1 - t) * scores[from + k] + t * scores[from + outputs + k];
    }
  }
  fine.set(scores.subarray(first + cells * outputs, first + (cells + 1) * outputs), cells * factor * outputs);
  return fine;
}

/** @param {Header} header @param {Grid} grid @returns {Noise | null} */
function noiseOf(header, grid) {
  if (!header.noise) return null;
  const { per_cell: perCell, per_record: perRecord, reach, floor } = header.noise, window = 2 * reach + 1;
  const [nx, ny] = grid.shape.map((side) => Math.floor(((side - 1) * perRecord) / perCell) + window);
  const tables = perCell * perCell * window * window;
  if (Math.min(perCell, perRecord) !== 1 || perCell > MOST_PER_CELL || reach > MOST_NOISE_CELLS ||
    nx * ny > MOST_NOISE_CELLS || tables > MOST_MASSES) badField("noise");
  return { perCell, perRecord, reach, window, nx, ny, floor };
}

/**
 * @typedef {{west: number, south: number, east: number, north: number, cells: number[], factor: number,
 *   spacing: number, shape: number[], radius: number}} Grid
 * @typedef {{perCell: number, perRecord: number, reach: number, window: number, nx: number, ny: number,
 *   floor: number}} Noise
 */

/** Refuses sizes that do not belong together, and returns what follows from them. @param {Header} header */
function checked(header) {
  const { grid: g, outputs, sections, projection, plane_fit: fit } = header;
  const cells = [g.cells_x, g.cells_y], west = g.west_km, south = g.south_km;
  const factor = g.refine.reduce((/** @type {number} */ all, /** @type {number} */ n) => all * n, 1);
  const shape = cells.map((n) => n * factor + 1), spacing = g.cell_km / factor;
  const east = west + (shape[0] - 1) * spacing, north = south + (shape[1] - 1) * spacing;
  const x = Math.max(Math.abs(west), Math.abs(east)), y = Math.max(Math.abs(south), Math.abs(north));
  /** @type {Grid} */
  const grid = { west, south, east, north, cells, factor, spacing, shape, radius: Math.sqrt(x * x + y * y) };
  const k = outputs.x.length, tile = header.tile_cells;
  if (cells[0] * cells[1] > MOST_CELLS || Math.max(...shape) > LONGEST_AXIS || spacing < 1e-9) badField("grid");
  if ([outputs.y, outputs.lon, outputs.lat].some((list) => list.length !== k)) badField("outputs");
  if (tile[0] > cells[0] || tile[1] > cells[1] ||
    4 * (tile[0] * factor + 1) * (tile[1] * factor + 1) * k > LARGEST_TILE_BYTES) badField("tile_cells");
  const across = cells.map((n, axis) => Math.ceil(n / tile[axis])), tiles = across[0] * across[1];
  const noise = noiseOf(header, grid);
  if ((header.packing === "noise") !== (noise !== null)) badField("noise");
  if (sections.length !== (header.packing === "seed" ? 1 : noise ? 3 : tiles)) badField("sections");
  if (header.rows_sha256.length !== tiles) badField("rows_sha256");
  if (header.kept !== null && header.kept.length !== 2 * Math.ceil((cells[0] * cells[1]) / 8)) badField("kept");
  const { remap } = header;
  if (remap && (remap.length !== k || remap.some((/** @type {number} */ output) => output >= k))) badField("remap");
  if ([...outputs.lon, ...outputs.lat].some((v) => (v === null) !== (projection === null))) badField("outputs");
  const uneven = (/** @type {Json[][]} */ table) => table.some((row) => row.length !== table[0].length);
  if (fit && (!projection || Math.abs(fit.middle_lat) + fit.half_lat >= 90 || uneven(fit.x) || uneven(fit.y))) badField("plane_fit");
  const p = header.metric_p === "inf" ? Infinity : header.metric_p;
  const quantisation = header.quantisation_km, radius = (spacing / 2) * 2 ** (1 / p);
  if (!(Math.abs(quantisation - radius) <= ROUNDING * Math.max(quantisation, radius))) badField("quantisation_km");
  if (header.epsilon_certified > header.epsilon_per_km * (1 + ROUNDING)) badField("epsilon_certified");
  return { grid, noise, k, tile, across, p };
}

// --- the plane (section 6) ------------------------------------------------------------------------------

/**
 * Distance and bearing from a centre, as x and y in km; NaN next to the antipode. T. Vincenty, "Direct and inverse solutions
 * of geodesics on the ellipsoid with application of nested equations" (Survey Review 23, 1975).
 * @param {number} centre @param {number} east @param {number} lat  All in degrees.
 */
function geodesic(centre, east, lat) {
  const a = 6378.137, f = 1 / 298.257223563, b = a * (1 - f), e2 = (a ** 2 - b ** 2) / b ** 2;
  const [beta1, beta2] = [centre, lat].map((v) => Math.atan((1 - f) * Math.tan(v * RADIANS)));
  const sin1 = Math.sin(beta1), cos1 = Math.cos(beta1), sin2 = Math.sin(beta2), cos2 = Math.cos(beta2);
  const longitude = east * RADIANS;
  for (let sphere = longitude, step = 0; step < 300; step++) {
    const sinL = Math.sin(sphere), cosL = Math.cos(sphere);
    const across = cos2 * sinL, along = cos1 * sin2 - sin1 * cos2 * cosL;
    const sinS = Math.hypot(across, along), cosS = sin1 * sin2 + cos1 * cos2 * cosL, arc = Math.atan2(sinS, cosS);
    const sinA = (cos1 * across) / (sinS > 0 ? sinS : 1), cosA2 = 1 - sinA * sinA;
    const cosM = cosA2 > 0 ? cosS - (2 * sin1 * sin2) / cosA2 : 0;
    const c = (f / 16) * cosA2 * (4 + f * (4 - 3 * cosA2));
    const nested = arc + c * sinS * (cosM + c * cosS * (2 * cosM ** 2 - 1));
    const further = longitude + (1 - c) * f * sinA * nested;
    if (Math.abs(further - sphere) <= 1e-13) {
      const root = Math.sqrt(1 + cosA2 * e2), k = (root - 1) / (root + 1);
      const scale = b * ((1 + (k * k) / 4) / (1 - k)), m = k * (1 - (3 / 8) * k * k);
      const cubic = (m / 6) * cosM * (4 * sinS ** 2 - 3) * (4 * cosM ** 2 - 3);
      const correction = m * (cosM + (m / 4) * (cosS * (2 * cosM ** 2 - 1) - cubic));
      const length = scale * ((sinS > 0 ? arc / sinS : 1) - correction);
      return [length * across, length * along];
    }
    sphere = further;
  }
  return [NaN, NaN];
}

/** @param {any[][]} table @param {number} square @param {number} v */
function horner(table, square, v) {
  let total = 0;
  for (let j = table.length - 1; j >= 0; j--) {
    const row = table[j];
    let inner = row[row.length - 1];
    for (let i = row.length - 2; i >= 0; i--) inner = inner * square + row[i];
    total = total * v + inner;
  }
  return total;
}

// --- draws (section 8) ------------------------------------------------------------------------------------

/**
 * The sums of each row's weights of 2^-60 before every block of outputs and of all of them: in units of 2^-28, and what
 * is left of the last one. Both are exact, as weights are whole and no more than 2^31 units.
 * @param {Float32Array} rows @param {number} k
 */
function blockSums(rows, k) {
  const sums = new Float64Array(2 * (rows.length / k) * (Math.ceil(k / BLOCK) + 1));
  for (let from = 0, to = 0; from < rows.length; from += k) {
    let whole = 0, part = 0;
    to += 2;
    for (let at = from; at < from + k; ) {
      for (const end = Math.min(at + BLOCK, from + k); at < end; at++) {
        const units = rows[at] * 2 ** 28, most = units | 0;
        whole += most;
        part += units - most;
      }
      const carry = part | 0;
      sums[to++] = whole += carry;
      sums[to++] = part -= carry;
    }
  }
  return sums;
}

/** The multiple of a total below which a 64-bit number is accepted. @param {bigint} total */
const acceptance = (total) => total * ((2n ** 64n - 1n) / (total + (total >> 6n)));

/** The key of draws, from one of a device. @param {StickyKey} key @param {string} mechanism */
async function drawKey({ secret, epoch = "1" }, mechanism) {
  if (!/^(?: |[^\p{C}\p{Z}])+$/u.test(epoch) || [...epoch].length > 100) invalid("an epoch is a text of 1 to 100 characters");
  if (secret instanceof Uint8Array && secret.length !== 32) invalid("a sticky key has 32 bytes");
  const message = ["mdpext sticky draw, version 1", epoch, mechanism].flatMap((part) => {
    const content = utf8(part);
    return [0, 0, content.length >> 8, content.length & 255, ...content];
  });
  return hmacKey(new Uint8Array(await crypto.subtle.sign("HMAC", await hmacKey(secret), Uint8Array.from(message))));
}

/** @param {Uint8Array | CryptoKey} secret */
async function hmacKey(secret) {
  if (!(secret instanceof Uint8Array)) return secret;
  return crypto.subtle.importKey("raw", /** @type {Uint8Array<ArrayBuffer>} */ (secret), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
}

/** Reads the text of a file that `mdpext sticky-key` has written. @param {string} content @returns {Promise<StickyKey>} */
export async function readStickyKey(content) {
  const { format, epoch, key, check } = /** @type {any} */ (parseJson(content)) ?? {};
  const version = Number(/^mdpext sticky key, version (\d{1,9})$/.exec(format)?.[1]);
  refuseNewer("sticky key", version, KEY_VERSION);
  if (version !== KEY_VERSION || typeof epoch !== "string" || !HEX.test(key)) refuse("is no sticky key");
  const secret = fromHex(key);
  if ((await sha256(Uint8Array.from([...secret, ...utf8(epoch)]))).slice(0, 8) !== check) refuse("the sticky key is damaged");
  return { secret, epoch };
}

/** A text in JSON, of a double as C prints it in hexadecimal: the same for the same bits. @param {number} v */
function floatHex(v) {
  if (v === Infinity) return '"inf"';
  const bits = new DataView(new ArrayBuffer(8));
  bits.setFloat64(0, v);
  const high = bits.getUint32(0), exponent = (high >>> 20) & 2047, sign = high >>> 31 ? "-" : "";
  if (v === 0) return `"${sign}0x0.0p+0"`;
  const digits = (high & 0xfffff).toString(16).padStart(5, "0") + bits.getUint32(4).toString(16).padStart(8, "0");
  const power = (exponent || 1) - 1023;
  return `"${sign}0x${exponent ? 1 : 0}.${digits}p${power < 0 ? "" : "+"}${power}"`;
}

/** A certified mechanism from a file; made by {@link openCity}. */
export class City {
  #bytes; #statement; #header; #starts; #size;
  #kept; #allKept;
  /** @type {Map<number, Promise<Tile>>} */ #tiles = new Map();
  /** @type {Promise<any> | null} */ #tables = null;
  #cacheBytes;
  #identity = "";
  /** Whether what is reported is what the file's remap says. */ remapped;

  /** @param {Uint8Array<ArrayBuffer>} bytes @param {Json} statement @param {number} start @param {{remap?: boolean, cacheBytes?: number}} options */
  constructor(bytes, statement, start, { remap, cacheBytes = CACHE_BYTES }) {
    const header = (this.#header = plain(statement));
    this.#bytes = bytes;
    this.#statement = statement;
    this.#size = checked(header);
    this.#cacheBytes = cacheBytes;
    this.#starts = [start];
    let end = start;
    for (const [size] of header.sections) this.#starts.push((end += size));
    if (end !== bytes.length) refuse(end > bytes.length ? "is cut short" : "has bytes too many");
    if (remap && !header.remap) refuse("was exported without a remap");
    this.remapped = remap !== false && header.remap !== null;
    // One bit a cell; those past the last are 0.
    const cells = this.#size.grid.cells[0] * this.#size.grid.cells[1], all = new Uint8Array(Math.ceil(cells / 8)).fill(255);
    if (cells % 8) all[all.length - 1] = 256 - 2 ** (8 - (cells % 8));
    this.#kept = header.kept === null ? all : fromHex(header.kept).map((byte, at) => byte & all[at]);
    this.#allKept = this.#kept.every((byte, at) => byte === all[at]);
  }

  /** Promised ε, in 1/km. */
  get epsilonPerKm() { return this.#header.epsilon_per_km; }
  /** Certified ε, in 1/km, for distance in the plane. */
  get epsilonCertified() { return this.#header.epsilon_certified; }
  /** Largest distance ρ, in km, from a place in the grid to its record: places at distance d are told apart by at most ε (d + 2 ρ). */
  get quantisationKm() { return this.#header.quantisation_km + (this.planar ? 0 : 2e-6); }
  /** Whether places are x and y alone. */
  get planar() { return this.#header.projection === null; }
  /** Identity of the mechanism, which sticky answers go by. */
  get mechanismSha256() { return this.#identity; }
  /** How far the axes of the plane are turned, counter-clockwise, in degrees. */
  get rotationDeg() { return this.#header.projection?.rotation_deg ?? 0; }
  /** The rectangle of the grid in the plane, in km, and records to the east and to the north. */
  get grid() {
    const { west, south, east, north, shape, spacing } = this.#size.grid;
    return { west, south, east, north, shape: [...shape], spacing };
  }
  /** Number of tiles. */
  get tiles() { return this.#header.rows_sha256.length; }
  /** What the file says of itself in texts: title, attribution, software, digests. @returns {{[key: string]: string}} */
  get facts() { return Object.fromEntries(Object.entries(this.#header).filter(([key, v]) => typeof v === "string" && key !== "kept")); }
  /** Where the outputs lie: x and y in km, lon and lat in degrees. @returns {Report[]} */
  get outputs() { return this.#header.outputs.x.map((/** @type {any} */ _, /** @type {number} */ output) => this.#report(output)); }

  /** @param {number} output @returns {Report} */
  #report(output) {
    const { lon, lat, x, y } = this.#header.outputs;
    return { output, lon: lon[output], lat: lat[output], x: x[output], y: y[output] };
  }

  /** Computes the identity, and refuses a file whose own is another (section 7). */
  async identify() {
    const h = this.#header, { k, p } = this.#size, all = new BigUint64Array(4 * k), doubles = new Float64Array(all.buffer);
    [h.outputs.x, h.outputs.y, h.outputs.lon, h.outputs.lat].forEach((list, column) => {
      for (let output = 0, at = column; output < k; output++, at += 4) {
        if (list[output] === null) all[at] = 0x7ff8000000000000n;
        else doubles[at] = list[output];
      }
    });
    const list = (/** @type {(number | string)[]} */ values) => `[${values.join(", ")}]`, floats = (/** @type {number[]} */ values) => list(values.map(floatHex));
    const turned = this.planar ? [] : [h.projection.centre_lon, h.projection.centre_lat, h.projection.rotation_deg ?? 0];
    const document = `{"cells": ${list([h.grid.cells_x, h.grid.cells_y, ...h.grid.refine])}, ` +
      `"content_sha256": "${h.content_sha256}", "format": "mdpext mechanism, version 1", "kept": "${toHex(this.#kept)}", ` +
      `"origin_and_side": ${floats([h.grid.west_km, h.grid.south_km, h.grid.cell_km])}, ` +
      `"outputs_sha256": "${await sha256(all)}", "projection": ${floats(turned)}, ` +
      `"promise": ${floats([h.epsilon_per_km, h.epsilon_certified, p])}}`;
    this.#identity = await sha256(utf8(document));
    if ((h.mechanism_sha256 ?? this.#identity) !== this.#identity) refuse("its grid, plane, outputs or promise are not those that it was finished with");
  }

  /** Refuses a file that this key has not signed (section 7). @param {string} key  64 hexadecimal digits. */
  async requireSigned(key) {
    const { signature, ...statement } = /** @type {any} */ (this.#statement);
    if (!HEX.test(key)) invalid("a public key is 64 hexadecimal digits");
    if (signature?.public_key !== key) refuse(signature ? "is signed by another key than the trusted one" : "is not signed");
    const digest = await sha256(utf8(canonical(statement)));
    let good = false;
    try {
      const verifier = await crypto.subtle.importKey("raw", fromHex(key), "Ed25519", false, ["verify"]);
      good = await crypto.subtle.verify("Ed25519", verifier, fromHex(signature.signature), utf8(`mdpext signature, version 1\ncity\n${digest}\n`));
    } catch (error) {
      refuse(`its signature cannot be checked here: ${error}`);
    }
    if (!good) refuse("is not what the trusted key has signed");
  }

  /** The bytes of a section, once they are those of its digest. @param {number} number */
  async #section(number) {
    const content = this.#bytes.slice(this.#starts[number], this.#starts[number + 1]);
    if (await sha256(content) !== this.#header.sections[number][1]) refuse(`section ${number} is damaged`);
    return content;
  }

  /** The half-open ranges of a tile's source cells and records along an axis. @param {number} tile */
  #ranges(tile) {
    const { grid, tile: sides, across } = this.#size;
    return [Math.floor(tile / across[1]), tile % across[1]].map((at, axis) => {
      const first = at * sides[axis], last = Math.min(first + sides[axis], grid.cells[axis]);
      return { first, last, from: first * grid.factor, to: last * grid.factor + (last === grid.cells[axis] ? 1 : 0) };
    });
  }

  /**
   * A copy of the rows of a tile, as they were certified, of shape (east, north, K).
   * @param {number} tile
   * @returns {Promise<Float32Array>}
   */
  async rows(tile) {
    return (await this.#tile(tile)).rows.slice();
  }

  /** @typedef {{rows: Float32Array, sums: Float64Array}} Tile  Rows, and {@link blockSums} of each. */

  /** @param {number} tile @returns {Promise<Tile>} */
  #tile(tile) {
    let found = this.#tiles.get(tile);
    if (found) return found;
    // What engines throw where there is no room.
    found = this.#checked(tile).catch((error) => (error instanceof RangeError ? refuse("its rows need more memory") : Promise.reject(error)));
    this.#tiles.set(tile, found);
    found.then(
      ({ rows, sums }) => {
        // The oldest go first; two are kept in any case, for places along a border.
        const keep = Math.max(2, Math.floor(this.#cacheBytes / (rows.byteLength + sums.byteLength)));
        for (const old of [...this.#tiles.keys()].slice(0, -keep)) this.#tiles.delete(old);
      },
      () => this.#tiles.delete(tile),
    );
    return found;
  }

  /** @param {number} tile @returns {Promise<Tile>} */
  async #checked(tile) {
    const { packing, rows_sha256: digests } = this.#header, { k } = this.#size;
    const [x, y] = this.#ranges(tile);
    const rows = await (packing === "seed" ? this.#extended(x, y) : packing === "noise" ? this.#noise(x, y) : this.#stored(tile, x, y));
    if (await sha256(rows) !== digests[tile]) refuse(`tile ${tile} does not give its certified rows: the file is damaged, or this engine computes otherwise`);
    // Written so that NaN fails.
    let sound = true;
    for (let at = 0; at < rows.length; at++) sound &&= rows[at] >= SMALLEST;
    for (let from = 0; from < rows.length; from += k) sound &&= sum(rows, from, k) <= LARGEST_TOTAL;
    if (!sound) refuse("a stored row is damaged");
    return { rows, sums: blockSums(rows, k) };
  }

  /** @typedef {{first: number, last: number, from: number, to: number}} Range */

  /** Rows of a section of their own. @param {number} tile @param {Range} x @param {Range} y */
  async #stored(tile, x, y) {
    const { k } = this.#size, east = x.to - x.from, north = y.to - y.from;
    const bits = new Int32Array(await unpacked(await this.#section(tile), 4, east * north * k)), rows = new Int32Array(bits.length);
    for (let at = 0; at < bits.length; at++) bits[at] = (bits[at] >>> 1) ^ -(bits[at] & 1);
    for (const step of [1, 1, north, north]) {
      for (let plane = 0; plane < bits.length; plane += east * north) {
        for (let at = 0; at < east * north; at++) {
          if (step === 1 ? at % north : at >= north) bits[plane + at] += bits[plane + at - step];
        }
      }
    }
    for (let output = 0, from = 0; output < k; output++) {
      for (let record = 0; record < east * north; record++) rows[record * k + output] = bits[from++];
    }
    return new Float32Array(rows.buffer);
  }

  /** Rows that follow from the seed's log scores. @param {Range} x @param {Range} y */
  async #extended(x, y) {
    const { grid: { cells, factor }, k } = this.#size;
    const scores = /** @type {Float64Array} */ (await (this.#tables ??= this.#section(0).then(async (section) => {
      const found = new Float64Array(await unpacked(section, 8, (cells[0] + 1) * (cells[1] + 1) * k));
      return found.every((v) => LOWEST_SCORE <= v && v <= 0) ? found : damaged();
    })));
    const north = y.to - y.from, rows = new Float32Array((x.to - x.from) * north * k);
    const line = (/** @type {number} */ seed) => interpolated(scores, (seed * (cells[1] + 1) + y.first) * k, y.last - y.first, factor, k);
    const normalised = (/** @type {Float64Array} */ weight, /** @type {number} */ column) => {
      for (let j = 0, to = column * north * k; j < north; j++) {
        const total = sum(weight, j * k, k);
        for (let output = 0; output < k; output++) rows[to++] = weight[j * k + output] / total;
      }
    };
    let side = line(x.first), column = 0;
    for (let cell = x.first; cell < x.last; cell++) {
      const next = line(cell + 1), weight = side.map(exponential);
      normalised(weight, column++);
      if (factor > 1) {
        const ratio = next.map((v, at) => exponential((v - side[at]) / factor));
        for (let step = 1; step < factor; step++) {
          for (let at = 0; at < weight.length; at++) weight[at] *= ratio[at];
          normalised(weight, column++);
        }
      }
      side = next;
    }
    if (column < x.to - x.from) normalised(side.map(exponential), column);
    return rows;
  }

  /** Rows that follow from tables of noise. @param {Range} x @param {Range} y */
  async #noise(x, y) {
    const { k, noise } = this.#size;
    if (!noise) return damaged();
    const { perCell, perRecord, reach, window, nx, ny, floor } = noise;
    const { reported, masses, totals } = await (this.#tables ??= (async () => {
      const reported = new Int32Array(await unpacked(await this.#section(0), 4, nx * ny));
      const masses = new Float64Array(await unpacked(await this.#section(1), 8, perCell * perCell * window * window));
      const totals = new Float64Array(await unpacked(await this.#section(2), 8, perCell * perCell));
      const sound = masses.every((v) => v >= 0 && v < Infinity) && totals.every((v) => v > 0 && v < Infinity) &&
        reported.every((v) => v >= 0 && v < k) && 0 < floor * k && floor * k < 1;
      return sound ? { reported, masses, totals } : damaged();
    })());
    const rows = new Float32Array((x.to - x.from) * (y.to - y.from) * k), row = new Float64Array(k);
    const cell = (/** @type {number} */ record) => Math.floor((record * perRecord) / perCell);
    let to = 0;
    for (let i = x.from; i < x.to; i++) {
      for (let j = y.from; j < y.to; j++) {
        const phase = (i % perCell) * perCell + (j % perCell), first = phase * window * window;
        row.fill(0);
        for (let a = 0; a < window; a++) {
          const line = (cell(i) + a) * ny + cell(j), from = first + a * window;
          for (let b = 0; b < window; b++) {
            const mass = masses[from + b];
            if (mass) row[reported[line + b]] += mass;
          }
        }
        const scale = (1 - k * floor) / totals[phase];
        for (let output = 0; output < k; output++) rows[to++] = row[output] * scale + floor;
      }
    }
    return rows;
  }

  /**
   * Where a place lies in the plane, x and y in km; NaN next to the antipode.
   * @param {Place} place
   * @returns {number[]}
   */
  toPlane(place) {
    if ("x" in place) {
      if (!(Number.isFinite(place.x) && Number.isFinite(place.y))) invalid("x, y: must be finite numbers");
      return [place.x, place.y];
    }
    const { projection, plane_fit: fit } = this.#header, { lon, lat } = place;
    if (!(typeof lon === "number" && typeof lat === "number" && Math.abs(lon) <= 180 && Math.abs(lat) <= 90)) invalid("lon, lat: must be degrees");
    if (!projection) invalid("lon, lat: the city is planar; give x, y");
    let east = lon - projection.centre_lon, x, y;
    east -= 360 * rint(east / 360);
    const half = fit?.half_lon, past = lat - fit?.middle_lat;
    if (fit && Math.abs(east) <= half && Math.abs(past) <= fit.half_lat) {
      const u = east / half, v = past / fit.half_lat, square = u * u;
      [x, y] = [u * horner(fit.x, square, v), horner(fit.y, square, v)];
    } else [x, y] = geodesic(projection.centre_lat, east, lat);
    if (this.rotationDeg === 0) return [x, y];
    const c = Math.cos(-this.rotationDeg * RADIANS), s = Math.sin(-this.rotationDeg * RADIANS);
    return [c * x - s * y, s * x + c * y];
  }

  /**
   * The record that a place is reported from, and whether the place lies outside. As secret as the place.
   * @param {Place} place
   * @param {number} [placeKm]  Side of coarse places, in km.
   */
  record(place, placeKm) {
    const { grid, p } = this.#size, [x0, y0] = this.toPlane(place);
    if (placeKm !== undefined && !(0 < placeKm && placeKm <= 1e5)) invalid("placeKm: must be a positive number of km");
    const steps = placeKm === undefined ? 1 : Math.max(Math.ceil(placeKm / grid.spacing - 1e-9), 1);
    let [x, y] = [x0, y0];
    const r = Math.sqrt(x * x + y * y);
    if (!this.planar && !(r < 0.999 * grid.radius)) {
      const known = Number.isFinite(x) && Number.isFinite(y);
      if (!known) [x, y] = [0, 0];
      if (p === 2) {
        const away = known ? r : Infinity, target = Math.min(grid.radius, Math.max(19900 - away, 0));
        const factor = Math.min(1, target / Math.max(away, 1e-9));
        [x, y] = [x * factor, y * factor];
      } else {
        const most = Math.max(13400 - Math.max(Math.abs(x), Math.abs(y)), 0) / 2;
        [x, y] = [x, y].map((v) => Math.min(Math.max(v, -most), most));
      }
    }
    const across = (Math.min(Math.max(x, grid.west), grid.east) - grid.west) / grid.spacing;
    const along = (Math.min(Math.max(y, grid.south), grid.north) - grid.south) / grid.spacing;
    const nearest = (/** @type {number} */ m) => [Math.min(rint(across / m) * m, grid.shape[0] - 1), Math.min(rint(along / m) * m, grid.shape[1] - 1)];
    const inside = x0 >= grid.west - BORDER_KM && x0 <= grid.east + BORDER_KM && y0 >= grid.south - BORDER_KM && y0 <= grid.north + BORDER_KM;
    const [i, j] = nearest(steps);
    return { i, j, outside: !(inside && this.#inRegion(nearest(1))) };
  }

  /** Whether a record is a vertex of a kept cell. @param {number[]} record */
  #inRegion(record) {
    const { cells, factor } = this.#size.grid;
    if (this.#allKept) return true;
    const kept = (/** @type {number} */ cell) => (this.#kept[cell >> 3] >> (7 - (cell & 7))) & 1;
    const [a, b] = record.map((at, axis) => [Math.max(Math.ceil(at / factor) - 1, 0), Math.min(Math.floor(at / factor), cells[axis] - 1)]);
    return a.some((cell) => b.some((other) => kept(cell * cells[1] + other)));
  }

  /**
   * A copy of the certified row of a record: K probabilities, without the remap.
   * @param {number} i @param {number} j
   */
  async row(i, j) {
    const { tile, at } = this.#within(i, j), { k } = this.#size;
    return (await this.#tile(tile)).rows.slice(at * k, (at + 1) * k);
  }

  /** The tile of a record, and which of the tile's records it is. @param {number} i @param {number} j */
  #within(i, j) {
    const { grid: { factor }, tile, across } = this.#size;
    const [a, b] = [i, j].map((at, axis) => Math.min(Math.floor(at / (tile[axis] * factor)), across[axis] - 1));
    const number = a * across[1] + b, [x, y] = this.#ranges(number);
    return { tile: number, at: (i - x.from) * (y.to - y.from) + j - y.from };
  }

  /**
   * Draws one report for a place. Each is a release of its own: n of one place are n ε.
   * @param {Place} place
   * @param {SampleOptions} [options]
   * @returns {Promise<{report: Report | null, notes: string[]}>}  Only `report` may leave the device; it is null where a place outside is dropped.
   */
  async sample(place, { placeKm, outside = "nearest", user, sticky, entropyForTests } = {}) {
    if (!["nearest", "drop", "error"].includes(outside)) invalid("outside: must be nearest, drop or error");
    if ((user == null) !== (sticky == null)) invalid("user: goes with a sticky key");
    const notes = [], accuracy = place.accuracy ?? 0, hidden = 1000 / this.epsilonPerKm;
    if (accuracy > hidden) notes.push(`The position is known to ${Math.round(accuracy)} m only, which is more than 1/ε = ${Math.round(hidden)} m: the report is of little use.`);
    const { i, j, outside: isOutside } = this.record(place, placeKm);
    if (isOutside) {
      if (outside === "error") invalid("the place lies outside");
      if (outside === "drop") return { report: null, notes: [...notes, "The place lies outside: dropped, which says so."] };
      notes.push("The place lies outside; reported from the nearest record.");
    }
    const { tile, at } = this.#within(i, j), { rows, sums } = await this.#tile(tile), { k } = this.#size;
    const first = 2 * at * (Math.ceil(k / BLOCK) + 1), end = first + 2 * Math.ceil(k / BLOCK);
    const total = (BigInt(sums[end]) << 32n) | BigInt(sums[end + 1] * 2 ** 32);
    const below = sticky != null ? await this.#stickyBelow(sticky, user ?? "", i, j, total) : uniformBelow(total, entropyForTests);
    const whole = Number(below >> 32n), part = Number(below & 0xffffffffn) / 2 ** 32;
    // How many sums do not exceed the number: at the ends of blocks, then in one block. Every output takes the same steps:
    // past the last one there are only larger sums.
    let passed = 0;
    for (let b = first + 2; b < end; b += 2) passed += +(sums[b] - whole + (sums[b + 1] - part) <= 0);
    let left = sums[first + 2 * passed] - whole, over = sums[first + 2 * passed + 1] - part;
    passed *= BLOCK;
    for (let from = at * k + passed, weight = from; weight < from + BLOCK; weight++) {
      const units = rows[weight] * 2 ** 28, most = units | 0;
      left += most;
      over += units - most;
      passed += +(left + over <= 0);
    }
    return { report: this.#report(this.remapped ? this.#header.remap[passed] : passed), notes };
  }

  /** @param {StickyKey} sticky @param {string} user @param {number} i @param {number} j @param {bigint} total */
  async #stickyBelow(sticky, user, i, j, total) {
    const name = utf8(user);
    if (!user || typeof user !== "string" || /\p{Cs}/u.test(user) || name.length > 1000) invalid("user: must be a text of 1 to 1000 bytes");
    const key = await drawKey(sticky, this.#identity), message = new Uint8Array(12 + name.length), view = new DataView(message.buffer);
    view.setBigInt64(0, BigInt(i) * BigInt(this.#size.grid.shape[1]) + BigInt(j));
    const end = acceptance(total);
    message.set(name, 12);
    for (let counter = 0; ; counter++) {
      view.setUint32(8, counter);
      const digest = new DataView(await crypto.subtle.sign("HMAC", key, message));
      for (let at = 0; at < 32; at += 8) {
        const word = digest.getBigUint64(at, true);
        if (word < end) return word % total;
      }
    }
  }
}

/** @param {bigint} total @param {(bytes: number) => Uint8Array} [entropy] */
function uniformBelow(total, entropy = (n) => crypto.getRandomValues(new Uint8Array(n))) {
  for (const end = acceptance(total); ; ) {
    const bytes = entropy(8), word = new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true);
    if (word < end) return word % total;
  }
}

/**
 * Opens an exported city.
 * @param {ArrayBuffer | Uint8Array<ArrayBuffer>} content  Must stay as it is while the city is in use.
 * @param {{trustedKey?: string, remap?: boolean, cacheBytes?: number}} [options]
 *   The public key that must have signed it, 64 hexadecimal digits; whether to report through the remap (default: where there is one);
 *   how many bytes of rows are kept.
 * @returns {Promise<City>}
 * @throws {CityError} If it is not one, damaged, of a newer version, or not signed by that key.
 */
export async function openCity(content, options = {}) {
  if (!globalThis.crypto?.subtle) refuse("there is no WebCrypto here: open the page over https:// or on http://localhost");
  if (new Uint8Array(Uint16Array.of(1).buffer)[0] !== 1) refuse("this machine is big-endian");
  const bytes = content instanceof Uint8Array ? content : new Uint8Array(content);
  if (String.fromCharCode(...bytes.subarray(0, 8)) !== "mdpcity\n") refuse("is not an exported city");
  if (bytes.length < START) refuse("is cut short");
  const view = new DataView(bytes.buffer, bytes.byteOffset), version = view.getUint32(8, true), length = view.getUint32(12, true);
  refuseNewer("city", version, VERSION);
  if (version < VERSION) refuse(`is damaged: there is no city format ${version}`);
  if (length > LARGEST_HEADER || START + length > bytes.length) refuse("its header is damaged");
  const covered = new Uint8Array(PREFIX_BYTES + length);
  covered.set(bytes.subarray(0, PREFIX_BYTES));
  covered.set(bytes.subarray(START, START + length), PREFIX_BYTES);
  if (await sha256(covered) !== toHex(bytes.subarray(PREFIX_BYTES, START))) refuse("its header is damaged");
  let header;
  try {
    header = parseJson(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(covered.subarray(PREFIX_BYTES)));
  } catch (error) {
    if (error instanceof CityError) throw error;
    refuse("its header is not UTF-8");
  }
  HEADER("header", header);
  const city = new City(bytes, header, START + length, options);
  await city.identify();
  if (options.trustedKey !== undefined) await city.requireSigned(options.trustedKey);
  return city;
}
