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
  if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
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
