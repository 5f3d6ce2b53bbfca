// Samples: a list with filters, loaded page by page as it is scrolled.
"use strict";

R.FILTERS = ["kind", "text", "first", "last", "outcome", "low", "high", "shortest", "longest", "finish_reason", "prompt_id", "left_out", "tokens", "oldest"];

R.pages.samples = async (room, given, page) => {
  const wanted = Object.fromEntries(R.FILTERS.map((name) => [name, given[name]]).filter(([, value]) => value));
  const list = R.h("ol.samples", { "aria-label": "samples" });
  const status = R.h("p.status", { role: "status" });
  const end = R.h("div.end", {});
  let again = 0;
  const set = (name, value) => {
    if (value) wanted[name] = value;
    else delete wanted[name];
    history.replaceState(null, "", R.link("samples", wanted));
    clearTimeout(again);
    again = setTimeout(() => begin(), 250);
  };
  R.fill(room, R.h("h1", {}, "Samples"), R.filters(wanted, set), R.h("div.fresh", {}), status, list, end);

  let search = 0;
  const begin = () => {
    list.replaceChildren();
    load(++search, "");
  };
  let [searched, busy, cursor] = [0, false, null];
  const load = async (own, from) => {
    if (!from) searched = 0;
    [busy, cursor] = [true, null];
    const before = list.children.length;
    const alive = () => own === search && page.alive();
    let [next, found] = [from, null];
    try {
      do {
        found = await R.ask("samples", { ...wanted, cursor: next });
        if (!alive()) return;
        for (const row of found.rows) list.append(R.sampleItem(row, wanted));
        searched += found.searched;
        next = found.cursor;
        R.fill(status, R.searchStatus(list.children.length, Math.min(searched, found.steps), found.steps, next));
      } while (next && list.children.length - before < 40);
    } catch (error) {
      if (alive()) R.fill(status, R.h("span.bad", {}, R.text(error.message)));
      busy = false;
      return;
    }
    [busy, cursor] = [false, next];
    R.fill(end, next ? R.h("button.more", { type: "button", onclick: more }, "Show more") : null);
  };
  const more = () => cursor && !busy && load(search, cursor);
  // An observation may be older than the rows that a load has just added, so the position is read again.
  const margin = 600; // pixels
  const near = () => end.getBoundingClientRect().top < innerHeight + margin;
  const watcher = new IntersectionObserver(() => near() && more(), { rootMargin: `${margin}px` });
  watcher.observe(end);
  page.onleave(() => (watcher.disconnect(), clearTimeout(again), search++));
  page.items = () => [...list.children];
  page.onnews = (state) => {
    const news = room.querySelector(".fresh");
    R.fill(news, R.h("button.more", { type: "button", onclick: () => (R.fill(news), begin(), scrollTo(0, 0)) }, `New samples, up to step ${state.samples[2] ?? "–"}: show them`));
  };
  await load(++search, "");
};

R.searchStatus = (count, searched, steps, next) => {
  if (!steps) return "No samples of these steps.";
  if (!count && !next) return `No sample of ${R.plural(steps, "step")} matches.`;
  if (!searched) return `${R.plural(count, "sample")} so far`;
  return `${R.plural(count, "sample")}${next ? " so far" : ""} · ${R.count(searched)} of ${R.plural(steps, "step")} searched`;
};

R.filters = (wanted, set) => {
  const fields = (name, label, attributes) => R.input(label, wanted[name], attributes, (value) => set(name, value.trim()));
  const number = { type: "number", step: "any", inputmode: "decimal" };
  const pair = (label, low, high, more) => R.h("fieldset.pair", {}, R.h("legend", {}, label), R.input("from", wanted[low], { ...number, ...more }, (value) => set(low, value)), R.h("span", {}, "–"), R.input("to", wanted[high], { ...number, ...more }, (value) => set(high, value)));
  const check = (name, label) => R.h("label.check", {}, R.h("input", { type: "checkbox", checked: Boolean(wanted[name]), onchange: (event) => set(name, event.target.checked ? "1" : "") }), label);
  // On a phone the other filters are folded.
  const fold = (event) => event.currentTarget.setAttribute("aria-expanded", String(form.classList.toggle("open")));
  const more = R.h("button.fold", { type: "button", "aria-controls": "filters", "aria-expanded": "false", onclick: fold }, "More filters");
  const form = R.h(
    "form.filters",
    { onsubmit: (event) => event.preventDefault(), role: "search" },
    fields("text", "Text", { type: "search", id: "search", placeholder: "in prompts and responses  ( / )" }),
    more,
    R.h("div.rest", { id: "filters" },
    R.select("From", wanted.kind, [["", "training"], ["evaluations", "evaluations"]], (value) => set("kind", value)),
    R.select("Outcome", wanted.outcome, [["", "any"], ...R.index.outcomes.map((name) => [name, name.replace("_", " ")])], (value) => set("outcome", value)),
    R.select("Stop", wanted.finish_reason, [["", "any"], ...R.index.finish_reasons.map((name) => [name, name === "length" ? "cut off" : name])], (value) => set("finish_reason", value)),
    R.select("Order", wanted.oldest, [["", "newest first"], ["1", "oldest first"]], (value) => set("oldest", value)),
    pair("Steps", "first", "last", { min: 0, step: 1 }),
    pair("Reward", "low", "high"),
    pair("Tokens", "shortest", "longest", { min: 0, step: 1 }),
    fields("prompt_id", "Prompt id", { type: "search" }),
    R.h("div.checks", {}, check("left_out", "left out of training"), check("tokens", "with tokens"))),
  );
  form.classList.toggle("open", Object.keys(wanted).some((name) => name !== "text"));
  return form;
};

R.MOST_LISTED = 4;
R.place = (row, kind) => ({ kind: kind || null, step: row.step, prompt: row.prompt_id, group: row.group, sample: row.sample });
R.sampleItem = (row, wanted) => {
  const place = R.place(row, wanted.kind);
  return R.h(
    `li.sample.${R.kindOf(row)}`,
    { tabindex: -1 },
    R.h("a.cover", { href: R.link("sample", place), "aria-label": `sample ${row.sample} of step ${row.step}` }),
    R.h("div.badges", {}, R.h("span.fact", {}, `step ${row.step}`), R.badges(row), row.tokens ? R.h("span.pill", {}, "tokens") : null, R.h("span.push", {}), R.h("span.fact", {}, R.h("a", { href: R.link("group", { ...place, sample: null }) }, "group"), " ", R.h("a", { href: R.link("prompt", { kind: wanted.kind, prompt: row.prompt_id }) }, "prompt"))),
    row.images?.length ? R.h("div.images.small", {}, row.images.slice(0, R.MOST_LISTED).map((image, place) => R.image(image, { plain: true, place, count: row.images.length })), row.images.length > R.MOST_LISTED ? R.h("span.faint", {}, `and ${row.images.length - R.MOST_LISTED} more`) : null) : null,
    R.h("p.asked", { dir: "auto" }, R.text(row.images?.length ? row.prompt.replaceAll("\n", " ") : row.prompt, wanted.text)),
    R.h("p.answered", { dir: "auto" }, row.response ? R.text(row.response, wanted.text) : R.h("span.faint", {}, "empty response")),
  );
};
