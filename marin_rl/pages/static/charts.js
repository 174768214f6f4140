// Charts, drawn by Plotly in the page's own colours, each with its values as a table.
const LINES = 7;
const POINTS_MARKED = 60;
const ROUNDS_TICKED = 10;
const drawn = new Map();
// Charts are drawn when they come near the window: a page of twenty opens in a fraction of the time.
const nearby = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    const entry = drawn.get(target.id.slice("chart-".length));
    entry.near = isIntersecting;
    if (entry.near) plot(entry);
  }
}, { rootMargin: "600px" });
window.addEventListener("beforeprint", () => drawn.forEach(plot));

function colour(name) {
  const probe = byId("probe") ?? document.body.appendChild(make("span", { id: "probe", hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function faint(rgb, share) {
  const [red, green, blue] = rgb.match(/[\d.]+/g);
  return `rgba(${red}, ${green}, ${blue}, ${share})`;
}

function drawCharts(charts) {
  const home = byId("charts");
  for (const chart of charts) {
    let entry = drawn.get(chart.key);
    if (!entry) {
      entry = frame(chart);
      drawn.set(chart.key, entry);
    }
    updateChart(entry, chart);
  }
  const figures = charts.map((chart) => drawn.get(chart.key).figure);
  if (figures.some((figure, place) => home.children[place] !== figure)) home.replaceChildren(...figures);
  redrawCharts();
}

function redrawCharts() {
  for (const entry of drawn.values()) {
    entry.stale = true;
    if (entry.near) plot(entry);
  }
}

function updateChart(entry, chart) {
  entry.chart = chart;
  entry.plotted.setAttribute("aria-label", summary(chart));
  if (entry.details.open) entry.values.replaceChildren(valueTable(chart));
}

function frame(chart) {
  const plotted = make("div", { class: "plot", role: "img" });
  const values = make("div", { class: "values", tabindex: "0" });
  const details = make("details", {}, make("summary", {}, "Description and values"),
    make("p", { class: "note" }, chart.about), values);
  const figure = make("figure", { class: chart.key === "reward" ? "chart wide-chart" : "chart", id: `chart-${chart.key}` },
    make("figcaption", {}, chart.title, make("span", {}, chart.unit)), plotted, details);
  const entry = { figure, plotted, details, values, chart, stale: true, near: false };
  nearby.observe(figure);
  details.addEventListener("toggle", () => { if (details.open) values.replaceChildren(valueTable(entry.chart)); });
  return entry;
}

function plot(entry) {
  if (!entry.stale) return;
  entry.stale = false;
  const { plotted, chart } = entry;
  const traces = chart.kind === "stack" ? layers(chart) : chart.lines.flatMap((line, index) => lineTraces(line, chart.lines.length === 1 ? 1 : index));
  const coarse = matchMedia("(pointer: coarse)").matches;
  Plotly.react(plotted, traces, layoutOf(chart, coarse), { responsive: true, displayModeBar: false });
}

function lineColour(index) {
  return colour(`--line-${(index % LINES) + 1}`);
}

function lineTraces(line, index) {
  const paint = lineColour(index);
  const few = line.x.length <= POINTS_MARKED;
  const traces = [];
  if (line.low) {
    const edge = { x: line.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: line.name };
    traces.push({ ...edge, y: line.high }, { ...edge, y: line.low, fill: "tonexty", fillcolor: faint(paint, 0.18) });
  }
  traces.push({
    x: line.x, y: line.y, name: line.name, legendgroup: line.name,
    mode: few ? "lines+markers" : "lines", line: { color: paint, width: 2 }, marker: { size: 4, color: paint },
    ...(line.low ? { customdata: line.low.map((low, i) => [low, line.high[i]]), hovertemplate: "%{y:.4~g} (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})" }
      : { hovertemplate: "%{y:.4~g}" }),
  });
  return traces;
}

function layers(chart) {
  const many = Math.max(...chart.lines.map((line) => line.x.length)) > POINTS_MARKED;
  return chart.lines.map((line, index) => {
    const paint = lineColour(index + 1);
    const shared = { x: line.x, y: line.y, name: line.name, hovertemplate: "%{y:.4~g}" };
    return many
      ? { ...shared, mode: "lines", stackgroup: "all", line: { width: 0.5, color: paint }, fillcolor: faint(paint, 0.6) }
      : { ...shared, type: "bar", marker: { color: faint(paint, 0.8) } };
  });
}

function layoutOf(chart, coarse) {
  const ink = colour("--ink");
  const rule = colour("--rule");
  const latest = Math.max(...chart.lines.flatMap((line) => line.x));
  const values = chart.lines.flatMap((line) => line.y).filter((value) => value !== null);
  const positive = values.some((value) => value > 0);
  const fromZero = chart.unit === "fraction" || chart.kind === "stack" || Math.min(...values) === 0;
  const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule };
  return {
    // The left margin is fixed: one that follows the labels changes the legend's lines, so the height, so the labels.
    margin: { l: 74, r: 8, t: 8, b: 8 }, barmode: "stack", bargap: 0.15,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: "system-ui, Noto Sans, DejaVu Sans, sans-serif" },
    hovermode: "x unified", hoverlabel: { bgcolor: colour("--raised"), bordercolor: rule, font: { color: ink } },
    dragmode: coarse ? false : "zoom",
    showlegend: chart.lines.length > 1,
    // Measured in heights of the plot, which are small ones but in the wide chart: below the axis' title.
    legend: { orientation: "h", y: chart.key === "reward" ? -0.2 : -0.32, yanchor: "top", x: 0 },
    xaxis: { ...axis, automargin: true, title: { text: chart.axis, standoff: 4 }, tickformat: ",d", rangemode: "tozero", showgrid: false,
      ...(latest < ROUNDS_TICKED ? { dtick: 1 } : {}) },
    yaxis: { ...axis, type: chart.logarithmic && positive ? "log" : "linear", exponentformat: "power",
      rangemode: fromZero ? "tozero" : "normal" },
  };
}

function summary(chart) {
  const lines = chart.lines.map((line) =>
    `${line.name}: ${show(line.y[0])} in ${chart.axis} ${line.x[0]}, ${show(line.y.at(-1))} in ${chart.axis} ${line.x.at(-1)}`);
  return `${chart.title}. ${chart.about} ${lines.join("; ")}.`;
}

function valueTable(chart) {
  const rounds = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const columns = chart.lines.map((line) => new Map(line.x.map((x, index) => [x, line.y[index]])));
  const head = make("tr", {}, make("th", { scope: "col" }, chart.axis),
    ...chart.lines.map((line) => make("th", { scope: "col", class: "number" }, line.name)));
  const body = rounds.map((round) => make("tr", {}, make("th", { scope: "row" }, round),
    ...columns.map((column) => make("td", { class: "number" }, show(column.get(round), 4)))));
  return make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, ...body));
}
