// Draws plots (areal/extensions/desk/plots.py) by uPlot, and writes numbers with their units.
const UNITS = {
  s: [[3600, 1, "h"], [60, 1 / 60, "min"], [1, 1, "s"], [0, 1000, "ms"]],
  bytes: [[1e9, 1e-9, "GB"], [1e6, 1e-6, "MB"], [0, 1e-3, "kB"]],
  share: [[0, 100, "%"]],
};

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function plain(value) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  return size !== 0 && size < 0.001 ? value.toExponential(1) : Number(value.toPrecision(size < 1000 ? 3 : 4)).toLocaleString("en");
}

// A number with its unit, such as 14 ms, 123 MB or 0.8 %.
function shown(value, unit) {
  if (value == null || !isFinite(value) || !UNITS[unit]) return plain(value);
  if (value === 0 && unit !== "share") return "0";
  const [, factor, name] = UNITS[unit].find(([from]) => Math.abs(value) >= (from === 3600 ? 7200 : from === 60 ? 120 : from));
  return `${plain(value * factor)} ${name}`;
}

// Figures whose pointer moves together, by what their values are measured at.
const busy = new Set();  // the figures that somebody points at, or has zoomed: new data wait
let figures = [];

// A figure with the text and the canvas of a plot. last: the end of the axis; bare: whether the newest values say nothing.
function figure(plot) {
  const made = element("figure", undefined, plot.main ? "main" : "");
  made.append(element("figcaption"), element("div", undefined, "canvas"));
  if (plot.says) made.append(element("p", plot.says));
  made.plot = plot;
  return made;
}

function caption(made, at) {
  const { plot, bare } = made, head = made.firstChild, unit = plot.unit && !UNITS[plot.unit] ? `, ${plot.unit}` : "";
  head.replaceChildren(element("b", plot.title + unit));
  if (at != null) head.append(element("span", `${plot.of} ${at}`, "faint"));
  for (const line of plot.lines) {
    let n = at == null ? line.points.findLastIndex(value => value != null) : line.x.indexOf(at);
    const value = n < 0 ? null : line.points[n], silent = at == null && bare && plot.of === "step";
    if (plot.stack && !silent && !value) continue;
    const text = silent || value == null ? line.label : [line.label, shown(value, plot.unit)].filter(Boolean).join(": ");
    if (!text) continue;
    const entry = element("span");
    const swatch = entry.appendChild(element("i"));
    swatch.style.background = line.colour;
    entry.append(text);
    head.append(entry);
  }
  if (plot.bound != null) head.append(element("span", `– – bound: ${plot.bound}`, "faint"));
}

// The series of uPlot and its columns. A line with a smoothed curve is faint points below it. Of a stack the last part,
// whose top is the highest, is drawn first.
function columns(plot) {
  const series = [], tables = [], bands = [];
  for (const line of plot.stack ? plot.lines.toReversed() : plot.lines) {
    const table = [line.x, line.curve];
    if (plot.stack) {
      series.push({ stroke: line.colour, fill: line.colour, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [1, Infinity], gap: 0 }) });
    } else {
      const width = line.strong ? 3 : 1.8;
      series.push({ stroke: line.colour, width, points: { show: line.x.length < 20, size: 5, fill: line.colour } });
      if (line.x.length >= 20) {
        table.push(line.points);
        series.push({ stroke: line.colour + "66", points: { show: true, size: 3, fill: line.colour + "66", width: 0 }, paths: () => null });
      }
      if (line.low) {
        table.push(line.high, line.low);
        bands.push({ series: [series.length + 1, series.length + 2], fill: line.colour + "30" });
        series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      }
    }
    tables.push(table);
  }
  return { series, bands, data: uPlot.join(tables) };
}

// The ends of the vertical axis.
function limits(plot, low, high) {
  if (plot.bound != null) high = Math.max(high ?? 0, plot.bound);
  if (plot.log === 0) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
  if (plot.log != null) return [0, 10 ** Math.ceil(Math.log10(Math.max(high, plot.log)))];
  low = plot.low ?? low ?? 0;
  high = plot.high ?? high ?? 1;
  if (!(high > low)) [low, high] = plot.low === 0 ? [0, low || 1] : [low - (Math.abs(low) / 2 || 0.5), low + (Math.abs(low) / 2 || 0.5)];
  const room = plot.high == null ? 0.05 * (high - low) : 0;
  return [plot.low ?? low - room, high + room];
}

function draw(made, last) {
  const { plot } = made, box = made.children[1], ink = getComputedStyle(made).color, width = box.clientWidth;
  caption(made, null);
  made.chart?.destroy();
  made.chart = null;
  if (!width) return;
  const { series, bands, data } = columns(plot);
  const axis = { stroke: ink, font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: "#8883", width: 1 } };
  const y = plot.log === 0 ? { distr: 3 } : plot.log != null ? { distr: 4, asinh: plot.log } : {};
  made.chart = new uPlot({
    width, height: box.clientHeight, padding: [10, 22, 0, 0], legend: { show: false }, bands, series: [{}, ...series],
    scales: { x: { time: false, range: () => made.zoom ?? [0, Math.max(last, 1)] }, y: { ...y, range: (_, low, high) => limits(plot, low, high) } },
    axes: [
      { ...axis, size: 30, space: 55, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7], label: plot.of, labelSize: 12, labelGap: 0, labelFont: axis.font },
      { ...axis, size: 56, space: 30, values: (_, marks) => marks.map(mark => mark == null || (plot.log != null && mark < 0) ? "" : shown(mark, plot.unit)) },
    ],
    cursor: { y: false, points: { size: 6 }, sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
    hooks: {
      setCursor: [chart => caption(made, chart.cursor.idx == null ? null : chart.data[0][chart.cursor.idx])],
      setSelect: [chart => zoom(chart.select.width > 0 ? [chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")] : null)],
      draw: [chart => { drawBound(chart, plot, ink); nameCut(chart, plot, ink); }],
    },
  }, data, box);
  box.onpointerenter = () => busy.add(made);
  box.onpointerleave = () => busy.delete(made);
  box.ondblclick = () => zoom(null);
}

// Shows a part of the steps in all figures; null: all steps.
function zoom(part) {
  for (const made of figures) {
    made.zoom = part;
    made.chart?.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    made.chart?.setData(made.chart.data);
  }
  part ? busy.add("zoom") : busy.delete("zoom");
}

function drawBound({ ctx, bbox, valToPos }, plot, ink) {
  if (plot.bound == null) return;
  const y = valToPos(plot.bound, "y", true);
  ctx.save();
  ctx.strokeStyle = ink;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
}

// Names the values that are above the end of the axis.
function nameCut({ ctx, bbox }, plot, ink) {
  ctx.save();
  ctx.fillStyle = ink;
  ctx.textAlign = "right";
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  plot.cut.forEach(([value, step], n) => ctx.fillText(`${n ? "" : "↑ "}${plot.of} ${step}: ${shown(value, plot.unit)}`, bbox.left + bbox.width - 4, bbox.top + (13 + 14 * n) * devicePixelRatio));
  ctx.restore();
}

// Draws plots into the places that `place` gives for each, anew.
function drawPlots(plots, place, last, bare) {
  for (const made of figures) { made.chart?.destroy(); made.remove(); }
  figures = plots.map(plot => {
    const made = figure(plot);
    made.bare = bare;
    place(plot).append(made);
    return made;
  });
  drawAgain(last);
}

let newest = 0;
function drawAgain(last = newest) {
  newest = last;
  for (const made of figures) draw(made, last);
}

addEventListener("resize", () => drawAgain());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAgain());
