// What several pages show: scores, messages, tables, notes.
"use strict";

R.kindOf = (row) => (row.outcome === "ok" ? "good" : row.outcome === "wrong" || row.outcome === "no_answer" ? "bad" : "odd");
R.outcome = (row) => R.h(`span.pill.${R.kindOf(row)}`, {}, (row.outcome || "no verdict").replace("_", " "));
R.stopped = (reason) => (reason === "length" ? "cut off at the limit" : reason || "");
R.score = (row) => R.h("span.fact", {}, "score ", R.h("b.figure", {}, R.number(row.score)));
R.badges = (row) => [
  R.outcome(row),
  R.score(row),
  R.known(row.advantage) ? R.h(`span.figure.${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "flat"}`, { title: "advantage" }, `A ${R.signed(row.advantage)}`) : null,
  R.known(row.response_tokens) ? R.h("span.fact", {}, R.plural(row.response_tokens, "token")) : null,
  row.finish_reason === "length" ? R.h("span.pill.odd", {}, "cut off") : null,
  (row.turns || 1) > 1 ? R.h("span.fact", {}, R.plural(row.turns, "turn")) : null,
  row.left_out ? R.h("span.pill.odd", { title: "not trained on" }, `left out: ${row.left_out}`) : null,
];

// A short value of a verdict, which a model may have made long.
R.brief = (value) => (R.known(value) ? R.prose(value, { tag: "code", most: 240 }) : R.h("code", {}, "–"));
R.section = (title, ...children) => R.h("section.card", {}, title ? R.h("h2", {}, title) : null, ...children);
R.empty = (text, ...more) => R.h("div.empty", {}, R.h("p", {}, text), ...more);
R.notes = (notes) => (notes.length ? R.h("aside.notes", { "aria-label": "notes" }, R.h("b", {}, "Not everything could be read"), R.h("ul", {}, notes.map((note) => R.h("li", {}, R.text(note))))) : null);
R.facts = (facts) =>
  R.h("dl.facts", {}, facts.filter(([, value]) => R.known(value) && value !== "").map(([name, value]) => [R.h("dt", {}, name), R.h("dd", { dir: "auto" }, typeof value === "string" ? R.text(value) : value)]));
R.table = (columns, rows, kind = "") =>
  R.h("div.scroll", { tabindex: 0, role: "region", "aria-label": "table" }, R.h(`table${kind}`, {}, R.h("thead", {}, R.h("tr", {}, columns.map((name) => R.h("th", { scope: "col" }, name)))), R.h("tbody", {}, rows.map((row) => R.h("tr", {}, row.map((cell) => R.h("td", {}, typeof cell === "string" ? R.text(cell) : cell)))))));

// An advantage as a bar to the left (below 0) or to the right of its middle. most: the largest of the group.
R.advantage = (value, most) => {
  if (!R.known(value)) return R.h("span.faint", {}, "not trained on");
  const size = `${Math.min(50, (50 * Math.abs(value)) / (most || 1))}%`;
  const bar = R.h(value < 0 ? "i.down" : "i.up", { style: value < 0 ? { right: "50%", width: size } : { left: "50%", width: size } });
  return R.h("span.advantage", { title: `advantage ${R.signed(value)}` }, R.h("span.track", {}, bar), R.h("b", {}, R.signed(value)));
};

R.NAMES = { system: "System", user: "User", assistant: "Model", tool: "Tool", developer: "Developer" };
// Messages that the policy did not generate are dimmed.
R.message = (message, { drawn = false, mark = "", most, score = null } = {}) => {
  const name = R.NAMES[message.role] || message.role;
  const head = R.h("header", {}, R.h("b", {}, R.text(name)), message.name ? R.h("code", {}, R.text(message.name)) : null, R.known(score) ? R.h("span", {}, "turn reward ", R.h("b.figure", {}, R.signed(score))) : null);
  const body = [];
  if (message.reasoning_content) body.push(R.h("details", {}, R.h("summary", {}, "Reasoning"), R.prose(message.reasoning_content, { mark, most })));
  if (message.images) body.push(R.withImages(message.content || "", message.images, { mark, most, missing: message.content_left_out }));
  else if (message.content || !message.tool_calls) body.push(R.prose(message.content, { mark, most, missing: message.content_left_out }));
  for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : []) body.push(R.toolCall(call));
  return R.h(`article.message.${drawn ? "drawn" : "given"}`, {}, head, body);
};
R.toolCall = (call) => {
  const made = call && call.function ? call.function : call || {};
  let given = made.arguments;
  if (typeof given === "string") {
    try {
      given = JSON.parse(given);
    } catch (error) {
      // Shown as the model wrote it.
    }
  }
  const shown = typeof given === "string" ? given : JSON.stringify(given ?? {}, null, 1);
  return R.h("div.call", {}, R.h("b", {}, "calls ", R.h("code", {}, R.text(made.name || "a tool"))), R.prose(shown, { tag: "pre.prose" }));
};

R.select = (label, value, choices, onchange) =>
  R.h("label.field", {}, R.h("span", {}, label), R.h("select", { onchange: (event) => onchange(event.target.value) }, choices.map(([key, name]) => R.h("option", { value: key, selected: String(key) === String(value ?? "") }, name))));
R.input = (label, value, attributes, oninput) => R.h("label.field", {}, R.h("span", {}, label), R.h("input", { value: value ?? "", autocomplete: "off", spellcheck: "false", ...attributes, oninput: (event) => oninput(event.target.value) }));

// A list whose items j and k select; Enter follows the item's first link.
R.choose = (items, place) => {
  const item = items[Math.max(0, Math.min(items.length - 1, place))];
  for (const one of items) one.removeAttribute("aria-current");
  item?.setAttribute("aria-current", "true");
  item?.focus({ preventScroll: true });
  item?.scrollIntoView({ block: "nearest" });
};
