// Group: the samples of one prompt side by side. Sample: its conversation, its verdict and its tokens.
"use strict";

R.crumbs = (...parts) => R.h("nav.crumbs", { "aria-label": "where" }, parts.filter(Boolean).flatMap((part, at) => (at ? [R.h("span", { "aria-hidden": "true" }, "›"), part] : [part])));
R.stepCrumbs = (found) => {
  const kind = found.kind === "evaluations" ? "evaluations" : null;
  return [R.a("samples", { kind }, kind ? "Evaluation samples" : "Samples"), R.a("samples", { kind, first: found.step, last: found.step }, `step ${R.count(found.step)}`)];
};

// Links to the neighbours of a page, which [ and ] follow too.
R.steps = (name, [previous, next]) => R.h("nav.steps", { "aria-label": name }, previous ? R.h("a.button", { href: previous }, "‹ previous") : null, next ? R.h("a.button", { href: next }, "next ›") : null);

R.pages.group = async (room, given, page) => {
  const found = await R.ask("group", given);
  const kind = found.kind === "evaluations" ? "evaluations" : null;
  const most = Math.max(...found.rows.map((row) => Math.abs(row.advantage || 0)));
  const passed = found.rows.filter((row) => row.outcome === "ok").length;
  const grid = R.h("div.grid", {});
  const orders = { sample: (row) => row.sample, score: (row) => -(row.score ?? -Infinity), advantage: (row) => -(row.advantage ?? -Infinity), response_tokens: (row) => -(row.response_tokens ?? -Infinity) };
  const show = (order) => {
    const rows = found.rows.slice().sort((a, b) => orders[order](a) - orders[order](b) || a.sample - b.sample);
    R.fill(grid, rows.map((row) => R.groupCard(row, found, most)));
  };
  show(given.order || "sample");
  page.items = () => [...grid.children];
  page.neighbours = [found.previous, found.next].map((one) => (one ? R.link("group", { kind, step: found.step, ...one }) : null));
  R.fill(
    room,
    R.crumbs(...R.stepCrumbs(found), "group"),
    R.h("div.heading", {}, R.h("h1", {}, "Group"), R.h("span.push", {}), R.steps("groups of the step", page.neighbours)),
    R.h("p.faint.id", {}, R.text(found.prompt_id), " · ", R.a("prompt", { kind, prompt: found.prompt_id }, "this prompt over the run")),
    R.section("", R.h("div.conversation", {}, found.messages.map((message) => R.message(message, { most: 1500 }))), R.h("p.truth", {}, "Ground truth ", R.brief(found.ground_truth))),
    R.h("div.heading", {}, R.h("h2", {}, `${R.plural(found.rows.length, "sample")}, ${passed} right`), R.h("span.push", {}), R.select("Order", given.order, [["sample", "as drawn"], ["score", "score"], ["advantage", "advantage"], ["response_tokens", "length"]], show)),
    grid,
  );
};

R.groupCard = (row, found, most) => {
  const place = R.place({ ...row, step: found.step, prompt_id: found.prompt_id, group: found.group }, found.kind === "evaluations" ? "evaluations" : null);
  const said = row.said.length > 1 ? row.said.map((message) => R.message(message, { drawn: message.role === "assistant", most: 700 })) : R.prose(R.response(row), { most: 1400, missing: row.said[0]?.content_left_out });
  return R.h(
    `article.answer.${R.kindOf(row)}`,
    { tabindex: -1 },
    R.h("header", {}, R.h("a", { href: R.link("sample", place) }, row.sample < 0 ? "greedy" : `sample ${row.sample}`), R.outcome(row), R.h("span.push", {}), R.score(row)),
    found.kind === "evaluations" ? null : R.advantage(row.advantage, most),
    R.h("p.facts", {}, [R.known(row.response_tokens) ? R.plural(row.response_tokens, "token") : "", R.stopped(row.finish_reason), row.left_out ? `left out: ${row.left_out}` : "", row.tokens ? "with tokens" : ""].filter(Boolean).join(" · ")),
    R.h("p.truth", {}, "Answer ", R.brief(row.answer)),
    said,
  );
};

R.pages.sample = async (room, given, page) => {
  const found = await R.ask("sample", given);
  const kind = found.kind === "evaluations" ? "evaluations" : null;
  const place = (sample) => R.link("sample", { kind, step: found.step, prompt: found.prompt_id, group: found.group, sample });
  const at = found.samples.indexOf(found.sample || 0);
  const [previous, next] = [found.samples[at - 1], found.samples[at + 1]];
  page.neighbours = [R.known(previous) ? place(previous) : null, R.known(next) ? place(next) : null];
  R.fill(
    room,
    R.crumbs(...R.stepCrumbs(found), R.a("group", { kind, step: found.step, prompt: found.prompt_id, group: found.group }, "group"), found.sample < 0 ? "greedy" : `sample ${found.sample}`),
    R.h("div.heading", {}, R.h("h1", {}, found.sample < 0 ? "Greedy response" : `Sample ${found.sample}`), R.h("div.badges", {}, R.badges(found)), R.h("span.push", {}), R.steps("samples of the group", page.neighbours)),
    found.left_out ? R.h("aside.notes", {}, R.h("b", {}, `Not trained on: ${found.left_out}. `), R.LEFT_OUT[found.left_out] || "") : null,
    R.h("div.columns", {}, R.h("div", {}, R.conversation(found), found.token_columns ? R.tokens(found.token_columns, given) : R.h("p.faint.hint", {}, kind ? "" : "No tokens were kept of this sample: the key tracking.token_samples says of how many samples a step they are.")), R.verdict(found)),
  );
};

R.LEFT_OUT = {
  truncated: "The response was cut off at the limit, and train.truncated leaves such samples out.",
  timeout: "Its verification reached the deadline, which says nothing about the response.",
  crash: "Its verifier failed, which says nothing about the response.",
  unparsed: "Its judge replied something that is no verdict.",
  environment: "Its environment failed twice.",
  baseline: "The greedy response that it is compared with could not be verified.",
  not_selected: "algorithm.select chose other samples.",
  alone: "No other sample of its group was left to compare it with.",
};

R.conversation = (found) => {
  const rewards = found.turn_rewards || [];
  let turn = 0;
  const said = found.said.map((message) => {
    const drawn = message.role === "assistant";
    return R.message(message, { drawn, score: drawn && rewards.length > 1 ? rewards[turn++] : null });
  });
  return R.h("section.card", {}, R.h("div.heading", {}, R.h("h2", {}, "Conversation"), R.h("span.push", {}), R.h("small", {}, "dimmed: not sampled by the policy")), R.h("div.conversation", {}, found.messages.map((message) => R.message(message)), said));
};

R.verdict = (found) => {
  const parts = Object.entries(found.parts || {});
  const versions = R.known(found.version) ? (R.known(found.newest_version) && found.newest_version !== found.version ? `${found.version} to ${found.newest_version}` : String(found.version)) : null;
  return R.h(
    "aside.verdict",
    {},
    R.section("Verdict", R.facts([["score", R.h("b", {}, R.number(found.score))], ["outcome", R.outcome(found)], ["answer", R.brief(found.answer)], ["ground truth", R.brief(found.ground_truth)], ["detail", found.detail ? R.prose(found.detail, { most: 600 }) : null], ["took", R.known(found.verify_s) ? R.seconds(found.verify_s) : null]]), parts.length ? R.table(["part", "score"], parts.map(([name, value]) => [name, R.number(value)])) : null),
    found.kind === "evaluations" ? null : R.section("Training", R.facts([["advantage", R.known(found.advantage) ? R.signed(found.advantage) : "–"], ["shaped reward", R.known(found.reward) ? R.number(found.reward) : null], ["left out", found.left_out || "no"], ["trained in", R.known(found.trained_step) && found.trained_step !== found.step ? `step ${found.trained_step}, it waited` : null]])),
    R.section("Generation", R.facts([["prompt", R.known(found.prompt_tokens) ? R.plural(found.prompt_tokens, "token") : null], ["response", R.known(found.response_tokens) ? R.plural(found.response_tokens, "token") : null], ["turns", R.known(found.turns) ? String(found.turns) : null], ["stopped", R.stopped(found.finish_reason)], ["ended", found.ended], ["weights of sync", versions], ["mean log-prob", R.known(found.mean_log_prob) ? R.number(found.mean_log_prob) : null], ["lowest log-prob", R.known(found.min_log_prob) ? R.number(found.min_log_prob) : null], ["perplexity", R.known(found.perplexity) ? R.number(found.perplexity) : null]])),
  );
};

// The tokens of a sample, coloured by a figure.
R.HEATS = {
  difference: { name: "engine against trainer", unit: "nats, |difference| of log-probs", of: (c, i) => (R.known(c.engine_log_prob[i]) && R.known(c.trainer_log_prob[i]) ? Math.abs(c.engine_log_prob[i] - c.trainer_log_prob[i]) : null) },
  entropy: { name: "entropy", unit: "nats", of: (c, i) => c.entropy[i] },
  surprise: { name: "improbability", unit: "nats, −log-prob", of: (c, i) => (R.known(c.engine_log_prob[i]) ? -c.engine_log_prob[i] : null) },
  advantage: { name: "advantage", unit: "", of: (c, i) => c.advantage[i], signed: true },
  version: { name: "version of the weights", unit: "", of: (c, i) => c.version?.[i], steps: true },
};
// As many tokens are shown at first as a browser lays out at once.
R.MOST_TOKENS = 4000;
R.MOST_CHARACTERS = 30000;
R.firstTokens = (text) => {
  let [count, length] = [0, 0];
  while (count < Math.min(text.length, R.MOST_TOKENS) && (length += text[count].length) <= R.MOST_CHARACTERS) count++;
  return count;
};
// Where tokens begin, and how many equal ones are shown as one: an image in a prompt has hundreds of the same token.
R.LEAST_EQUAL = 8;
R.tokenRuns = (text, drawn) => {
  const runs = [];
  for (let at = 0; at < text.length; ) {
    let end = at + 1;
    while (!drawn[at] && end < text.length && !drawn[end] && text[end] === text[at]) end++;
    if (end - at >= R.LEAST_EQUAL) runs.push({ at, count: end - at });
    else for (let one = at; one < end; one++) runs.push({ at: one, count: 1 });
    at = end;
  }
  return runs;
};
R.tokens = (columns, given) => {
  const filled = { ...columns };
  for (const name of ["engine_log_prob", "trainer_log_prob", "entropy", "advantage", "version", "drawn"]) filled[name] = columns[name] || [];
  const text = columns.text || [];
  const runs = R.tokenRuns(text, filled.drawn);
  const detail = R.h("p.detail", { role: "status" }, R.h("span.faint", {}, "Point at a token, or move with the arrow keys."));
  const legend = R.h("div.heatkey", {});
  const room = R.h("div.tokens", { tabindex: 0, role: "group", "aria-label": "tokens" });
  let [heat, most] = ["difference", R.firstTokens(runs.map((run) => text[run.at]))];
  const describe = (place) => {
    const { at, count } = runs[place];
    const facts = [["engine", "engine_log_prob"], ["trainer", "trainer_log_prob"], ["entropy", "entropy"], ["advantage", "advantage"], ["version", "version"]].filter(([, name]) => R.known(filled[name][at])).map(([label, name]) => `${label} ${R.number(filled[name][at])}`);
    R.fill(detail, R.h("b", {}, count > 1 ? `${at} to ${at + count - 1} ` : `${at} `), R.h("code", {}, R.text(JSON.stringify(text[at] ?? "").slice(0, 80))), ` ${filled.drawn[at] ? facts.join(" · ") : "not sampled by the policy"}`);
  };
  const show = () => {
    const scale = R.heatScale(R.HEATS[heat], filled, text.length);
    R.fill(legend, scale.legend);
    R.fill(room, runs.slice(0, most).map(({ at, count }, place) => R.h(filled.drawn[at] ? "span.token" : "span.token.masked", { "data-at": place, style: filled.drawn[at] ? scale.style(at) : {} }, R.named(text[at].replaceAll("\n", "↵\n")), count > 1 ? ` × ${R.count(count)} ` : null)));
    if (most < runs.length) room.append(R.h("button.more", { type: "button", onclick: () => ((most = Infinity), show()) }, `Show all ${R.count(text.length)} tokens`));
  };
  let at = -1;
  const choose = (next) => {
    const spans = room.querySelectorAll(".token");
    at = Math.max(0, Math.min(spans.length - 1, next));
    for (const one of room.querySelectorAll(".chosen")) one.classList.remove("chosen");
    spans[at]?.classList.add("chosen");
    spans[at]?.scrollIntoView({ block: "nearest" });
    describe(at);
  };
  room.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".token");
    if (token) describe((at = Number(token.dataset.at)));
  });
  room.addEventListener("click", (event) => event.target.closest(".token") && choose(Number(event.target.closest(".token").dataset.at)));
  room.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (move) event.preventDefault(), event.stopPropagation(), choose(at + move);
  });
  const usable = Object.entries(R.HEATS).filter(([, one]) => text.some((_, place) => filled.drawn[place] && R.known(one.of(filled, place))));
  if (!usable.some(([name]) => name === heat)) heat = usable[0]?.[0] || heat;
  if (usable.some(([name]) => name === given.heat)) heat = given.heat;
  show();
  const pick = R.select("Colour", heat, usable.map(([name, one]) => [name, one.name]), (value) => {
    heat = value;
    history.replaceState(null, "", R.link("sample", { ...given, heat }));
    show();
  });
  return R.h("section.card.heat", { id: "tokens" }, R.h("div.heading", {}, R.h("h2", {}, "Tokens"), R.h("span.push", {}), pick), legend, detail, room);
};

R.heatScale = (heat, columns, count) => {
  const values = [];
  for (let at = 0; at < count; at++) if (columns.drawn[at] && R.known(heat.of(columns, at))) values.push(heat.of(columns, at));
  const sorted = values.map(Math.abs).sort((a, b) => a - b);
  // The 98th percentile: one outlier must not make all the others pale.
  const most = sorted[Math.floor(sorted.length * 0.98)] || sorted[sorted.length - 1] || 1;
  const mix = (color, part) => ({ background: `color-mix(in srgb, var(${color}) ${Math.round(100 * part)}%, transparent)` });
  if (heat.steps) {
    const versions = [...new Set(values)].sort((a, b) => a - b);
    const style = (at) => (R.known(heat.of(columns, at)) ? mix(`--series-${versions.indexOf(heat.of(columns, at)) % 12}`, 0.35) : {});
    return { style, legend: versions.map((value, place) => R.h("span.key", {}, R.h("i", { style: mix(`--series-${place % 12}`, 0.35) }), String(value))) };
  }
  const style = (at) => {
    const value = heat.of(columns, at);
    if (!R.known(value)) return {};
    return mix(heat.signed ? (value < 0 ? "--heat-down" : "--heat-up") : "--heat", 0.75 * Math.min(1, Math.abs(value) / most));
  };
  const ramp = (color) => [0.05, 0.2, 0.4, 0.6, 0.75].map((part) => R.h("i", { style: mix(color, part) }));
  const ends = heat.signed ? [R.h("span", {}, R.signed(-most)), ramp("--heat-down").reverse(), ramp("--heat-up"), R.h("span", {}, R.signed(most))] : [R.h("span", {}, "0"), ramp("--heat"), R.h("span", {}, `${R.number(most)} and more`)];
  return { style, legend: [R.h("span.ramp", {}, ends), R.h("span.faint", {}, heat.unit), R.h("span.key", {}, R.h("i.masked", {}), "not sampled")] };
};
