// Export of the page: a chart as a picture (SVG) or as numbers (CSV), and printing.
"use strict";

/** Downloads a text as a file. No network request is made. */
function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const fileName = (...parts) => `${parts.join("_").replaceAll(/[^A-Za-z0-9.=-]+/g, "_").slice(0, 100)}`;

/** Formats a CSV cell. A quote mark keeps spreadsheets from reading a text as a formula. */
function csvCell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Returns the lines' points as a tidy table with one row per line and round. */
function csvOf(measure, lines) {
  const rows = lines.flatMap((line) => line.points.map(([round, mean, spread, runs]) => [line.name, round, mean, runs > 1 ? spread : "", runs]));
  return [["line", "round", measure, "std", "runs"], ...rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
}

const PAINTED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size", "font-family"];

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Returns a chart as an independent SVG file with the page's styles, a title and a legend. */
function svgOf(svg, title, lines) {
  const copy = svg.cloneNode(true), originals = [...svg.querySelectorAll("*")], clones = [...copy.querySelectorAll("*")];
  originals.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of PAINTED) clones[i].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style", "data-method"]) clones[i].removeAttribute(name);
  });
  for (const hidden of copy.querySelectorAll("[visibility=hidden]")) hidden.remove();
  const width = svg.clientWidth, height = svg.clientHeight, line = 16, top = 24, ink = getComputedStyle(svg).color;
  const text = (x, y, words) => make("text", { x, y, fill: ink, "font-size": 12, "font-family": "sans-serif" }, words);
  const legend = lines.map((each, i) => make("g", { transform: `translate(44 ${top + height + 8 + i * line})` },
    make("line", { x2: 20, y1: -4, y2: -4, stroke: variable(`--c${each.look % 8}`), "stroke-width": 2, "stroke-dasharray": dash(each.look) }),
    text(26, 0, each.name)));
  const whole = height + top + 12 + lines.length * line;
  return new XMLSerializer().serializeToString(make("svg", { width, height: whole, viewBox: `0 0 ${width} ${whole}` },
    make("title", {}, title), make("rect", { width, height: whole, fill: variable("--card") }), text(44, 16, title), make("g", { transform: `translate(0 ${top})` }, [...copy.childNodes]), legend));
}

/** Returns a chart's export buttons. draw: draws the chart if it has not been visible yet. */
function exportButtons(svg, measure, where, lines, draw) {
  const name = fileName(where, measure);
  const button = (text, onclick) => make("button", { type: "button", onclick, title: `Save this chart as ${text}` }, text);
  return make("span", { class: "export" },
    button("SVG", () => { draw(); download(`${name}.svg`, "image/svg+xml", svgOf(svg, `${words(measure)} ${where}`, lines)); }),
    button("CSV", () => download(`${name}.csv`, "text/csv", csvOf(measure, lines))));
}

// ---- printing, including charts that have not been visible yet and folded sections

let printing = false;
function drawAll() { for (const draw of pending.values()) draw(); }
addEventListener("beforeprint", () => {
  printing = true;
  for (const folded of document.querySelectorAll("main details:not([open])")) { folded.open = true; folded.dataset.folded = ""; }
  drawAll();
});
addEventListener("afterprint", () => {
  printing = false;
  for (const folded of document.querySelectorAll("main details[data-folded]")) { folded.open = false; delete folded.dataset.folded; }
  drawAll();
});
