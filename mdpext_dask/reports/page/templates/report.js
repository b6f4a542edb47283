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
  const at = dots.map((dot) => [Number(dot.getAttribute("cx")), Number(dot.getAttribute("cy"))]);
  const drawn = (kind, attributes) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const name in attributes) one.setAttribute(name, attributes[name]);
    return one;
  };
  const inMetres = (km) => (km < .1 ? `${Math.round(1000 * km)}\u00a0m` : km < 9.995 ?
    `${(10 * Math.round(100 * km)).toLocaleString("en")}\u00a0m` :
    `${km.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })}\u00a0km`);
  // The first of an order by which a share of all weight is held, and how many that takes.
  const SHARES = [.5, .9], SHAVE = 1e-9;
  const heldBy = (order, weight) => {
    const total = order.reduce((sum, k) => sum + weight[k], 0), counts = [];
    let held = 0;
    order.forEach((k, n) => {
      held += weight[k];
      while (counts.length < SHARES.length && held >= SHARES[counts.length] * total * (1 - SHAVE)) counts.push(n + 1);
    });
    return counts;
  };
  // Distances within which a half and nine tenths of all weight lie, in km.
  const within = (apart, weight) => {
    const order = [...apart.keys()].filter((k) => weight[k] > 0).sort((m, n) => apart[m] - apart[n]);
    return heldBy(order, weight).map((count) => apart[order[count - 1]]);
  };
  const hull = (points) => {
    const ordered = points.slice().sort((m, n) => m[0] - n[0] || m[1] - n[1]);
    const half = (list) => {
      const side = [];
      for (const [x, y] of list) {
        while (side.length > 1) {
          const [[a, b], [c, d]] = side.slice(-2);
          if ((c - a) * (y - b) - (d - b) * (x - a) > 0) break;
          side.pop();
        }
        side.push([x, y]);
      }
      return side.slice(0, -1);
    };
    const corners = [...half(ordered), ...half(ordered.slice().reverse())];
    return `M${(corners.length ? corners : ordered.slice(0, 1)).map((one) => one.join(" ")).join("L")}Z`;
  };
  // A close-up around a place of the map, with rings at two distances; returns its scale.
  const closeUp = (svg, world, middle, reach, rings) => {
    const scale = .86 * 180 / (Math.max(reach, data.least_km) * data.scale), unit = scale * data.scale;
    world.setAttribute("transform", `translate(${240 - scale * middle[0]} ${180 - scale * middle[1]}) scale(${scale})`);
    svg.querySelectorAll(".rings circle").forEach((ring, n) => ring.setAttribute("r", rings[n] * unit));
    svg.querySelectorAll(".rings text").forEach((label, n) => {
      label.setAttribute("y", 180 - rings[n] * unit - 5);
      label.textContent = inMetres(rings[n]);
    });
    const most = 120 / unit, power = 10 ** Math.floor(Math.log10(most));
    const bar = power * [5, 2, 1].find((step) => step * power <= most);
    svg.querySelectorAll(".near-bar path").forEach((path) => path.setAttribute("d", `M14 338v7h${bar * unit}v-7`));
    const label = svg.querySelector(".near-bar text");
    label.setAttribute("x", 22 + bar * unit);
    label.textContent = bar < 1 ? inMetres(bar) : `${bar} km`;
    return scale;
  };
  const say = (id, rings) => {
    const shown = byId(id).querySelectorAll("b");
    rings.forEach((km, n) => { shown[n].textContent = inMetres(km); });
  };
  const cell = (text, kind) => {
    const made = document.createElement(kind || "td");
    made.textContent = text;
    return made;
  };
  const bar = (share) => {
    const made = cell("");
    made.className = "bar";
    const svg = drawn("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    svg.append(drawn("rect", { width: 100 * share, height: 10, class: "own" }));
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
      dot.setAttribute("r", (data.largest * Math.max(Math.sqrt(values[k] / most), 1 / 30)).toFixed(2));
      dot.setAttribute("fill-opacity", (0.35 + 0.6 * values[k] / most).toFixed(2));
    });
    byId("from-place").setAttribute("transform", `translate(${data.x[a]} ${data.y[b]})`);
    const all = [...values.keys()].sort((m, n) => values[n] - values[m]), order = all.slice(0, 12);
    const near = byId("from-near"), known = values[order[0]] > 0;
    let words = "";
    if (near && known) {
      const apart = data.outputs_km.map(([x, y]) => Math.hypot(x - data.x_km[a], y - data.y_km[b]));
      const rings = within(apart, values), [half, most] = heldBy(all, values);
      const reach = Math.max(rings[1], ...all.slice(0, most).map((k) => apart[k]));
      const scale = closeUp(near, byId("from-world"), [data.x[a], data.y[b]], reach, rings);
      const radius = Math.max(Math.min(60 / Math.sqrt(most), 9), 2) / scale;
      near.querySelector(".area-half").setAttribute("d", hull(all.slice(0, half).map((k) => at[k])));
      near.querySelector(".area-most").setAttribute("d", hull(all.slice(0, most).map((k) => at[k])));
      byId("from-dots").replaceChildren(...all.slice(0, most).map((k, n) => drawn("circle",
        { class: n < half ? "in-half" : "in-most", cx: at[k][0], cy: at[k][1], r: radius })));
      say("from-words", rings);
      byId("from-words").querySelector("span").textContent = `${half.toLocaleString("en")} of ` +
        `${outputs.toLocaleString("en")} places hold half of the probability, ${most.toLocaleString("en")} nine tenths.`;
      words = ` ${byId("from-words").textContent}`;
    }
    for (const part of [near, byId("from-words")]) part && part.toggleAttribute("hidden", !known);
    byId("from-rows").replaceChildren(...order.filter((k) => values[k] > 0).map((k) => {
      const line = lineOf(`${k} at ${data.places[k]}`, values[k] / most, values[k]);
      line.dataset.output = String(k);
      return line;
    }));
    byId("from-where").textContent = place(a, b) + (inside[a * along + b] ? "" : " (outside the region)");
    map.dataset.record = `${a},${b}`;
    byId("from-said").textContent = known
      ? `Record at ${place(a, b)}: most likely report ${order[0]}, ${percent(values[order[0]])}.${words}`
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
    const near = byId("back-near"), known = total > 0 && x !== null;
    if (near && known) {
      const apart = Array.from(joint, (_, n) => Math.hypot(data.x_km[Math.floor(n / along)] - x, data.y_km[n % along] - y));
      const rings = within(apart, joint);
      closeUp(near, byId("back-world"), at[k], rings[1], rings);
      say("back-words", rings);
    }
    for (const part of [near, byId("back-words")]) part && part.toggleAttribute("hidden", !known);
    byId("back-place").setAttribute("transform", `translate(${at[k].join(" ")})`);
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
  // A close-up is a map as well: what is clicked there is where the world in it is.
  const inWorld = (id, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(byId(id).getScreenCTM().inverse());
  byId("from-near")?.addEventListener("click", (event) => {
    const point = inWorld("from-world", event);
    pick(nearest(data.x, point.x), nearest(data.y, point.y));
  });
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
  const pickOutput = (point) => {
    let least = Infinity;
    at.forEach(([x, y], k) => {
      const apart = Math.hypot(x - point.x, y - point.y);
      if (apart < least) { least = apart; picked.output = k; }
    });
    showOutput();
  };
  back.addEventListener("click", (event) => pickOutput(pointOf(back, event)));
  byId("back-near")?.addEventListener("click", (event) => pickOutput(inWorld("back-world", event)));
  choice.addEventListener("change", () => { picked.output = Number(choice.value); showOutput(); });

  map.setAttribute("tabindex", "0");
  map.setAttribute("role", "application");
  map.setAttribute("aria-describedby", "from-help");
  document.documentElement.classList.add("js");
  map.dataset.record = `${picked.a},${picked.b}`;
})();
