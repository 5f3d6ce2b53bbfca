// Prompt, Time, Signals and Compare.
"use strict";

R.pages.prompt = async (room, given, page) => {
  const kind = given.kind === "evaluations" ? "evaluations" : null;
  const [status, chart, ends] = [R.h("p.status", { role: "status" }), R.h("div", {}), R.h("div", {})];
  R.fill(room, R.crumbs(R.a("samples", { kind }, kind ? "Evaluation samples" : "Samples"), "prompt"), R.h("h1", {}, "Prompt"), R.h("p.faint.id", {}, R.text(given.prompt || ""), " · ", R.a("samples", { kind, prompt_id: given.prompt }, "all of its samples")), status, chart, ends);
  const visits = [];
  let [cursor, searched] = ["", 0];
  do {
    const found = await R.ask("prompt", { kind, prompt: given.prompt, cursor });
    if (!page.alive()) return;
    visits.push(...found.visits);
    searched += found.searched;
    cursor = found.cursor;
    R.fill(status, `${R.plural(visits.length, "visit")} · ${R.count(Math.min(searched, found.steps))} of ${R.plural(found.steps, "step")} searched`);
  } while (cursor);
  if (!visits.length) return R.fill(chart, R.empty("No step has this prompt."));
  const open = (step) => {
    const visit = visits.find((one) => one[0] === step);
    if (visit) location.hash = R.link("group", { kind, step, prompt: given.prompt, group: visit[1] });
  };
  const xs = visits.map((visit) => visit[0]);
  const series = [{ label: "pass rate", points: [xs, visits.map((visit) => visit[3] / visit[2])] }, { label: "mean score", points: [xs, visits.map((visit) => visit[4])] }];
  R.fill(chart, R.h("section.card", {}, R.chart({ title: "Over the run", series, onpick: open, height: 220, smooth: false, wide: true })));
  const [first, last] = [visits[0], visits[visits.length - 1]];
  const group = (visit) => R.ask("group", { kind, step: visit[0], prompt: given.prompt, group: visit[1] });
  const shown = await Promise.all(first === last ? [group(first)] : [group(first), group(last)]);
  if (!page.alive()) return;
  page.items = () => [...ends.querySelectorAll(".answer")];
  R.fill(
    ends,
    R.section("", R.h("div.conversation", {}, shown[0].messages.map((message) => R.message(message, { most: 1500 }))), R.h("p.truth", {}, "Ground truth ", R.brief(shown[0].ground_truth))),
    R.h(shown.length > 1 ? "div.halves" : "div.whole", {}, shown.map((one, at) => R.h("div", {}, R.h("h2", {}, shown.length > 1 ? (at ? "Last responses" : "First responses") : "Responses", " ", R.a("group", { kind, step: one.step, prompt: one.prompt_id, group: one.group }, `step ${R.count(one.step)}`)), R.h(shown.length > 1 ? "div.grid.one" : "div.grid", {}, one.rows.slice(0, 4).map((row) => R.groupCard(row, one, Math.max(...one.rows.map((other) => Math.abs(other.advantage || 0))))))))),
  );
};

R.pages.time = async (room, given, page) => {
  const [found, whole] = await Promise.all([R.ask("time", { step: given.step }), R.ask("overview")]);
  const names = Object.keys(whole.phases.series);
  const go = (step) => (location.hash = R.link("time", { step }));
  const history = names.length ? R.h("section.card", {}, R.stackChart(whole.phases, go)) : null;
  if (!found.lanes.length) return R.fill(room, R.h("h1", {}, "Time"), history, R.empty(names.length ? "This run did not record what each worker does when." : "No step has finished yet."));
  page.neighbours = [R.known(found.previous) ? R.link("time", { step: found.previous }) : null, R.known(found.next) ? R.link("time", { step: found.next }) : null];
  R.fill(
    room,
    R.h("div.heading", {}, R.h("h1", {}, "Time"), R.h("span.push", {}), R.steps("steps", page.neighbours)),
    history,
    R.lanes(found),
  );
};

R.stackChart = (phases, onpick) => {
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const total = sum(Object.values(phases.series).map((one) => sum(one[1])));
  const names = Object.keys(phases.series).filter((name) => sum(phases.series[name][1]) > total / 500);
  const joined = uPlot.join(names.map((name) => phases.series[name]));
  const sums = new Array(joined[0].length).fill(0);
  const series = names.map((name, at) => {
    const shown = joined[at + 1].map((value) => value ?? 0);
    return { label: name.slice(5, -2).replaceAll("_", " "), shown, color: R.phaseColor(name.slice(5, -2), names.map((one) => one.slice(5, -2))), points: [joined[0], shown.map((value, place) => (sums[place] += value))] };
  });
  // The largest sum first: each lower one is drawn over it.
  return R.chart({ title: "Seconds a step, by phase", unit: "click a step for its lanes", series: series.reverse(), stacked: true, height: 220, onpick, wide: true });
};

R.lanes = (found) => {
  const end = Math.max(1e-9, ...found.lanes.flatMap((lane) => lane.spans.map((span) => span[2])));
  const spent = new Map();
  for (const [name, from, to] of found.lanes.flatMap((lane) => lane.spans)) spent.set(name, (spent.get(name) || 0) + Math.max(0, to - from));
  // The longest first: there are more phases than colours, and short ones share one.
  const names = [...spent.keys()].sort((a, b) => spent.get(b) - spent.get(a));
  const listed = names.filter((name) => spent.get(name) / found.lanes.length > 0.003 * end);
  const color = (name) => R.phaseColor(name, names);
  const percent = (part) => `${(100 * part) / end}%`;
  const busy = (lane) => {
    let [sum, until] = [0, 0];
    for (const [, from, to] of lane.spans.slice().sort((a, b) => a[1] - b[1])) {
      sum += Math.max(0, to - Math.max(from, until));
      until = Math.max(until, to);
    }
    return sum;
  };
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => R.h("span", { style: { left: `${100 * part}%` } }, part ? R.seconds(part * end) : "0"));
  const rows = found.lanes.map((lane) =>
    R.h("div.lane", {}, R.h("span.name", {}, R.text(lane.name)), R.h("div.track", {}, lane.spans.map(([name, from, to]) => R.h("i", { title: `${name}: ${R.seconds(to - from)}, from ${R.seconds(from)}`, style: { left: percent(from), width: `max(2px, ${percent(Math.max(0, to - from))})`, background: color(name) } }, (to - from) / end > 0.08 ? R.h("b", {}, R.text(name.replaceAll("_", " "))) : null))), R.h("span.idle", { title: "without a phase" }, R.percent(1 - busy(lane) / end))),
  );
  return R.h(
    "section.card",
    {},
    R.h("h2", {}, `Step ${R.count(found.step)}`, R.h("small", {}, ` ${R.seconds(end)}${R.known(found.start) ? `, from ${R.when(found.start)}` : ""}`)),
    R.h("ul.keys", {}, listed.map((name) => R.h("li", {}, R.h("i", { style: { background: color(name) } }), R.text(name.replaceAll("_", " "))))),
    R.h("div.lanes", {}, R.h("div.lane.head", {}, R.h("span.name", {}), R.h("div.track", {}, ticks), R.h("span.idle", {}, "waits")), rows),
  );
};

R.pages.signals = async (room, given, page) => {
  const found = await R.ask("signals");
  const order = { warning: 0, ok: 1, unknown: 2 };
  const signals = (found.signals || []).slice().sort((a, b) => (order[a.state] ?? 3) - (order[b.state] ?? 3));
  const warned = signals.filter((one) => one.state === "warning").length;
  const grid = R.h("div.grid.signals", {}, signals.map(R.signal));
  page.items = () => [...grid.children];
  R.fill(
    room,
    R.h("h1", {}, "Signals"),
    R.h("p.faint", {}, "Whether the reward rises for the right reason: what should move with it, and what should not."),
    found.error ? R.h("aside.notes", {}, R.text(found.error)) : null,
    signals.length ? R.h("p.status", {}, warned ? R.h("b.bad", {}, `${R.plural(warned, "signal")} past the threshold`) : `None of ${R.plural(signals.length, "signal")} is past its threshold.`) : R.empty("There is nothing to compute signals from yet."),
    grid,
  );
};
// Whether the curve is of the value that the threshold is for, not of what the value is computed from.
R.isOfValue = (signal) => {
  const last = signal.series[signal.series.length - 1];
  return last && R.known(signal.value) && Math.abs(last[1] - signal.value) <= 0.1 * Math.abs(signal.threshold);
};
R.signal = (signal) => {
  const points = [signal.series.map((point) => point[0]), signal.series.map((point) => point[1])];
  const kind = { ok: "good", warning: "bad" }[signal.state] || "odd";
  const examples = (signal.examples || []).map((one) => R.h("li", {}, R.a("sample", { step: one.step, prompt: one.prompt_id, group: one.group, sample: one.sample }, `step ${one.step}`), one.note ? R.h("span.faint", {}, " ", R.text(one.note)) : null, R.prose(one.excerpt, { most: 500 })));
  return R.h(
    `article.answer.${kind}`,
    { tabindex: -1 },
    R.h("header", {}, R.h("h2", {}, R.text(signal.title)), R.h("span.push", {}), R.h(`span.pill.${kind}`, {}, signal.state)),
    R.h("p.facts", {}, `value ${R.number(signal.value)}`, R.known(signal.threshold) ? ` · threshold ${R.number(signal.threshold)}` : ""),
    R.h("p", {}, signal.state === "ok" ? R.h("span.faint", {}, "A warning would mean: ") : null, R.text(signal.explanation)),
    signal.series.length > 1 ? R.chart({ title: signal.name, series: [{ label: "", points }], threshold: R.isOfValue(signal) ? signal.threshold : null, height: 120, smooth: false }) : null,
    examples.length ? R.h("details", { open: signal.state === "warning" }, R.h("summary", {}, R.plural(examples.length, "example")), R.h("ul.examples", {}, examples)) : null,
  );
};

R.pages.compare = async (room, given, page) => {
  const found = await R.ask("compare");
  if (found.error) return R.fill(room, R.h("h1", {}, "Compare"), R.h("aside.notes", {}, R.text(found.error)));
  const x = given.x || "step";
  const [a, b] = found.runs;
  const color = { [a.name]: R.palette(0), [b.name]: R.palette(1) };
  const charts = found.curves.filter((curve) => curve.x === x).map((curve) => R.chart({ title: curve.title, xname: x, series: curve.series.map((one) => ({ label: one.run, color: color[one.run], points: [one.points.map((point) => point[0]), one.points.map((point) => point[1])] })) }));
  const axes = [...new Set(found.curves.map((curve) => curve.x))];
  R.fill(
    room,
    R.h("h1", {}, "Compare"),
    R.h("p.versus", {}, [a, b].map((run, at) => R.h("span.key", {}, R.h("i", { style: { background: R.palette(at) } }), R.h("b", {}, at ? "B " : "A "), R.text(run.name), R.h("span.faint", {}, " ", R.text(run.recipe || ""))))),
    found.notes.length ? R.h("aside.notes.quiet", {}, R.h("ul", {}, found.notes.map((note) => R.h("li", {}, R.text(note))))) : null,
    R.h("div.heading", {}, R.h("h2", {}, "Curves"), R.h("span.push", {}), axes.length > 1 ? R.select("By", x, axes.map((name) => [name, { step: "step", tokens: "generated tokens", seconds: "seconds" }[name] || name]), (value) => (location.hash = R.link("compare", { x: value }))) : null),
    R.h("div.charts", {}, charts),
    R.pairedTable(found.evaluations),
    R.changedPrompts(found.changed, a, b),
    found.config.length ? R.section("Configuration", R.table(["key", "A", "B"], found.config.map((one) => [R.h("code", {}, R.text(one.key)), R.h("code", {}, R.text(R.value(one.a))), R.h("code", {}, R.text(R.value(one.b)))]))) : null,
  );
};
R.value = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
R.pairedTable = (evaluations) => {
  if (!evaluations.length) return null;
  const estimate = (one, show) => [R.h("b", {}, show(one.mean)), R.known(one.low) ? R.h("span.faint", {}, ` [${show(one.low)}, ${show(one.high)}]`) : null];
  const signed = (name) => (String(name).startsWith("mean@") ? R.signed : points);
  const points = (value) => (R.known(value) ? `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`.replace("-", "−") : "–");
  const sure = (one) => (one.low > 0 ? ".good" : one.high < 0 ? ".bad" : "");
  const rows = evaluations.map((one) => [R.known(one.step_b) && one.step_b !== one.step ? `${one.step} / ${one.step_b}` : String(one.step), String(one.metric), R.estimate(one.metric, one.a), R.estimate(one.metric, one.b), R.h(`span${sure(one.difference)}`, {}, estimate(one.difference, signed(one.metric))), R.known(one.prompts) ? R.count(one.prompts) : "–"]);
  return R.section("Evaluations, paired by prompt", R.h("p.faint", {}, "Difference: B less A, of shares in percentage points, with its 95% interval."), R.table(["step", "measure", "A", "B", "difference", "prompts"], rows));
};
R.changedPrompts = (changed, a, b) => {
  if (!changed.length) return null;
  const side = (one, name) => R.h("div", {}, R.h("h3", {}, name, R.h("small", {}, ` passes ${R.percent(one.pass_rate)}`)), R.prose(one.response, { most: 900 }));
  return R.section("Prompts that changed most", changed.map((one, at) => R.h("details.changed", { open: at === 0 }, R.h("summary", {}, R.h(`b.${one.difference > 0 ? "good" : "bad"}`, {}, `${one.difference > 0 ? "+" : "−"}${R.percent(Math.abs(one.difference))} `), R.h("span", { dir: "auto" }, R.text(R.excerpt(one.prompt || one.prompt_id, "").slice(0, 160)))), R.h("div.halves", {}, side(one.a, "A"), side(one.b, "B")))));
};
