// Curves, drawn by uPlot on a canvas; labels and legends are ours, as text.
"use strict";

R.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
R.palette = (place) => R.color(`--series-${place % 12}`);

// Phases have the same colours everywhere.
R.PHASES = ["generate", "plan", "update", "sync", "verify", "bookkeeping", "evaluate", "load", "checkpoint", "old_log_probs"];
R.phaseColor = (name, among) => {
  const known = R.PHASES.indexOf(name);
  return R.palette(known >= 0 ? known : R.PHASES.length + among.filter((one) => !R.PHASES.includes(one)).indexOf(name));
};

// Means over `window` values around each.
R.smooth = (values, window) => {
  const [sums, half] = [[0], Math.floor(window / 2)];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, at) => {
    const reach = Math.min(half, at, values.length - 1 - at);
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1);
  });
};

// A figure with a chart. series: [{label, points: [xs, ys], color?, dots?}]. whiskers: [{x, mean, low, high, label}].
// threshold: a horizontal line. marks: [{x, label}], vertical lines. onpick: called with the x that was clicked. smooth: add running means to long curves.
R.chart = ({ title, unit = "", series, height = 168, whiskers = [], marks = [], threshold = null, onpick = null, smooth = true, xname = "step", stacked = false, wide = false }) => {
  const figure = R.h(wide ? "figure.chart.wide" : "figure.chart", {});
  const legend = R.h("div.legend", {});
  const room = R.h("div.plot", { role: "img", "aria-label": [R.chartText(title, series, xname), ...marks.map((one) => one.label)].join("; ") });
  R.add(figure, [R.h("figcaption", {}, R.h("h3", {}, title, unit ? R.h("small", {}, ` ${unit}`) : null), legend), room]);
  if (!series.some((one) => one.points[0].length) && !whiskers.length) return R.fill(figure, R.h("h3", {}, title), R.h("p.faint", {}, "no values yet")), figure;

  const drawn = [];
  for (const [place, one] of series.entries()) {
    const color = one.color || R.palette(place);
    const long = smooth && !stacked && one.points[0].length >= 60;
    if (long) drawn.push({ ...one, color, faint: true, of: place });
    const points = long ? [one.points[0], R.smooth(one.points[1], Math.max(5, Math.round(one.points[0].length / 30)))] : one.points;
    drawn.push({ ...one, points, color, of: place });
  }
  if (whiskers.length) drawn.push({ label: "", points: [whiskers.map((one) => one.x), whiskers.map((one) => one.mean)], hidden: true });
  const data = uPlot.join(drawn.map((one) => one.points));
  const raw = uPlot.join(series.map((one) => one.points));
  const values = series.map((one) => R.h("b", {}));
  series.forEach((one, place) => legend.append(R.h("span.key", {}, R.h("i", { style: { background: one.color || R.palette(place) } }), one.label, " ", values[place])));
  if (whiskers.length) legend.append(R.h("span.key", {}, R.h("i.dot", {}), whiskers[0].label));
  if (wide) marks.forEach((one) => legend.append(R.h("span.key", {}, R.h("i.dash", {}), R.text(one.label))));
  const where = R.h("span.where", {});
  legend.append(where);
  const show = (x) => {
    series.forEach((one, place) => {
      const ys = one.shown || one.points[1];
      const index = x === null ? one.points[0].length - 1 : R.nearest(one.points[0], x);
      values[place].textContent = R.number(ys[index]);
    });
    where.textContent = x === null ? "" : `${xname} ${R.number(x)}`;
  };
  show(null);

  const all = drawn.flatMap((one) => one.points[1]).concat(whiskers.flatMap((one) => [one.low, one.high])).filter(R.known);
  if (R.known(threshold)) all.push(threshold);
  const [low, high] = [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), -Infinity)];
  const rate = low >= 0 && high <= 1 && high > 0.3;
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
  const range = stacked ? [0, high * 1.05 || 1] : rate ? [-0.02, 1.02] : [low >= 0 && low <= high * 0.4 ? 0 : low - pad, high + pad];
  const axis = { stroke: R.color("--faint"), grid: { stroke: R.color("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
  const xs = data[0];
  const single = xs.length && xs[0] === xs[xs.length - 1];
  const options = {
    width: 300,
    height,
    padding: [8, 14, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false }, sync: { key: `x-${xname}` } },
    scales: { x: { time: false, range: single ? [xs[0] - 1, xs[0] + 1] : undefined }, y: { range } },
    axes: [
      { ...axis, size: 24, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => (xname === "step" && tick % 1 ? "" : R.short(tick))) },
      { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => (rate && tick > 1 ? "" : R.short(tick))) },
    ],
    series: [
      {},
      ...drawn.map((one) => ({
        label: one.label,
        stroke: one.hidden ? "transparent" : one.faint ? R.alpha(one.color, 0.28) : one.color,
        width: one.faint ? 1 : stacked ? 0 : 2,
        fill: stacked ? one.color : undefined,
        spanGaps: true,
        points: { show: !one.hidden && !stacked && one.points[0].length < 40, size: 5, fill: one.color },
      })),
    ],
    hooks: {
      setCursor: [(plot) => show(plot.cursor.idx === null || plot.cursor.idx === undefined || plot.cursor.left < 0 ? null : data[0][plot.cursor.idx])],
      draw: [(plot) => R.whiskers(plot, whiskers), (plot) => R.threshold(plot, threshold), (plot) => R.marks(plot, marks)],
    },
  };
  let plot = null;
  const fit = () => {
    const width = room.clientWidth;
    if (!width) return;
    if (!plot) {
      plot = new uPlot(options, data, room);
      if (onpick) {
        room.classList.add("pick");
        plot.over.addEventListener("click", () => R.known(plot.cursor.idx) && onpick(data[0][plot.cursor.idx]));
      }
    } else if (plot.width !== width) plot.setSize({ width, height });
  };
  const observer = new ResizeObserver(() => (figure.isConnected ? fit() : (observer.disconnect(), plot?.destroy())));
  observer.observe(room);
  figure.destroy = () => (observer.disconnect(), plot?.destroy());
  return figure;
};

R.chartText = (title, series, xname) =>
  `${title}: ` +
  series
    .filter((one) => one.points[0].length)
    .map((one) => {
      const [xs, ys] = one.points;
      return `${one.label} from ${R.number(ys[0])} at ${xname} ${R.number(xs[0])} to ${R.number(ys[ys.length - 1])} at ${xname} ${R.number(xs[xs.length - 1])}`;
    })
    .join("; ");

R.nearest = (xs, x) => {
  let best = 0;
  for (let at = 0; at < xs.length; at++) if (Math.abs(xs[at] - x) <= Math.abs(xs[best] - x)) best = at;
  return best;
};
R.short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${R.number(value / 1e9)}G`;
  if (size >= 1e6) return `${R.number(value / 1e6)}M`;
  if (size >= 1e4) return `${R.number(value / 1e3)}k`;
  return R.number(Number(value.toPrecision(6)), 4);
};
R.alpha = (color, alpha) => {
  const digits = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(color);
  return digits ? `rgba(${digits.slice(1).map((pair) => parseInt(pair, 16)).join(",")},${alpha})` : color;
};
R.whiskers = (plot, whiskers) => {
  const { ctx } = plot;
  const color = R.color("--mark");
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const one of whiskers) {
    const [x, y] = [plot.valToPos(one.x, "x", true), plot.valToPos(one.mean, "y", true)];
    if (R.known(one.low) && R.known(one.high)) {
      ctx.beginPath();
      ctx.moveTo(x, plot.valToPos(one.low, "y", true));
      ctx.lineTo(x, plot.valToPos(one.high, "y", true));
      ctx.stroke();
    }
    ctx.beginPath();
    ctx.arc(x, y, 3.5 * devicePixelRatio, 0, 7);
    ctx.fill();
  }
  ctx.restore();
};
R.marks = (plot, marks) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = R.color("--odd");
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const one of marks) {
    const x = plot.valToPos(one.x, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
};
R.threshold = (plot, value) => {
  if (!R.known(value)) return;
  const { ctx, bbox } = plot;
  const y = plot.valToPos(value, "y", true);
  ctx.save();
  ctx.strokeStyle = R.color("--bad");
  ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
};
