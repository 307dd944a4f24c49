// As in areal/extensions/desk/curves.py, so that the report and the pages look alike.
const MEANING = /* colours */;
const SMOOTHED_FROM = 20, MOST_POINTS = 400, OUTLIER = 2.5;
const perSecond = key => r => r[key] / Math.max(r.step_seconds, 1e-9);
const of = key => r => r[key];

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

const shown = value => value == null || !isFinite(value) ? "–"
  : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : Number(value.toPrecision(4)).toLocaleString();

// Draws the axes of a plot. The functions x and y that it returns convert values to pixels of the canvas.
function axes(canvas, xs, low, high) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  const ink = getComputedStyle(document.body).color, left = 44, bottom = height - 16, top = 6, right = width - 4;
  const first = xs[0] ?? 0, last = xs[xs.length - 1] ?? 1;
  if (!(high > low)) [low, high] = low === 0 ? [0, 1] : [low - 0.5, low + 0.5];
  const x = v => left + (right - left) * (last > first ? (v - first) / (last - first) : 0.5);
  const y = v => bottom - (bottom - top) * (v - low) / (high - low);
  context.fillStyle = ink;
  context.globalAlpha = 0.7;
  context.textAlign = "right";
  for (const value of [low, (low + high) / 2, high]) {
    context.fillText(shown(value), left - 5, Math.max(y(value) + 4, 10));
    context.globalAlpha = 0.15;
    context.fillRect(left, y(value), right - left, 1);
    context.globalAlpha = 0.7;
  }
  context.fillText(last, right, height - 3);
  context.textAlign = "left";
  context.fillText(first, left, height - 3);
  context.globalAlpha = 1;
  return { context, x, y, left, right, bottom, ink };
}

function extent(values, from) {
  let low = from ?? Infinity, high = -Infinity;
  for (const value of values) if (value != null && isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return high === -Infinity ? [0, 1] : [low, Math.max(high, low)];
}

// At each place the mean of the values around it: of one in SMOOTHED_FROM of all values to either side.
function smoothed(values) {
  const half = Math.floor(values.length / SMOOTHED_FROM);
  return values.map((_, n) => {
    const first = Math.max(0, n - half), end = Math.min(values.length, n + half + 1);
    let sum = 0;
    for (let i = first; i < end; i++) sum += values[i];
    return sum / (end - first);
  });
}

// The end of an axis from 0 that cuts off outliers, at most a tenth of the values; null if there are none.
function upperLimit(values) {
  const ordered = values.toSorted((a, b) => a - b), usual = OUTLIER * ordered[Math.floor(0.9 * (ordered.length - 1))];
  return ordered.at(-1) > usual && usual > 0 ? 1.2 * ordered.findLast(value => value <= usual) : null;
}

// Draws points, which are pairs of x and y: a smoothed line over faint points, or few points on their line. Of a number
// of `records`, few points are joined only if none is missing and there are more than two, as in the report.
function drawCurve({ context, x, y, records }, points, colour, strength = 1, width = 1.8) {
  const few = points.length < SMOOTHED_FROM, curve = smoothed(points.map(([, v]) => v));
  const line = values => {
    context.beginPath();
    points.forEach(([at], n) => context.lineTo(x(at), y(values[n])));
    context.stroke();
  };
  context.strokeStyle = context.fillStyle = colour;
  context.globalAlpha = strength * (few ? 1 : 0.4);
  context.lineWidth = 0.6;
  if (points.length > MOST_POINTS) line(points.map(([, v]) => v));
  else for (const [at, v] of points) context.fillRect(x(at) - 1.5, y(v) - 1.5, 3, 3);
  context.globalAlpha = strength;
  context.lineWidth = width;
  if (!few || records === undefined || (points.length === records && records > 2)) line(curve);
  context.globalAlpha = 1;
}
