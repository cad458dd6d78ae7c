// Draws the charts in the colours of a light or a dark page, and makes the tables sort and filter.
"use strict";

// The palette of Okabe and Ito, with the darkest and the lightest colour exchanged on a dark page.
const THEMES = {
  light: {
    ink: "#1b1f24", soft: "#57606a", line: "#d8dee4", paper: "#ffffff", grey: "#8a939c",
    sky: "#56b4e9", orange: "#e69f00", green: "#009e73", purple: "#cc79a7", blue: "#0072b2", vermilion: "#d55e00",
  },
  dark: {
    ink: "#e8eaed", soft: "#a0a8b2", line: "#333a43", paper: "#14171c", grey: "#8a939c",
    sky: "#56b4e9", orange: "#e69f00", green: "#1fb890", purple: "#d98bb5", blue: "#4f9fd8", vermilion: "#f0803c",
  },
};

function coloured(value, theme) {
  if (typeof value === "string") {
    return value.startsWith("theme:") && value.slice(6) in theme ? theme[value.slice(6)] : value;
  }
  if (Array.isArray(value)) return value.map((item) => coloured(item, theme));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, theme)]));
  }
  return value;
}

function themedLayout(layout, theme) {
  const made = coloured(layout, theme);
  for (const name of Object.keys(made).filter((name) => /^[xy]axis\d*$/.test(name))) {
    const upright = name.startsWith("y");
    const plain = { exponentformat: "none", separatethousands: true };
    const lines = { gridcolor: theme.line, linecolor: theme.soft, zerolinecolor: theme.soft, tickcolor: theme.soft };
    made[name] = { showgrid: upright !== (layout.horizontal === true), zeroline: false, ...plain, ...lines, ...made[name] };
    if (made[name].title) made[name].title = { ...made[name].title, font: { size: 13 } };
  }
  delete made.horizontal;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    font: { color: theme.ink, size: 13, family: "system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" },
    hoverlabel: { bgcolor: theme.paper, bordercolor: theme.soft, font: { color: theme.ink }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.soft, activecolor: theme.ink },
    ...made,
  };
}

const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
const charts = JSON.parse(document.getElementById("charts").textContent);
const drawn = new Set();
const PAPER_PX = 960;

// The reader's choice by the button, else the preference of the system.
function isDark() {
  const chosen = document.documentElement.style.colorScheme;
  return chosen ? chosen === "dark" : systemDark.matches;
}

function draw(number) {
  if (drawn.has(number)) return;
  drawn.add(number);
  redraw(number, isDark() ? THEMES.dark : THEMES.light);
}

function redraw(number, theme, width) {
  const chart = charts[number];
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const options = { responsive: true, displaylogo: false, modeBarButtons: buttons };
  const layout = { ...themedLayout(chart.layout, theme), width, autosize: width === undefined };
  Plotly.react(`chart-${number}`, coloured(chart.data, theme), layout, options);
}

// Visible charts are drawn first and the others one by one, so that a page of hundreds of cells opens at once too.
// A folded chart is drawn when its fold opens, because its width is unknown before.
function drawAll() {
  const near = new IntersectionObserver((seen) => {
    seen.filter((entry) => entry.isIntersecting).forEach((entry) => draw(Number(entry.target.id.slice("chart-".length))));
  }, { rootMargin: "200px" });
  for (const element of document.querySelectorAll(".chart")) near.observe(element);
  const drawNext = () => {
    const next = charts.findIndex((_, number) => !drawn.has(number) && isOpen(number));
    if (next < 0) return;
    draw(next);
    setTimeout(drawNext);
  };
  setTimeout(drawNext, 100);
}

function isOpen(number) {
  return document.getElementById(`chart-${number}`).offsetParent !== null;
}

function redrawAll(theme, width) {
  if (!window.Plotly) return;
  drawn.clear();
  charts.forEach((_, number) => { if (isOpen(number)) { drawn.add(number); redraw(number, theme, width); } });
}

// The library is most of the page's bytes, so it runs after text and tables are shown.
function start() {
  if (window.Plotly) return;
  const script = document.createElement("script");
  script.textContent = document.getElementById("plotly").textContent;
  document.head.append(script);
  script.remove();
  drawAll();
}

function recolour() {
  redrawAll(isDark() ? THEMES.dark : THEMES.light);
}

if (charts.length) {
  window.addEventListener("load", () => setTimeout(start, 20));
  systemDark.addEventListener("change", recolour);
  window.addEventListener("beforeprint", () => { start(); redrawAll(THEMES.light, PAPER_PX); });
  window.addEventListener("afterprint", recolour);
}

const toggle = document.getElementById("theme");
toggle.hidden = false;
toggle.addEventListener("click", () => {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  recolour();
});

// A link in the contents opens the folds of its section.
function unfold() {
  const more = location.hash && document.querySelector(`${location.hash} > .more`);
  if (more) more.open = true;
}
window.addEventListener("hashchange", unfold);
unfold();

// [rank, value]: numbers by value, then words by alphabet; failed and missing values come last in both directions.
function sortKey(cell) {
  if (cell.querySelector(".failed, .failure") || ["", "–"].includes(cell.textContent.trim())) return [2, ""];
  return cell.dataset.sort === undefined ? [1, cell.textContent.trim()] : [0, Number(cell.dataset.sort)];
}

function compare(a, b, direction) {
  if (a[0] !== b[0]) return a[0] - b[0];
  return direction * (a[0] === 0 ? a[1] - b[1] : a[1].localeCompare(b[1], undefined, { numeric: true }));
}

function sortBy(header) {
  const body = header.closest("table").tBodies[0];
  const column = header.cellIndex;
  const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  const rows = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
  rows.sort((one, other) => compare(one[0], other[0], direction));
  body.append(...rows.map((pair) => pair[1]));
}

for (const header of document.querySelectorAll("th")) {
  header.querySelector("button").addEventListener("click", () => sortBy(header));
}

for (const input of document.querySelectorAll("input[type=search]")) {
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...input.closest(".table").querySelectorAll("tbody tr")];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
    const said = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    input.parentElement.querySelector("output").textContent = wanted.length ? said : "";
  });
}
