// Overview: how the run goes, what it is, and what happened.
"use strict";

R.pages.overview = async (room, given) => {
  const found = await R.ask("overview");
  const samples = (step) => (location.hash = R.link("samples", { first: step, last: step }));
  const charts = R.h("div.charts", {});
  R.fill(
    room,
    R.title(found),
    R.leftOut(given.run || 0),
    R.notes(found.notes),
    R.warnings(found.warnings),
    R.tiles(found),
    R.rewardChart(found, samples),
    R.h("h2.between", {}, "Curves"),
    charts,
    R.anyMetric(found, given),
    R.phases(found.phases),
    R.evaluationTable(found.evaluations),
    R.eventList(found.events),
    R.configuration(found),
    R.versions(found.environment),
  );
  if (given.curves) {
    const own = await R.ask("series", { names: given.curves });
    for (const name of given.curves.split(",")) charts.append(R.chart({ title: name, series: [{ label: "", points: own[name] || [[], []] }], marks: found.marks, onpick: samples }));
  }
  for (const curve of found.curves.slice(1).reverse()) charts.prepend(R.chart({ ...curve, marks: found.marks, onpick: samples }));
};

R.title = (found) =>
  R.h(
    "div.title",
    {},
    R.h("div", {}, R.h("h1", {}, R.text(found.name), R.state(found.state)), R.h("p.faint", {}, R.text([found.recipe.name, found.model, found.data].filter(Boolean).join(" · ")))),
    found.steps ? R.h("div.progress", { role: "progressbar", "aria-valuenow": found.step, "aria-valuemax": found.steps, "aria-label": "steps" }, R.h("span", {}, `step ${R.count(found.step)} of ${R.count(found.steps)}`), R.h("i", {}, R.h("b", { style: { width: `${Math.min(100, (100 * found.step) / found.steps)}%` } }))) : null,
  );
R.state = (state) => R.h(`span.state.${/^[a-z]+$/.test(state) ? state : "odd"}`, {}, state);

// What a report had no room for.
R.leftOut = (run) => {
  const kept = R.source.data?.kept[R.index.runs[run]?.name];
  if (!kept) return null;
  const lines = Object.entries(kept)
    .filter(([, one]) => !one.all)
    .map(([kind, one]) => `${kind === "samples" ? "Samples" : "Evaluation samples"} of ${R.count(one.steps)} of ${R.count(one.of)} steps are in this report: the first, the last and evenly spaced ones` + (one.groups < one.of_groups ? `; of these steps, ${R.count(one.groups)} of ${R.count(one.of_groups)} groups, in the order of the files.` : "."));
  const { pieces, unshown } = R.source.data.pictures[run];
  if (unshown) lines.push(`${R.count(Object.keys(pieces).length)} of ${R.plural(Object.keys(pieces).length + unshown, "image")} of these samples are in this report: each of the others has its reason beside it.`);
  return lines.length ? R.h("aside.notes.quiet", {}, lines.map((line) => R.h("p", {}, line)), R.h("p", {}, "rlcli view RUN shows all.")) : null;
};

R.warnings = (warnings) => {
  if (!warnings.length) return null;
  const last = new Map(warnings.map((one) => [one.name, one]));
  const items = [...last.values()].map((one) => R.h("li", {}, R.h("b", {}, R.text(one.name.replaceAll("_", " "))), R.known(one.step) ? ` at step ${one.step}: ` : ": ", R.text(one.text)));
  return R.h("aside.alarms", { "aria-label": "warnings" }, R.h("h2", {}, R.plural(warnings.length, "warning")), R.h("ul", {}, items));
};

R.tile = (name, figure, more) => R.h("div.tile", {}, R.h("p", {}, name), R.h("p.big", {}, figure), R.h("p.faint", {}, more || "\u00a0"));
R.tiles = (found) => {
  const last = found.evaluations[found.evaluations.length - 1];
  const [name, best] = last ? Object.entries(last.measures)[0] || [] : [];
  const mean = last && last.measures["mean@1"];
  const graded = best && mean && mean.mean !== best.mean ? `, mean@1 ${R.number(mean.mean)}` : "";
  return R.h(
    "div.tiles",
    {},
    R.tile("Reward", R.number(found.reward), R.known(found.first_reward) ? `${R.number(found.first_reward)} at first` : ""),
    best ? R.tile(R.text(name), R.percent(best.mean), `${R.known(best.low) ? `[${R.percent(best.low)}, ${R.percent(best.high)}] ` : ""}step ${last.step}${graded}`) : null,
    R.tile("Time", R.seconds(found.seconds), R.known(found.step_s) ? `${R.seconds(found.step_s)} a step` : ""),
    R.tile("Throughput", R.known(found.tokens_per_s) ? R.short(found.tokens_per_s) : "–", "tokens/s"),
  );
};

R.rewardChart = (found, onpick) => {
  const reward = found.curves.find((curve) => curve.title === "Reward") || { series: [] };
  const name = found.evaluations.flatMap((one) => Object.keys(one.measures))[0];
  const whiskers = found.evaluations.filter((one) => one.measures[name]).map((one) => ({ x: one.step, label: `${name} of evaluations, with 95% intervals`, ...one.measures[name] }));
  if (!reward.series.length && !whiskers.length) return R.section("", R.empty("No step has finished yet."));
  return R.h("section.card", {}, R.chart({ title: "Reward", series: reward.series, whiskers, marks: found.marks, height: 260, onpick, wide: true }));
};

R.anyMetric = (found, given) => {
  const list = R.h("datalist", { id: "metrics" }, found.metrics.map((name) => R.h("option", { value: name })));
  const input = R.h("input", { list: "metrics", placeholder: "any metric, such as update/lr", "aria-label": "add a curve", autocomplete: "off", spellcheck: "false" });
  // The chosen curves are part of the address.
  const add = async (event) => {
    event.preventDefault();
    const name = input.value.trim();
    if (!found.metrics.includes(name)) return input.setCustomValidity("no such metric"), input.reportValidity();
    input.value = "";
    input.blur();
    const curves = [...new Set([...(given.curves || "").split(",").filter(Boolean), name])].join(",");
    history.replaceState(null, "", R.link("overview", { curves }));
    await R.show({ keep: true });
  };
  input.addEventListener("input", () => input.setCustomValidity(""));
  return found.metrics.length ? R.h("form.add", { onsubmit: add }, input, list, R.h("button", {}, "Add a curve")) : null;
};

R.phases = (phases) => {
  const names = Object.keys(phases.seconds);
  const total = names.reduce((sum, name) => sum + phases.seconds[name], 0);
  if (!total) return null;
  const share = (name) => `${(100 * phases.seconds[name]) / total}%`;
  const shown = names.filter((name) => phases.seconds[name] / total > 0.002);
  return R.section(
    "Where a step's time goes",
    R.h("p.faint", {}, `Mean of the last ${phases.recent} steps: ${R.seconds(total)}. `, R.a("time", {}, "Lanes of every worker")),
    R.h("div.stack", { "aria-hidden": "true" }, shown.map((name) => R.h("i", { title: `${name}: ${R.seconds(phases.seconds[name])}`, style: { width: share(name), background: R.phaseColor(name, shown) } }))),
    R.h("ul.keys", {}, shown.map((name) => R.h("li", {}, R.h("i", { style: { background: R.phaseColor(name, shown) } }), name.replaceAll("_", " "), " ", R.h("b", {}, R.seconds(phases.seconds[name])), R.h("span.faint", {}, ` ${R.percent(phases.seconds[name] / total)}`)))),
  );
};

// A share in percent; a mean score, which may be any number, as it is.
R.measure = (name) => (String(name).startsWith("mean@") ? R.number : R.percent);
R.estimate = (name, one) => [R.h("b", {}, R.measure(name)(one.mean)), R.known(one.low) ? R.h("span.faint", {}, ` [${R.measure(name)(one.low)}, ${R.measure(name)(one.high)}]`) : null];
R.evaluationTable = (evaluations) => {
  const names = [...new Set(evaluations.flatMap((one) => Object.keys(one.measures)))];
  if (!names.length) return null;
  const cell = (name, estimate) => (estimate ? R.estimate(name, estimate) : "–");
  const rows = evaluations.slice().reverse().map((one) => [R.a("samples", { kind: "evaluations", first: one.step, last: one.step }, `step ${R.count(one.step)}`), R.known(one.prompts) ? R.count(one.prompts) : "–", ...names.map((name) => cell(name, one.measures[name]))]);
  return R.folded("Evaluations", ["", "prompts", ...names.map((name) => R.text(name))], rows, 8);
};
R.folded = (title, columns, rows, most) => {
  const room = R.h("div", {}, R.table(columns, rows.slice(0, most)));
  if (rows.length > most) room.append(R.h("button.more", { type: "button", onclick: () => R.fill(room, R.table(columns, rows)) }, `Show all ${R.count(rows.length)}`));
  return R.section(title, room);
};

R.eventList = (events) => {
  if (!events.length) return null;
  const rows = events.slice().reverse().map((one) => [R.h("span.faint", {}, R.when(one.time)), R.known(one.step) ? `step ${one.step}` : "", R.h(`b${["warning", "alarm", "failed", "rolled_back", "checkpoint_failed", "inputs_changed"].includes(one.kind) ? ".bad" : ""}`, {}, R.text(one.kind.replaceAll("_", " "))), R.h("span", { dir: "auto" }, R.text(one.name ? `${one.name}: ${one.text}` : one.text))]);
  return R.folded("Events", ["when", "", "event", ""], rows, 10);
};

R.configuration = (found) => {
  const changed = found.config.filter((one) => one.changed);
  const all = R.h("div", {});
  const filter = (text) => R.fill(all, R.table(["key", "value", "from"], found.config.filter((one) => `${one.key} ${one.value}`.toLowerCase().includes(text.toLowerCase())).map((one) => [R.h("code", {}, R.text(one.key)), R.h("code", {}, R.text(one.value)), one.origin])));
  if (!found.config.length) return null;
  filter("");
  return R.section(
    "Configuration",
    R.h("p.faint", {}, found.recipe.name ? ["Recipe ", R.h("b", {}, R.text(found.recipe.name)), ". ", R.text(found.recipe.summary)] : null),
    changed.length ? R.table(["differs from the recipe", "here", "recipe", "from"], changed.map((one) => [R.h("code", {}, R.text(one.key)), R.h("code", {}, R.text(one.value)), R.h("code.faint", {}, R.text(R.known(one.recipe) ? one.recipe || '""' : "–")), one.origin])) : R.h("p", {}, "Nothing differs from the recipe."),
    R.h("details", {}, R.h("summary", {}, `All ${R.count(found.config.length)} settings`), R.input("Filter", "", { type: "search" }, filter), all),
  );
};

R.versions = (environment) => {
  const packages = Object.entries(environment.packages || {}).map(([name, version]) => `${name} ${version}`);
  const facts = [
    ["started", environment.started],
    ["command", Array.isArray(environment.command) ? R.h("code", {}, R.text(environment.command.join(" "))) : ""],
    ["commit", environment.commit ? environment.commit + (environment.modified ? " (modified)" : "") : ""],
    ["machine", [environment.host, environment.platform, R.known(environment.cpus) ? R.plural(environment.cpus, "CPU") : "", ...(environment.gpus || [])].filter(Boolean).join(" · ")],
    ["python", environment.python],
    ["packages", packages.join(" · ")],
  ];
  return facts.some(([, value]) => value) ? R.section("Versions", R.facts(facts)) : null;
};
