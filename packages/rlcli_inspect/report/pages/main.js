// Routes, the bar at the top, keys, and news of a live run.
"use strict";

R.TABS = [["overview", "Overview"], ["samples", "Samples"], ["time", "Time"], ["signals", "Signals"], ["compare", "Compare"]];
R.UNDER = { group: "samples", sample: "samples", prompt: "samples" };
R.POLL_MS = 2000;
R.ask = (what, parameters = {}) => R.source.ask(what, { run: R.run, ...parameters });

R.route = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: Object.hasOwn(R.pages, path) ? path : "overview", given: Object.fromEntries(new URLSearchParams(query || "")) };
};
R.tabs = () => R.TABS.filter(([name]) => name !== "compare" || R.index.compare);

R.bar = (name) => {
  const runs = R.index.runs;
  const current = R.UNDER[name] || name;
  const picker =
    runs.length > 1
      ? R.h("select.run", { "aria-label": "run", onchange: (event) => ((R.run = Number(event.target.value)), (location.hash = R.link(R.UNDER[name] || name, { run: R.run || null }))) }, runs.map((run, at) => R.h("option", { value: at, selected: at === R.run }, run.name)))
      : R.h("span.run", {}, R.text(runs[0].name));
  R.fill(
    document.getElementById("bar"),
    R.h("a.brand", { href: R.link("overview", {}) }, "rlcli"),
    picker,
    R.h("nav", { "aria-label": "pages" }, R.tabs().map(([key, title]) => R.h("a", { href: R.link(key, {}), "aria-current": key === current ? "page" : null }, title))),
    R.source.live ? R.h("span.live", { role: "status" }, R.live()) : null,
    R.h("button.help", { type: "button", "aria-label": "keys", onclick: R.help }, "?"),
  );
};
R.live = () => (R.gone ? R.h("span.bad", {}, "not connected") : R.index.runs[R.run].state === "alive" ? [R.h("i.pulse", {}), `step ${R.count(R.index.runs[R.run].step)}`] : R.index.runs[R.run].state);

R.turn = 0;
R.show = async ({ keep = false } = {}) => {
  const { name, given } = R.route();
  const turn = ++R.turn;
  for (const leave of R.page?.leave || []) leave();
  const page = { name, given, leave: [], alive: () => turn === R.turn };
  page.onleave = (action) => page.leave.push(action);
  R.page = page;
  const wanted = Number(given.run || 0);
  R.run = R.index.runs[wanted] ? wanted : 0;
  given.run = R.run;
  R.bar(name);
  const main = document.getElementById("main");
  const room = R.h("div.page", { "data-page": name });
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · ${R.index.runs[R.run].name} · rlcli`;
  const [top, slow] = [scrollY, setTimeout(() => page.alive() && !keep && R.fill(main, R.h("p.loading", {}, "Loading…")), 200)];
  const done = R.pages[name](room, given, page).catch((error) => {
    if (!(error instanceof R.Refused)) console.error(error);
    R.fill(room, R.empty(error.message || String(error), R.a("overview", {}, "Overview")));
  });
  // A list shows itself while it is still searching.
  await Promise.race([done, new Promise((resolve) => setTimeout(resolve, name === "samples" || name === "prompt" ? 80 : 1e9))]);
  clearTimeout(slow);
  if (!page.alive()) return;
  for (const chart of main.querySelectorAll("figure")) chart.destroy?.();
  const before = keep ? R.stateOf(main) : null;
  R.fill(main, room);
  if (before) R.restore(main, before);
  scrollTo(0, keep ? top : 0);
  await done;
  if (page.alive()) document.documentElement.dataset.ready = String(turn);
};

// When a page is drawn anew with news of the run: what is open stays open, and the focus stays where it is.
R.FOCUSABLE = "a, button, input, select, summary, [tabindex]";
R.stateOf = (main) => ({ open: [...main.querySelectorAll("details")].map((one) => one.open), focus: [...main.querySelectorAll(R.FOCUSABLE)].indexOf(document.activeElement) });
R.restore = (main, before) => {
  const details = [...main.querySelectorAll("details")];
  if (details.length === before.open.length) details.forEach((one, at) => (one.open = before.open[at]));
  if (before.focus >= 0) main.querySelectorAll(R.FOCUSABLE)[before.focus]?.focus({ preventScroll: true });
};

R.KEYS = [
  ["j k, ↓ ↑", "next, previous"],
  ["Enter", "open what is selected"],
  ["[ ]", "previous, next sample, group or step"],
  ["/", "search samples"],
  ["1 to 5", "the pages of the bar"],
  ["u", "up: from a sample to its group, to the samples"],
  ["Esc", "close, or leave a field"],
  ["?", "these keys"],
];
R.help = () => {
  const open = document.querySelector("dialog");
  if (open) return open.close();
  const dialog = R.h("dialog", { "aria-label": "keys", onclose: () => dialog.remove() }, R.h("h2", {}, "Keys"), R.h("dl.facts", {}, R.KEYS.map(([keys, what]) => [R.h("dt", {}, R.h("kbd", {}, keys)), R.h("dd", {}, what)])), R.h("form", { method: "dialog", onsubmit: (event) => (event.preventDefault(), dialog.close()) }, R.h("button", { autofocus: true }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
};

R.move = (by) => {
  const items = R.page.items?.() || [];
  if (!items.length) return false;
  const at = items.findIndex((item) => item.getAttribute("aria-current"));
  R.choose(items, at < 0 ? (by > 0 ? 0 : items.length - 1) : at + by);
  return true;
};
R.follow = (link) => link && (location.hash = link);
R.press = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape" && field) return field.blur();
  if (field || document.querySelector("dialog[open]")) return;
  const actions = {
    j: () => R.move(1),
    k: () => R.move(-1),
    ArrowDown: () => R.move(1),
    ArrowUp: () => R.move(-1),
    "[": () => R.follow(R.page.neighbours?.[0]),
    "]": () => R.follow(R.page.neighbours?.[1]),
    "?": () => R.help(),
    u: () => R.follow([...document.querySelectorAll(".crumbs a")].pop()?.getAttribute("href")),
    "/": () => {
      const field = document.getElementById("search");
      if (field) return field.focus(), field.select(), true;
      location.hash = R.link("samples", {});
      return (R.searchNext = true);
    },
    Enter: () => !event.target.closest?.("a, button, summary") && R.follow(R.page.items?.().find((item) => item.getAttribute("aria-current"))?.querySelector("a")?.getAttribute("href")),
  };
  const tab = /^[1-9]$/.test(event.key) ? R.tabs()[Number(event.key) - 1] : null;
  if (tab) location.hash = R.link(tab[0], {});
  else if (!actions[event.key] || actions[event.key]() === false) return;
  event.preventDefault();
};

// Asks whether the run has recorded something. Only while the page is visible.
R.poll = async () => {
  if (!document.hidden) {
    try {
      const state = await R.source.ask("state");
      const news = state.news !== R.index.news || R.gone;
      R.gone = false;
      R.index.news = state.news;
      state.runs.forEach((run, at) => Object.assign(R.index.runs[at], run, { name: R.index.runs[at].name }));
      if (news) R.page.onnews ? R.page.onnews(state.runs[R.run]) : ["overview", "time"].includes(R.page.name) && !R.page.given.step && !document.activeElement?.closest("input, select") && (await R.show({ keep: true }));
    } catch (error) {
      R.gone = true;
    }
    R.fill(document.querySelector(".live"), R.live());
  }
  setTimeout(R.poll, R.POLL_MS);
};

R.start = async () => {
  R.source = R.mode() === "view" ? new R.ViewSource() : new R.ReportSource();
  R.run = 0;
  try {
    R.index = await R.source.ask("index");
  } catch (error) {
    return R.fill(document.getElementById("main"), R.empty(error.message));
  }
  addEventListener("hashchange", async () => {
    await R.show();
    if (R.searchNext) (R.searchNext = false), document.getElementById("search")?.focus();
  });
  addEventListener("keydown", R.press);
  document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), document.getElementById("main").focus()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => R.show({ keep: true }));
  await R.show();
  if (R.source.live) setTimeout(R.poll, R.POLL_MS);
};
R.start();
