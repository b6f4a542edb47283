"use strict";
// What the report adds where scripts run: pick a record and see its distribution, pick a report and see
// where it may come from. Everything else is in the page already.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [across, along] = data.shape, outputs = data.outputs;
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const codes = bytes(data.codes), inside = bytes(data.inside), prior = floats(data.prior);
  // Of noise, records have lists of near outputs, in order: where they start, and which they are.
  const starts = data.starts ? new Uint32Array(bytes(data.starts).buffer) : null;
  const numbers = starts && new (outputs < 65536 ? Uint16Array : Uint32Array)(bytes(data.numbers).buffer);
  const far = starts && floats(data.far);
  const colours = bytes(data.colours);
  const lonlat = data.lonlat === null ? null : floats(data.lonlat);
  const byId = (id) => document.getElementById(id);
  const picked = { a: data.typical[0], b: data.typical[1], output: data.output };

  // Probability of an output from a record; 0 if its row cannot be used.
  const probability = (at, k) => {
    let found = at * outputs + k;
    if (starts) {
      const last = starts[at + 1];
      let end = last;
      found = starts[at];
      if (found === last) return 0;
      while (found < end) {
        const middle = (found + end) >> 1;
        if (numbers[middle] < k) found = middle + 1;
        else end = middle;
      }
      if (found === last || numbers[found] !== k) return far[k];
    }
    return codes[found] ? Math.exp(data.least_log + data.step_log * (codes[found] - 1)) : 0;
  };
  // Probabilities of a record, normalised again: steps of the logarithm are coarse.
  const row = (a, b) => {
    const values = Float64Array.from({ length: outputs }, (_, k) => probability(a * along + b, k));
    const total = values.reduce((sum, value) => sum + value, 0);
    return total > 0 ? values.map((value) => value / total) : values;
  };
  const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)}%` : p >= 0.00995 ? `${(100 * p).toFixed(1)}%` :
    p >= 0.0001 ? `${(100 * p).toPrecision(2)}%` : "<0.01%");
  const place = (a, b) => {
    const at = 2 * (a * along + b);
    return lonlat ? `${lonlat[at + 1].toFixed(5)}, ${lonlat[at].toFixed(5)}` :
      `x ${data.x_km[a].toFixed(3)}, y ${data.y_km[b].toFixed(3)} km`;
  };
  const nearest = (list, value) => {
    let best = 0;
    list.forEach((at, index) => { if (Math.abs(at - value) < Math.abs(list[best] - value)) best = index; });
    return best;
  };

  const map = byId("from-map"), dots = [...map.querySelectorAll(".dot")];
  const cell = (text, kind) => {
    const made = document.createElement(kind || "td");
    made.textContent = text;
    return made;
  };
  const bar = (share) => {
    const made = cell("");
    made.className = "bar";
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 10");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.setAttribute("width", String(100 * share));
    rect.setAttribute("height", "10");
    rect.setAttribute("class", "own");
    svg.append(rect);
    made.append(svg);
    return made;
  };
  const lineOf = (name, share, probability) => {
    const line = document.createElement("tr"), number = cell(percent(probability));
    number.className = "number";
    line.append(cell(name, "th"), bar(share), number);
    line.firstChild.scope = "row";
    line.dataset.probability = String(probability);
    return line;
  };
  const showRecord = () => {
    const { a, b } = picked, values = row(a, b), most = Math.max(...values, Number.MIN_VALUE);
    dots.forEach((dot, k) => {
      dot.setAttribute("r", Math.max(data.largest * Math.sqrt(values[k] / most), 0.8).toFixed(1));
      dot.setAttribute("fill-opacity", (0.35 + 0.6 * values[k] / most).toFixed(2));
    });
    byId("from-place").setAttribute("transform", `translate(${data.x[a]} ${data.y[b]})`);
    const order = [...values.keys()].sort((m, n) => values[n] - values[m]).slice(0, 12);
    byId("from-rows").replaceChildren(...order.filter((k) => values[k] > 0).map((k) => {
      const line = lineOf(`${k} at ${data.places[k]}`, values[k] / most, values[k]);
      line.dataset.output = String(k);
      return line;
    }));
    byId("from-where").textContent = place(a, b) + (inside[a * along + b] ? "" : " (outside the region)");
    map.dataset.record = `${a},${b}`;
    byId("from-said").textContent = values[order[0]] > 0
      ? `Record at ${place(a, b)}: most likely report ${order[0]}, ${percent(values[order[0]])}.`
      : `Record at ${place(a, b)}: its row cannot be used.`;
  };

  const choice = byId("back-output");
  const showOutput = () => {
    const k = picked.output, joint = new Float64Array(across * along);
    let total = 0, most = 0;
    for (let at = 0; at < joint.length; at++) {
      joint[at] = prior[at] * probability(at, k);
      total += joint[at];
      most = Math.max(most, joint[at]);
    }
    for (const kind of ["light", "dark"]) {
      const shown = byId(`back-field-${kind}`), canvas = document.createElement("canvas");
      if (!shown) continue;
      canvas.width = across;
      canvas.height = along;
      const context = canvas.getContext("2d"), pixels = context.createImageData(across, along);
      for (let a = 0; a < across; a++) {
        for (let b = 0; b < along; b++) {
          if (!(prior[a * along + b] > 0) || !(most > 0)) continue;
          const share = Math.sqrt(joint[a * along + b] / most);
          const from = 3 * Math.round(255 * (kind === "dark" ? share : 1 - share));
          const to = 4 * ((along - 1 - b) * across + a);
          pixels.data.set([colours[from], colours[from + 1], colours[from + 2], 255], to);
        }
      }
      context.putImageData(pixels, 0, 0);
      shown.setAttribute("href", canvas.toDataURL("image/png"));
    }
    const [x, y] = data.outputs_km[k];
    byId("back-rows").replaceChildren(...data.radii_km.map((radius) => {
      let sum = 0;
      for (let a = 0; a < across; a++) {
        for (let b = 0; b < along; b++) {
          if (Math.hypot(data.x_km[a] - x, data.y_km[b] - y) <= radius) sum += joint[a * along + b];
        }
      }
      const share = total > 0 ? sum / total : 0;
      return lineOf(`${radius} km`, share, share);
    }));
    const at = dots[k];
    byId("back-place").setAttribute("transform", `translate(${at.getAttribute("cx")} ${at.getAttribute("cy")})`);
    byId("back-where").textContent = `${k} at ${data.places[k]}`;
    const percents = total > 0 ? 100 * most / total : 0;
    const legend = byId("back-legend");
    if (legend) {
      const names = legend.querySelectorAll("span");
      names[1].textContent = (percents / 4).toPrecision(2);
      names[2].textContent = percents.toPrecision(2);
    }
    byId("back-map").dataset.output = String(k);
    choice.value = String(k);
  };

  const pick = (a, b) => {
    picked.a = Math.min(Math.max(a, 0), across - 1);
    picked.b = Math.min(Math.max(b, 0), along - 1);
    showRecord();
  };
  // Where a pointer is, in the units of a map.
  const pointOf = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const pickAt = (event) => {
    const point = pointOf(map, event);
    pick(nearest(data.x, point.x), nearest(data.y, point.y));
  };
  map.addEventListener("click", pickAt);
  map.addEventListener("pointermove", (event) => { if (event.buttons === 1 && event.pointerType === "mouse") pickAt(event); });
  map.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 5 : 1;
    const moves = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, far], ArrowDown: [0, -far] };
    if (event.key === "Home") pick(...data.typical);
    else if (event.key in moves) pick(picked.a + moves[event.key][0], picked.b + moves[event.key][1]);
    else return;
    event.preventDefault();
  });
  byId("from-reset").addEventListener("click", () => pick(...data.typical));
  byId("from-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const first = Number(byId("from-first").value), second = Number(byId("from-second").value);
    if (!Number.isFinite(first) || !Number.isFinite(second)) return;
    if (!lonlat) {
      pick(nearest(data.x_km, first), nearest(data.y_km, second));
      return;
    }
    let best = 0, least = Infinity;
    const shrink = Math.cos(first * Math.PI / 180);
    for (let at = 0; at < across * along; at++) {
      const apart = Math.hypot((lonlat[2 * at] - second) * shrink, lonlat[2 * at + 1] - first);
      if (apart < least) { least = apart; best = at; }
    }
    pick(Math.floor(best / along), best % along);
  });
  const back = byId("back-map");
  back.addEventListener("click", (event) => {
    const point = pointOf(back, event);
    let least = Infinity;
    dots.forEach((dot, k) => {
      const apart = Math.hypot(dot.getAttribute("cx") - point.x, dot.getAttribute("cy") - point.y);
      if (apart < least) { least = apart; picked.output = k; }
    });
    showOutput();
  });
  choice.addEventListener("change", () => { picked.output = Number(choice.value); showOutput(); });

  map.setAttribute("tabindex", "0");
  map.setAttribute("role", "application");
  map.setAttribute("aria-describedby", "from-help");
  document.documentElement.classList.add("js");
  map.dataset.record = `${picked.a},${picked.b}`;
})();
