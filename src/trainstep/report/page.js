"use strict";
// Draws the charts in the colours of a light or a dark page, and makes the tables sort and filter.

// The palette of Okabe and Ito, its darkest and its lightest exchanged where the paper is dark.
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

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const charts = JSON.parse(document.getElementById("charts").textContent);

const drawn = new Set();

function draw(number) {
  if (drawn.has(number)) return;
  drawn.add(number);
  redraw(number, dark.matches ? THEMES.dark : THEMES.light);
}

function redraw(number, theme) {
  const chart = charts[number];
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const options = { responsive: true, displaylogo: false, modeBarButtons: buttons };
  Plotly.react(`chart-${number}`, coloured(chart.data, theme), themedLayout(chart.layout, theme), options);
}

// What is in sight is drawn at once, the rest one by one while the reader reads: a page of hundreds of cells opens at once too.
function drawAll() {
  const near = new IntersectionObserver((seen) => {
    seen.filter((entry) => entry.isIntersecting).forEach((entry) => draw(Number(entry.target.id.slice("chart-".length))));
  }, { rootMargin: "400px" });
  for (const element of document.querySelectorAll(".chart")) near.observe(element);
  const drawNext = () => {
    const next = charts.findIndex((_, number) => !drawn.has(number));
    if (next < 0) return;
    draw(next);
    setTimeout(drawNext);
  };
  window.addEventListener("load", () => setTimeout(drawNext, 100));
}

function redrawAll(theme) {
  charts.forEach((_, number) => { drawn.add(number); redraw(number, theme); });
}

drawAll();
dark.addEventListener("change", () => redrawAll(dark.matches ? THEMES.dark : THEMES.light));
window.addEventListener("beforeprint", () => redrawAll(THEMES.light));
window.addEventListener("afterprint", () => redrawAll(dark.matches ? THEMES.dark : THEMES.light));

function sortKey(cell) {
  return cell.dataset.sort === undefined ? cell.textContent.trim() : Number(cell.dataset.sort);
}

// Numbers by value, words after them by alphabet, whichever the direction: failures stay together at the end.
function compare(a, b, direction) {
  const numbers = [typeof a === "number", typeof b === "number"];
  if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
  return direction * (numbers[0] ? a - b : a.localeCompare(b, undefined, { numeric: true }));
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
    for (const row of input.closest(".table").querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
  });
}
