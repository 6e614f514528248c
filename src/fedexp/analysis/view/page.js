// The page of `fedexp view`. Text from the runs enters the document only as text nodes and attributes, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector) => document.querySelector(selector);
const SVG = "http://www.w3.org/2000/svg";

/** Creates an element. `on…` attributes are listeners, children are nodes or text. */
function make(name, attributes, ...children) {
  const vector = ["svg", "path", "line", "text", "g", "circle", "title", "rect"].includes(name);
  const node = vector ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// ---- state and selection

const state = { setting: 0, hidden: new Set(), left: "", right: "", seeds: "band", scale: "raw", view: "heat", seed: "mean" };
const words = (name) => name.replaceAll("_", " ");
const number = (value) => (value === null || value === undefined ? "–" : typeof value !== "number" ? String(value)
  : Number.isInteger(value) ? value.toLocaleString("en") : Math.abs(value) < 1000 ? String(+value.toPrecision(4))
  : Math.round(value).toLocaleString("en"));
const colour = (method) => `var(--c${method % 8})`;
const dashes = ["", "6 3", "2 3", "8 3 2 3"];
const dash = (method) => dashes[Math.floor(method / 8) % dashes.length];
const swatch = (method) => make("svg", { width: 18, height: 8, "aria-hidden": "true" }, stroke(make("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-width": 3 }), method));
const chip = (status, text) => make("span", { class: `chip ${status}` }, text ?? status);
const plural = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;

/** Styles a line. look: index of its colour and dashes; method: index of its method, by default equal to look. */
function stroke(node, look, method = look) {
  node.style.stroke = colour(look);
  node.dataset.method = method;
  node.setAttribute("stroke-dasharray", dash(look));
  return node;
}

const TOGETHER = ["all", "overlay"]; // values that select all settings: one panel each, or all in one panel
const several = () => TOGETHER.includes(state.setting);
const shownSettings = () => (several() ? data.settings.map((_, i) => i) : data.settings.length ? [state.setting] : []);
const common = data.settings.map((name) => name.split(" ")).reduce((all, given) => all.filter((word) => given.includes(word)), data.settings[0]?.split(" ") ?? []);
const shortSetting = (setting) => data.settings[setting].split(" ").filter((word) => !common.includes(word)).join(" ") || data.settings[setting];
/** Setting and method of each line of an overlay. The index is the line's look. */
const pairs = [...new Set(data.runs.filter((run) => run.setting !== null && run.method !== null).map((run) => `${run.setting} ${run.method}`))]
  .sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
const shownRuns = (setting) => data.runs.filter((run) => run.setting === setting && run.method !== null && !state.hidden.has(run.method));
const byMethod = (runs) => Map.groupBy ? Map.groupBy(runs, (run) => run.method)
  : runs.reduce((groups, run) => groups.set(run.method, [...(groups.get(run.method) ?? []), run]), new Map());
const sorted = (groups) => [...groups].sort((a, b) => a[0] - b[0]);

/** Draws a panel when it becomes visible, and again when its width changes. */
const pending = new Map();
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { sight.unobserve(entry.target); pending.get(entry.target)?.(); }
}, { rootMargin: "300px" });
function lazily(node, draw) {
  pending.set(node, draw);
  sight.observe(node);
  return node;
}

// ---- learning curves

/** Returns [round, mean, standard deviation, runs] of each round in which any run has a value. */
function average(runs, measure) {
  const found = new Map();
  for (const run of runs) {
    data.axes[run.axis].forEach((round, i) => {
      const value = run.curves[measure][i];
      if (value !== null) found.set(round, [...(found.get(round) ?? []), value]);
    });
  }
  return [...found].sort((a, b) => a[0] - b[0]).map(([round, values]) => {
    const mean = values.reduce((sum, v) => sum + v, 0) / values.length;
    const squares = values.reduce((sum, v) => sum + (v - mean) ** 2, 0);
    return [round, mean, values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0, values.length];
  });
}

/** Returns a chart's lines: one per method (mean of the runs that did not diverge) or one per run. An overlay has the
    lines of every setting. */
function linesOf(settings, measure) { return settings.flatMap((setting) => linesIn(setting, measure)); }

function linesIn(setting, measure) {
  const lines = [], overlaid = state.setting === "overlay";
  for (const [method, all] of sorted(byMethod(shownRuns(setting)))) {
    const look = overlaid ? pairs.indexOf(`${setting} ${method}`) : method;
    const called = !overlaid ? data.methods[method] : data.methods.length > 1 ? `${data.methods[method]} ${shortSetting(setting)}` : shortSetting(setting);
    const runs = all.filter((run) => run.curves?.[measure]);
    const sound = runs.filter((run) => run.status !== "diverged");
    const single = state.seeds === "lines" ? runs : runs.filter((run) => run.status === "diverged");
    if (state.seeds === "band" && sound.length) {
      lines.push({ method, look, name: called, points: average(sound, measure), runs: sound.length });
    }
    for (const run of single) {
      const name = `${called}, seed ${run.seed}${run.status === "completed" ? "" : `, ${run.status}`}`;
      lines.push({ method, look, name, points: average([run], measure), runs: 1, thin: true, broken: run.status === "diverged" });
    }
  }
  return lines.filter((line) => line.points.length);
}

/** Returns about `most` round numbers between low and high. */
function ticks(low, high, most) {
  const rough = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => +((first + i) * step).toPrecision(12));
}

function chart(settings, measure) {
  const holder = make("div", { class: "panel" });
  const named = state.setting === "overlay" ? "all settings" : data.settings[settings[0]] ?? "";
  const where = several() ? make("span", { class: "where" }, ` ${named}`) : null;
  const head = make("div", { class: "head" }, make("h3", {}, words(measure), where));
  holder.append(head);
  const lines = linesOf(settings, measure);
  if (!lines.length) {
    holder.append(make("p", { class: "note" }, "No run shown here has this measure."));
    return holder;
  }
  const texts = lines.map((line) => `${line.name} ${number(line.points.at(-1)[1])} in round ${line.points.at(-1)[0]}`);
  const svg = make("svg", { class: "chart", role: "img", tabindex: 0, "aria-label": `${words(measure)}: ${texts.join("; ")}. Use the arrow keys to read the rounds.` });
  holder.append(svg);
  if (state.setting === "overlay") holder.append(make("div", { class: "legend" }, lines.map((line) => make("span", {}, swatch(line.look), line.name))));
  const draw = () => drawChart(svg, settings, measure, lines);
  head.append(exportButtons(svg, measure, named, lines, draw));
  return lazily(holder, draw);
}

function drawChart(svg, settings, measure, lines) {
  const width = svg.clientWidth, height = svg.clientHeight, left = 62, right = 16, top = 8, bottom = 38;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`); // the size on paper differs
  const points = lines.flatMap((line) => line.points);
  const rounds = [...new Set(points.map((p) => p[0]))].sort((a, b) => a - b);
  const values = points.flatMap((p) => [p[1] - p[2], p[1] + p[2]]);
  let low = Math.min(...minmax(values)), high = Math.max(...minmax(values));
  const logarithmic = measure.endsWith("loss") && low > 0 && high > 50 * low;
  if (measure.endsWith("accuracy")) [low, high] = [0, Math.min(1, high * 1.05)];
  const pad = (high - low) * 0.03 || 0.5;
  if (!measure.endsWith("accuracy")) [low, high] = [low - (logarithmic ? 0 : pad), high + (logarithmic ? 0 : pad)];
  const scaled = logarithmic ? Math.log10 : (v) => v;
  const [first, last] = [rounds[0], rounds.at(-1)];
  const x = (round) => left + ((round - first) / (last - first || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((scaled(value) - scaled(low)) / (scaled(high) - scaled(low) || 1)) * (height - top - bottom);
  const marks = logarithmic ? ticks(scaled(low), scaled(high), 5).map((t) => 10 ** t) : ticks(low, high, 6);
  svg.replaceChildren(
    ...marks.map((v) => make("g", {}, make("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      make("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, number(v)))),
    ...ticks(first, last, Math.max(2, width / 90)).filter(Number.isInteger).map((r) => make("text", { x: x(r), y: height - bottom + 15, "text-anchor": "middle" }, number(r))),
    make("text", { class: "axis", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, "round"),
    make("text", { class: "axis", transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, words(measure)),
    ...taskEnds(settings[0]).map((r) => make("line", { class: "cross", x1: x(r + 0.5), x2: x(r + 0.5), y1: top, y2: height - bottom })),
  );
  const path = (list) => list.map(([r, v], i) => `${i ? "L" : "M"}${x(r).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  for (const line of lines) {
    if (!line.thin && line.points.some((p) => p[2])) {
      const edge = [...line.points.map((p) => [p[0], p[1] + p[2]]), ...line.points.toReversed().map((p) => [p[0], Math.max(p[1] - p[2], logarithmic ? low : -Infinity)])];
      const area = make("path", { class: "area", d: `${path(edge)}Z` });
      area.style.fill = colour(line.look);
      area.dataset.method = line.method;
      svg.append(area);
    }
  }
  for (const line of lines) {
    svg.append(stroke(make("path", { class: line.thin ? "thin" : null, d: path(line.points) }), line.look, line.method));
    const [r, v] = line.points.at(-1);
    if (line.broken) svg.append(stroke(make("path", { d: `M${x(r) - 4} ${y(v) - 4}l8 8m0-8l-8 8` }), line.look, line.method));
    else if (line.points.length === 1) svg.append(dot(x(r), y(v), line.look));
  }
  const cross = make("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cross);
  let at = -1;
  const show = (index, px, py) => {
    at = Math.max(0, Math.min(rounds.length - 1, index));
    const round = rounds[at], box = svg.getBoundingClientRect();
    for (const [key, value] of Object.entries({ x1: x(round), x2: x(round), visibility: "visible" })) cross.setAttribute(key, value);
    const here = lines.map((line) => [line, line.points.find((p) => p[0] === round)]).filter(([, p]) => p).sort((a, b) => b[1][1] - a[1][1]);
    tip(px ?? box.left + x(round), py ?? box.top + top, `round ${number(round)}`, here.slice(0, 14).map(([line, p]) =>
      make("div", {}, swatch(line.look), line.name, make("b", {}, `${number(p[1])}${p[3] > 1 ? ` ± ${number(+p[2].toPrecision(2))}` : ""}`))),
      here.length > 14 ? `and ${here.length - 14} more` : null);
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); $("#tip").hidden = true; };
  svg.onpointermove = (event) => {
    const round = first + ((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right)) * (last - first);
    const nearest = rounds.reduce((best, r, i) => (Math.abs(r - round) < Math.abs(rounds[best] - round) ? i : best), 0);
    show(nearest, event.clientX, event.clientY);
  };
  svg.onpointerleave = svg.onblur = hide;
  svg.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    show(at < 0 ? (step < 0 ? rounds.length - 1 : 0) : at + step);
  };
}

function dot(cx, cy, method) {
  const node = make("circle", { cx, cy, r: 3.5 });
  node.style.fill = colour(method);
  return node;
}

/** Returns [smallest, largest]. Math.min(...values) would overflow the stack for long lists. */
function minmax(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

const taskEnds = (setting) => shownRuns(setting).find((run) => run.tasks?.length)?.tasks ?? [];

function tip(x, y, title, ...children) {
  const node = $("#tip");
  node.replaceChildren(make("strong", {}, title), ...children.flat().filter(Boolean));
  node.hidden = false;
  node.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - node.offsetWidth - 6))}px`;
  node.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - node.offsetHeight - 6))}px`;
}

function drawCurves() {
  const groups = state.setting === "overlay" ? [shownSettings()] : shownSettings().map((setting) => [setting]);
  const panels = groups.flatMap((settings) => [...new Set([state.left, state.right])].filter(Boolean).map((measure) => chart(settings, measure)));
  $("#curves .charts").replaceChildren(...panels);
  const runs = shownSettings().flatMap(shownRuns);
  const thinned = Math.max(1, ...runs.map((run) => run.every ?? 1));
  $("#curves-note").textContent = [
    state.seeds === "band" ? "Mean over seeds, in a band of one standard deviation. The mean leaves out runs that diverged; they end with a cross." : "One line per run. Runs that diverged end with a cross.",
    thinned > 1 ? `Long curves show at most one in ${thinned} evaluated rounds; rounds.csv has all rounds.` : "",
    runs.some((run) => ["running", "unfinished"].includes(run.status)) ? "Unfinished runs are shown up to their last round." : "",
    runs.some((run) => run.tasks?.length) ? "Vertical lines mark the start of a task." : "",
  ].filter(Boolean).join(" ");
}

// ---- heat maps

const STOPS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"]
  .map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const VIRIDIS = Array.from({ length: 256 }, (_, i) => {
  const place = (i / 255) * (STOPS.length - 1), below = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[below].map((c, k) => Math.round(c + (STOPS[below + 1][k] - c) * (place - below)));
});

/** Returns axis, classes and data for the chosen view of the test set; undefined if the run lacks it. */
function heatOf(run) { return run[state.view]; }

/** Returns a run's class accuracies, rounds x classes, as one Float32Array. Undefined values are NaN. */
function matrixOf(run) {
  const raw = atob(heatOf(run).data);
  return Float32Array.from(raw, (c) => (c.charCodeAt(0) === 255 ? NaN : c.charCodeAt(0) / data.levels));
}

/** Returns the class accuracies, averaged over runs. The scale `normalised` divides each round by its sum over classes. */
function mapOf(runs, classes) {
  const total = matrixOf(runs[0]);
  for (const run of runs.slice(1)) matrixOf(run).forEach((value, i) => { total[i] += value; });
  const values = total.map((value) => value / runs.length);
  if (state.scale === "normalised") {
    for (let start = 0; start < values.length; start += classes) {
      const row = values.subarray(start, start + classes);
      const sum = row.reduce((all, value) => all + (value || 0), 0);
      if (sum > 0) row.forEach((value, i) => { row[i] = value / sum; });
    }
  }
  return values;
}

function heatCards(setting) {
  const cards = [];
  for (const [method, all] of sorted(byMethod(shownRuns(setting)))) {
    const chosen = all.filter((run) => state.seed === "mean" || state.seed === "each" || String(run.seed) === state.seed);
    const groups = state.seed === "mean" ? [chosen.filter((run) => run.status !== "diverged")] : chosen.map((run) => [run]);
    for (const group of groups) cards.push(heatCard(setting, method, group, chosen));
  }
  return cards;
}

function heatCard(setting, method, group, chosen) {
  const first = group.find((run) => heatOf(run));
  const runs = first ? group.filter((run) => heatOf(run) && heatOf(run).axis === heatOf(first).axis && heatOf(run).classes === heatOf(first).classes) : [];
  const where = several() ? ` ${data.settings[setting]}` : "";
  const seeds = runs.length > 1 ? `mean of ${runs.length} seeds` : runs.length ? `seed ${runs[0].seed}` : "";
  const holder = make("div", { class: "panel" }, make("h3", {}, data.methods[method], make("span", { class: "where" }, ` ${seeds}${where}`)));
  for (const status of new Set(chosen.map((run) => run.status).filter((status) => status !== "completed"))) {
    holder.append(make("p", { class: "note" }, chip(status), ` ${plural(chosen.filter((run) => run.status === status).length, "run")}`));
  }
  if (!runs.length) {
    holder.append(make("p", { class: "note" }, "No class accuracies: class_accuracy.csv is missing or damaged, or all runs diverged."));
    return holder;
  }
  if (runs.length < group.length) holder.append(make("p", { class: "note" }, `${group.length - runs.length} of ${group.length} runs are left out, because their rounds or classes differ or their file is missing.`));
  const classes = data.classes[heatOf(first).classes];
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": `Class accuracy of ${data.methods[method]}, ${seeds}: ${classes.length} classes, ${data.axes[heatOf(first).axis].length} rounds. Use the arrow keys to read the cells.` });
  canvas.style.height = `${Math.max(70, Math.min(17 * classes.length, 340)) + 36}px`;
  holder.append(canvas);
  return lazily(holder, () => drawMap(canvas, mapOf(runs, classes.length), data.axes[heatOf(first).axis], classes));
}

function drawMap(canvas, values, rounds, classes) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1, style = getComputedStyle(canvas);
  const named = classes.length <= 20, left = named ? 94 : 50, bottom = 36, columns = rounds.length, rows = classes.length;
  const top = state.scale === "raw" ? 1 : Math.min(1, 3 / rows);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const image = new ImageData(columns, rows);
  values.forEach((value, i) => {
    const place = ((i % rows) * columns + Math.floor(i / rows)) * 4;
    const rgb = Number.isNaN(value) ? [150, 150, 150] : VIRIDIS[Math.round(Math.min(value / top, 1) * 255)];
    image.data.set([...rgb, 255], place);
  });
  const small = make("canvas", { width: columns, height: rows });
  small.getContext("2d").putImageData(image, 0, 0);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, left, 0, width - left, height - bottom);
  pen.fillStyle = printing ? "#5b636d" : style.getPropertyValue("--soft");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const cell = { x: (width - left) / columns, y: (height - bottom) / rows };
  const every = named ? 1 : Math.ceil(rows / 10);
  for (let c = 0; c < rows; c += every) pen.fillText(named ? fitted(pen, classes[c], left - 26) : String(c), left - 6, (c + 0.5) * cell.y);
  pen.textAlign = "center";
  for (const round of ticks(rounds[0], rounds.at(-1), Math.max(2, width / 70))) {
    const i = rounds.indexOf(round); // a round that was not evaluated, or that is left out, has no column
    if (i >= 0) pen.fillText(String(round), Math.min(left + (i + 0.5) * cell.x, width - 10), height - bottom + 10);
  }
  pen.fillText("round", (left + width) / 2, height - 8);
  pen.save();
  pen.translate(8, (height - bottom) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("class", 0, 0);
  pen.restore();
  let at = [0, 0];
  const show = (i, c, px, py) => {
    at = [Math.max(0, Math.min(columns - 1, i)), Math.max(0, Math.min(rows - 1, c))];
    const box = canvas.getBoundingClientRect(), value = values[at[0] * rows + at[1]];
    tip(px ?? box.left + left + (at[0] + 0.5) * cell.x, py ?? box.top + (at[1] + 0.5) * cell.y, `${classes[at[1]]}, round ${rounds[at[0]]}`,
      make("div", {}, Number.isNaN(value) ? "undefined: not in the test set" : state.scale === "raw" ? `accuracy ${value.toFixed(2)}` : `share ${value.toFixed(3)}`));
  };
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left - left, py = event.clientY - box.top;
    if (px < 0 || py > height - bottom) $("#tip").hidden = true;
    else show(Math.floor(px / cell.x), Math.floor(py / cell.y), event.clientX, event.clientY);
  };
  canvas.onpointerleave = canvas.onblur = () => { $("#tip").hidden = true; };
  canvas.onkeydown = (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    show(at[0] + move[0], at[1] + move[1]);
  };
}

function fitted(pen, text, width) {
  let cut = text;
  while (cut.length > 1 && pen.measureText(cut).width > width) cut = `${cut.replace(/…$/, "").slice(0, -1)}…`;
  return cut;
}

function drawMaps() {
  $("#heat .maps").replaceChildren(...shownSettings().flatMap(heatCards));
  const heats = shownSettings().flatMap(shownRuns).map((run) => heatOf(run)).filter(Boolean);
  const thinned = Math.max(1, ...heats.map((heat) => heat.every));
  const most = Math.max(0, ...heats.map((heat) => data.classes[heat.classes].length));
  const end = state.scale === "raw" ? "1" : `${number(Math.min(1, 3 / most))}${most > 3 ? " or more" : ""}`;
  $("#heat-note").replaceChildren(
    make("span", { class: "scale" }, "0", make("i", {}), `${end}: ${state.scale === "raw" ? "test accuracy of the class" : `its share of the round's summed accuracy (uniform: ${number(1 / (most || 1))})`}; grey: undefined`),
    `One row per class, one column per evaluated round. Values are rounded to ${1 / data.levels}.${thinned > 1 ? ` Long runs show at most one in ${thinned} evaluated rounds; class_accuracy.csv has all rounds.` : ""}`);
}

// ---- tables

/** Creates a table with sortable columns. rows: arrays of cells { text, node?, value?, class? }. */
function table(columns, rows, { head = 1, onpick } = {}) {
  const body = make("tbody", {});
  let order = null, down = false;
  const fill = () => body.replaceChildren(...rows.map((row) => row.line));
  for (const row of rows) {
    row.line = make("tr", onpick ? { class: "picked", onclick: () => onpick(row) } : {}, row.cells.map((cell, i) => {
      const node = make(i < head ? "th" : "td", { class: cell.class, scope: i < head ? "row" : null }, cell.node ?? cell.text);
      if (cell.part !== undefined) node.style.setProperty("--part", `${(100 * cell.part).toFixed(1)}%`);
      return node;
    }));
  }
  const sort = (i, button) => {
    down = order === i ? !down : typeof (rows.find((row) => row.cells[i].value !== null)?.cells[i].value) === "number";
    order = i;
    const key = (row) => row.cells[i].value ?? row.cells[i].text;
    rows.sort((a, b) => {
      const [p, q] = [key(a), key(b)], numbers = typeof p === "number" && typeof q === "number";
      if (typeof p !== typeof q) return typeof p === "number" ? -1 : 1; // values that are not numbers come last
      return (numbers ? p - q : String(p).localeCompare(String(q), "en", { numeric: true })) * (down ? -1 : 1);
    });
    for (const other of button.closest("tr").children) other.removeAttribute("aria-sort");
    button.parentNode.setAttribute("aria-sort", down ? "descending" : "ascending");
    fill();
  };
  fill();
  return make("table", {}, make("thead", {}, make("tr", {}, columns.map((name, i) =>
    make("th", { scope: "col", class: rows[0]?.cells[i].class }, make("button", { type: "button", onclick: (event) => sort(i, event.currentTarget) }, name))))), body);
}

/** Wraps a table so that it scrolls horizontally, and marks it while columns are hidden on the right. */
function scrolling(label, child) {
  const node = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, child);
  const hint = make("p", { class: "note hint", "aria-hidden": "true" }, "more columns →");
  const update = () => {
    const more = node.scrollLeft + node.clientWidth < node.scrollWidth - 1;
    node.classList.toggle("more", more);
    hint.hidden = !more;
  };
  node.addEventListener("scroll", update);
  new ResizeObserver(update).observe(node);
  const both = new DocumentFragment();
  both.append(hint, node);
  return both;
}

/** Returns a column's cells, each with a number and a bar. The largest number has the longest bar. */
function numberCells(values, spreads = []) {
  const numbers = values.filter((v) => typeof v === "number"), largest = Math.max(...numbers, 0);
  const fractions = numbers.some((v) => !Number.isInteger(v)) && numbers.every((v) => Math.abs(v) < 10);
  const text = (v) => (fractions && typeof v === "number" ? v.toFixed(4) : number(v));
  return values.map((value, i) => ({ text: typeof spreads[i] === "number" ? `${text(value)} ± ${text(spreads[i])}` : text(value), value: value ?? null, class: "number", part: typeof value === "number" && largest > 0 ? Math.max(0, value / largest) * 0.999 : 0 }));
}

const COUNTS = ["n", "diverged", "pruned"];

/** Builds a table from the result of `collect.encode_table`. `<name>_std` is shown in the same cell as `<name>`. */
function framed(frame, label) {
  const column = (name) => frame.rows.map((row) => row[frame.columns.indexOf(name)]);
  const shown = frame.columns.filter((name) => !name.endsWith("_std"));
  const cells = shown.map((name) => {
    const values = column(name);
    if (values.some((value) => typeof value === "string")) return values.map((text) => ({ text, class: "long" }));
    if (COUNTS.includes(name)) return values.map((v) => ({ text: number(v), value: v, class: "number" }));
    const cells = numberCells(values, frame.columns.includes(`${name}_std`) ? column(`${name}_std`) : []);
    for (const row of frame.best?.[name] ?? []) cells[row].class = "number best";
    return cells;
  });
  return scrolling(label, table(shown.map(words), frame.rows.map((_, i) => ({ cells: cells.map((c) => c[i]) }))));
}

function printedCell(entries) {
  return make("td", {}, entries.map((entry) => {
    const kind = { within: "within", "failed as printed": "within", "not reached as printed": "within", outside: "outside" }[entry.verdict] ?? "";
    const mark = { within: "✓ ", outside: "✗ " }[kind] ?? "";
    const about = `${words(entry.metric)}, ${entry.unit}: ${entry.verdict}; ${entry.n ? plural(entry.n, "run") : "no run"}${entry.diverged ? `, ${entry.diverged} diverged` : ""}${entry.note ? `; note: ${entry.note}` : ""}`;
    const ours = entry.n ? make("b", { class: kind }, mark + entry.ours) : make("span", { class: "note" }, "–");
    const label = entries.length > 1 ? make("small", {}, words(entry.metric)) : null;
    return make("div", { class: "cell", title: about }, label, ours, make("small", {}, `[${entry.printed}]`));
  }));
}

function printedTable(item) {
  const heads = make("tr", {}, ["", ...item.columns].map((name) => make("th", { scope: "col" }, name)));
  const rows = Object.entries(item.cells).map(([method, cells]) => make("tr", {}, make("th", { scope: "row" }, method), item.columns.map((name) => printedCell(cells[name] ?? []))));
  return scrolling(item.title, make("table", {}, make("thead", {}, heads), make("tbody", {}, rows)));
}

function aboutMeans(frame) {
  const has = (name) => frame.columns.includes(name);
  return [
    frame.columns.some((name) => name.endsWith("_std")) ? "Mean ± standard deviation over n seeds, last round" : "Last round",
    Object.values(frame.best).some((rows) => rows.length) ? "the best value of each column in bold" : "",
    has("diverged") ? "runs that diverged are counted but not in the means" : "",
    has("pruned") ? "pruned: stopped by the search before the last round, and never the best" : "",
  ].filter(Boolean).join("; ") + ".";
}

function drawTables() {
  for (const item of data.tables) {
    if (data.tables.length > 1 || item.cells) $("#results").append(make("h3", {}, item.title));
    if (item.cells) {
      $("#results").append(make("p", { class: "note" }, `Our value ± standard deviation over seeds [published value]; ✓ within the tolerance, ✗ outside. ${item.caption}`), printedTable(item));
    } else {
      $("#results").append(make("p", { class: "note" }, aboutMeans(item.means)), framed(item.means, "Means over seeds"));
    }
    if (data.tables.length > 1) $("#targets").append(make("h3", {}, item.title));
    $("#targets").append(make("p", { class: "note" }, "Rounds to 0.75, 0.9 and 1 times A, averaged over seeds. A is 0.95 times the best accuracy of any run of the setting. Speed-ups are relative to FedAvg. A dash means that at least one seed never reached the target."), framed(item.targets, "Rounds to target"));
  }
  if (!data.tables.length) for (const id of ["#results", "#targets"]) $(id).append(make("p", { class: "note" }, "There are no finished runs that can be read."));
}

// ---- runs and their configuration

const differing = data.keys.filter((key) => key.of);
const valueOf = (key, i) => (key.of ? (key.of[i] < 0 ? null : key.values[key.of[i]]) : key.values[0]);
const searchable = data.runs.map((run, i) => [run.name, run.status, data.methods[run.method], data.settings[run.setting], `seed=${run.seed}`, run.command,
  ...run.problems, ...differing.map((key) => `${key.key}=${valueOf(key, i)}`)].join("\n").toLowerCase());

function drawRuns() {
  const column = (name) => numberCells(data.runs.map((run) => run.summary[name]));
  const names = { accuracy: "accuracy", best_accuracy: "best", validation_accuracy: "validation", personal_accuracy: "personal", forgetting: "forgetting", rounds: "rounds", seconds: "seconds" };
  for (const name of Object.keys(names)) if (!data.runs.some((run) => name in run.summary)) delete names[name];
  const numbers = Object.keys(names).map(column);
  const rows = data.runs.map((run, i) => ({ index: i, cells: [
    { text: run.name, class: "long", node: make("button", { type: "button", class: "link", onclick: (event) => { event.stopPropagation(); details(i); } }, run.name) },
    { text: run.status, node: [chip(run.status), run.problems.length ? make("span", { class: "chip failed", title: run.problems.join("\n") }, plural(run.problems.length, "file problem")) : null].filter(Boolean) },
    { text: data.methods[run.method] ?? "–" }, { text: data.settings[run.setting] ?? "–", class: "long" },
    { text: number(run.seed), value: typeof run.seed === "number" ? run.seed : null }, ...numbers.map((cells) => cells[i]),
  ] }));
  const list = table(["run", "status", "method", "setting", "seed", ...Object.values(names)], rows, { onpick: (row) => details(row.index) });
  $("#runs .list").replaceChildren(scrolling("Runs", list));
  const filter = () => {
    const wanted = $("#find").value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      row.line.hidden = !wanted.every((word) => searchable[row.index].includes(word));
      count += !row.line.hidden;
    }
    $("#found").textContent = count === rows.length ? plural(count, "run") : `${count} of ${plural(rows.length, "run")}`;
  };
  $("#find").addEventListener("input", filter);
  filter();
}

function drawConfiguration() {
  const line = (key) => make("div", { class: `key${key.of ? "" : " same"}` }, make("code", {}, key.key), make("div", {}, key.of
    ? key.values.map((value, v) => make("button", { type: "button", onclick: () => find(`${key.key}=${value}`) }, `${value} `, make("small", {}, `×${key.of.filter((of) => of === v).length}`)))
    : make("code", {}, key.values[0])));
  const lines = data.keys.map(line), same = lines.slice(differing.length);
  const rest = make("details", {}, make("summary", {}, `The same in all runs: ${plural(same.length, "key")}`), same);
  $("#configuration .keys").replaceChildren(...lines.slice(0, differing.length), same.length ? rest : "");
  $("#find-key").addEventListener("input", () => {
    const wanted = $("#find-key").value.toLowerCase();
    rest.open = wanted !== "" || !differing.length;
    lines.forEach((node, i) => { node.hidden = !`${data.keys[i].key}=${data.keys[i].values.join(" ")}`.toLowerCase().includes(wanted); });
  });
  if (!lines.length) $("#configuration .keys").append(make("p", { class: "note" }, "No run has a config.yaml that can be read."));
}

function find(text) {
  $("#find").value = text.toLowerCase();
  $("#find").dispatchEvent(new Event("input"));
  $("#runs").scrollIntoView();
}

function details(i) {
  const run = data.runs[i], dialog = $("#details");
  const line = (key) => make("div", { class: `key${key.of ? "" : " same"}` }, make("code", {}, key.key), make("code", {}, valueOf(key, i)));
  const keys = data.keys.filter((key) => valueOf(key, i) !== null).map(line);
  const search = make("input", { type: "search", placeholder: "local.", oninput: () => keys.forEach((node) => { node.hidden = !node.textContent.toLowerCase().includes(search.value.toLowerCase()); }) });
  const flat = Object.entries(run.summary).flatMap(([name, value]) => (value && typeof value === "object" ? Object.entries(value).map(([k, v]) => [`${words(name)} ${k}`, v]) : [[words(name), value]]));
  const result = (wanted) => make("div", { class: "keys" }, flat.filter(([name]) => /^(versions|hardware|commit)/.test(name) !== wanted)
    .map(([name, value]) => make("div", { class: "key" }, make("span", {}, name), make("span", {}, number(value)))));
  dialog.replaceChildren(
    make("div", { class: "head" }, make("h2", {}, run.name), chip(run.status), make("button", { type: "button", onclick: () => dialog.close() }, "Close")),
    ...run.problems.map((problem) => make("p", { class: "chip failed" }, problem)),
    run.error ? make("pre", {}, run.error) : "",
    run.command ? make("pre", {}, run.command) : "",
    make("h3", {}, "Result"), result(true),
    make("div", { class: "head" }, make("h3", {}, "Configuration; differing options first"), make("label", {}, "Find ", search)), make("div", { class: "keys" }, keys),
    make("h3", {}, "Software and hardware"), result(false),
  );
  dialog.showModal();
}

// ---- controls

function option(value, text) { return make("option", { value }, text ?? words(value)); }

/** Stores the state in the address, so that a view can be bookmarked and shared. */
function remember() {
  const hidden = [...state.hidden].join(".");
  const entries = { setting: state.setting, left: state.left, right: state.right, seeds: state.seeds, scale: state.scale, seed: state.seed, ...(state.view !== "heat" && { view: state.view }), ...(hidden && { hidden }) };
  history.replaceState(null, "", `#${new URLSearchParams(entries)}`);
}

function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const id of ["setting", "left", "right", "seeds", "scale", "view", "seed"]) {
    const select = $(`#${id}`);
    if (given.has(id) && [...select.options].some((o) => o.value === given.get(id))) select.value = given.get(id);
    state[id] = select.value;
  }
  for (const method of (given.get("hidden") ?? "").split(".")) if (data.methods[method]) state.hidden.add(Number(method));
  if (!several()) state.setting = Number(state.setting);
}

/** Fades the lines of all other methods. Without a method, no line is faded. */
function single(method) {
  for (const node of document.querySelectorAll("#curves path")) node.classList.toggle("faded", method !== undefined && node.dataset.method !== String(method));
}

function drawMethods() {
  const toggle = (i) => { if (!state.hidden.delete(i)) state.hidden.add(i); };
  const set = (chosen) => { state.hidden = new Set(chosen); show(); changed(); };
  const buttons = data.methods.map((name, i) => make("button", {
    type: "button", onclick: () => { toggle(i); show(); changed(); }, onpointerenter: () => single(i), onpointerleave: () => single(), onfocus: () => single(i), onblur: () => single(),
  }, swatch(i), name));
  const show = () => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(!state.hidden.has(i))));
  show();
  const several = [["all", () => set([])], ["none", () => set(data.methods.keys())]].map(([name, onclick]) => make("button", { type: "button", onclick }, name));
  $("#methods").replaceChildren(...buttons, ...(buttons.length > 3 ? several : []));
}

function changed() {
  remember();
  sight.disconnect();
  pending.clear();
  drawCurves();
  drawMaps();
}

function begin() {
  const rank = (status) => ["completed", "stopped", "pruned", "running", "unfinished", "diverged", "failed", "damaged"].indexOf(status);
  const counts = [...data.runs.reduce((all, run) => all.set(run.status, (all.get(run.status) ?? 0) + 1), new Map())].sort((a, b) => rank(a[0]) - rank(b[0]));
  $("#about").textContent = `${plural(data.runs.length, "run")}, ${plural(data.methods.length, "method")}, ${plural(data.settings.length, "setting")}; created ${data.made.slice(0, 16).replace("T", " ")} by fedexp ${data.version}.`;
  $("#statuses").append(...counts.map(([status, count]) => make("button", { type: "button", class: status, onclick: () => find(status) }, `${count} ${status}`)));
  $("#setting").append(...data.settings.map((name, i) => option(i, name)), ...(data.settings.length > 1 ? [option("all", "all settings"), option("overlay", "all settings, overlaid")] : []));
  for (const id of ["left", "right"]) $(`#${id}`).append(...data.measures.map((name) => option(name)));
  $("#right").value = data.measures[1] ?? data.measures[0] ?? "";
  const seeds = [...new Set(data.runs.map((run) => run.seed).filter((seed) => seed !== null))].sort((a, b) => a - b);
  $("#view").parentElement.hidden = !data.runs.some((run) => run.heat_augmented);
  $("#seed").append(option("mean", "mean"), option("each", "each"), ...seeds.map((seed) => option(seed, String(seed))));
  recall();
  drawMethods();
  drawTables();
  drawRuns();
  drawConfiguration();
  changed();
  for (const id of ["setting", "left", "right", "seeds", "scale", "view", "seed"]) {
    $(`#${id}`).addEventListener("change", (event) => {
      state[id] = id === "setting" && !TOGETHER.includes(event.target.value) ? Number(event.target.value) : event.target.value;
      changed();
    });
  }
  const clear = () => document.documentElement.style.setProperty("--bar", `${getComputedStyle($(".bar")).position === "sticky" ? $(".bar").offsetHeight + 8 : 8}px`);
  clear();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clear(); changed(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => changed());
}

begin();
