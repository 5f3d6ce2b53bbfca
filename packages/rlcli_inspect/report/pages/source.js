// Where the pages get their data: from the server of `rlcli view`, or from the report itself.
"use strict";

class Refused extends Error {}

class ViewSource {
  constructor() {
    this.live = true;
    this.token = new URLSearchParams(location.search).get("token");
  }
  async ask(what, parameters = {}) {
    const given = Object.entries(parameters).filter(([, value]) => R.known(value) && value !== "" && value !== false);
    const query = new URLSearchParams([...given.map(([key, value]) => [key, String(value)]), ["token", this.token]]);
    let response;
    try {
      response = await fetch(`/api/${what}?${query}`, { cache: "no-store" });
    } catch (error) {
      throw new Refused("rlcli view has ended. Start it again to continue.");
    }
    // Another rlcli view listens here now.
    if (response.status === 403) throw new Refused((await response.text()).replace("403: ", ""));
    const found = await response.json();
    if (!response.ok) throw new Refused(found.error);
    return found;
  }
}

class ReportSource {
  constructor() {
    this.live = false;
    this.blocks = new Map([...document.querySelectorAll("script[data-name]")].map((block) => [block.dataset.name, block]));
    this.data = JSON.parse(this.blocks.get("data").textContent);
    this.pieces = new Map();
    this.waiting = new Map();
    window.rlcliPiece = (name, piece) => {
      this.waiting.get(name)?.(piece);
      this.waiting.delete(name);
    };
  }

  async ask(what, parameters = {}) {
    const run = Number(parameters.run || 0);
    if (what === "index" || what === "compare") return this.data[what];
    if (!this.data.overview[run]) throw new Refused(`no run ${run}`);
    return this[what](run, parameters);
  }
  overview(run) {
    return this.data.overview[run];
  }
  signals(run) {
    return this.data.signals[run];
  }
  series(run, { names }) {
    return Object.fromEntries(names.split(",").map((name) => [name, this.data.series[run][name] || [[], []]]));
  }
  time(run, { step }) {
    const steps = Object.keys(this.data.time[run]).map(Number).sort((a, b) => a - b);
    if (!steps.length) return { step: null, lanes: [] };
    const wanted = R.known(step) && step !== "" ? Number(step) : steps[steps.length - 1];
    const found = this.data.time[run][wanted];
    if (!found) throw new Refused(`step ${wanted} has no times in this report`);
    const at = steps.indexOf(wanted);
    return { step: wanted, start: found.start, lanes: found.lanes, previous: steps[at - 1] ?? null, next: steps[at + 1] ?? null };
  }

  steps(run, kind) {
    return this.data.steps[run][kind] || [];
  }
  async piece(run, kind, step) {
    const name = `${run}/${kind}/${step}`;
    if (!this.steps(run, kind).includes(step)) throw new Refused(`step ${step} has no samples in this report; rlcli view shows all`);
    if (!this.pieces.has(name)) {
      this.pieces.set(name, this.data.pieces ? this.load(name) : ReportSource.unpacked(this.blocks.get(name).textContent));
      // The pages show few steps at a time: older pieces are loaded again when they are needed.
      if (this.pieces.size > 40) this.pieces.delete(this.pieces.keys().next().value);
    }
    return this.pieces.get(name);
  }
  // The value of a block that was compressed by gzip, in base64.
  static async unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }
  load(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      this.waiting.set(name, resolve);
      script.src = `data/${name}.js`;
      script.onload = () => script.remove();
      script.onerror = () => {
        this.pieces.delete(name);
        script.remove();
        reject(new Refused(`data/${name}.js is missing: keep the files of the report together`));
      };
      document.head.append(script);
    });
  }

  async samples(run, wanted) {
    const kind = wanted.kind === "evaluations" ? "evaluations" : "samples";
    const [at, start] = (wanted.cursor || "").split(".").map(Number);
    let steps = this.steps(run, kind).filter((step) => R.between(step, wanted.first, wanted.last));
    if (!wanted.oldest) steps = steps.slice().reverse();
    const total = steps.length;
    if (wanted.cursor) steps = steps.filter((step) => (wanted.oldest ? step >= at : step <= at));
    const rows = [];
    for (const [done, step] of steps.entries()) {
      const begin = wanted.cursor && step === at ? start : 0;
      if (rows.length >= 50 || (done >= 20 && this.data.pieces)) return { rows, cursor: `${step}.${begin}`, searched: done, steps: total };
      const piece = await this.piece(run, kind, step);
      const all = piece.groups.flatMap((group) => group.rows.map((row) => [group, row]));
      for (let place = begin; place < all.length; place++) {
        if (!ReportSource.kept(...all[place], wanted)) continue;
        if (rows.length >= 50) return { rows, cursor: `${step}.${place}`, searched: done, steps: total };
        rows.push({ step, ...ReportSource.listed(...all[place], wanted.text) });
      }
    }
    return { rows, cursor: null, searched: steps.length, steps: total };
  }
  static kept(group, row, wanted) {
    if (wanted.outcome && row.outcome !== wanted.outcome) return false;
    if (wanted.finish_reason && row.finish_reason !== wanted.finish_reason) return false;
    if (wanted.prompt_id && group.prompt_id !== wanted.prompt_id) return false;
    if (wanted.left_out && !row.left_out) return false;
    if (wanted.tokens && !row.token_columns) return false;
    if (!R.between(row.score, wanted.low, wanted.high)) return false;
    if (!R.between(row.response_tokens, wanted.shortest, wanted.longest)) return false;
    if (!wanted.text) return true;
    const needle = wanted.text.toLowerCase();
    const texts = [row.answer, ...(row.asked || group.messages).concat(row.said).map((message) => message.content)];
    return texts.some((text) => (text || "").toLowerCase().includes(needle));
  }
  static listed(group, row, mark) {
    const asked = row.asked || group.messages;
    return {
      ...row,
      ground_truth: group.ground_truth,
      tokens: Boolean(row.token_columns),
      prompt: R.excerpt(asked.length ? R.worded(asked[asked.length - 1].content, asked[asked.length - 1].images || []) : "", mark),
      images: asked.flatMap((message) => message.images || []),
      response: R.excerpt(R.response(row), mark),
    };
  }

  async image(run, { digest }) {
    const own = this.data.pictures[run];
    if (!Object.hasOwn(own.pieces, digest)) return { problem: own.reasons[own.problems[digest] ?? 0] };
    return { src: (await this.piece(run, "pictures", own.pieces[digest]))[digest] };
  }
  async group(run, { kind, step, prompt, group }) {
    const piece = await this.piece(run, kind || "samples", Number(step));
    const found = piece.groups.filter((one) => one.prompt_id === prompt && (!R.known(group) || group === "" || one.group === Number(group))).sort((a, b) => a.group - b.group)[0];
    if (!found) throw new Refused(`step ${step} has no such group in this report; rlcli view shows all`);
    const rows = found.rows.map((row) => ({ ...row, tokens: Boolean(row.token_columns) }));
    const at = piece.groups.indexOf(found);
    const [previous, next] = [at - 1, at + 1].map((place) => piece.groups[place]).map((one) => (one ? { prompt: one.prompt_id, group: one.group } : null));
    return { ...found, kind: kind || "samples", step: Number(step), rows, previous, next };
  }
  async sample(run, parameters) {
    const found = await this.group(run, parameters);
    const row = found.rows.find((one) => (one.sample || 0) === Number(parameters.sample || 0));
    if (!row) throw new Refused(`the group has no sample ${parameters.sample}`);
    return { ...found, ...row, messages: row.asked || found.messages, samples: found.rows.map((one) => one.sample || 0), rows: null };
  }
  async prompt(run, { kind, prompt, cursor }) {
    const at = cursor ? Number(cursor.split(".")[0]) : -Infinity;
    const steps = this.steps(run, kind || "samples");
    const left = steps.filter((step) => step >= at);
    const visits = [];
    for (const [done, step] of left.entries()) {
      if (done >= 20 && this.data.pieces) return { visits, cursor: `${step}.0`, searched: done, steps: steps.length };
      for (const group of (await this.piece(run, kind || "samples", step)).groups.filter((one) => one.prompt_id === prompt)) {
        const scores = group.rows.map((row) => row.score).filter(R.known);
        const passed = group.rows.filter((row) => row.outcome === "ok").length;
        visits.push([step, group.group, group.rows.length, passed, scores.length ? scores.reduce((a, b) => a + b) / scores.length : null]);
      }
    }
    return { visits, cursor: null, searched: left.length, steps: steps.length };
  }
}

R.between = (value, low, high) => {
  const given = (end) => R.known(end) && end !== "";
  if (!given(low) && !given(high)) return true;
  return R.known(value) && (!given(low) || value >= Number(low)) && (!given(high) || value <= Number(high));
};
R.response = (row) => {
  for (let at = (row.said || []).length - 1; at >= 0; at--) if (row.said[at].role === "assistant") return row.said[at].content;
  return "";
};
R.excerpt = (text, mark) => {
  const most = 280;
  const at = mark ? text.toLowerCase().indexOf(mark.toLowerCase()) : -1;
  const begin = at + (mark || "").length > most ? Math.max(0, at - 90) : 0;
  return (begin ? "…" : "") + text.slice(begin, begin + most) + (begin + most < text.length ? "…" : "");
};
R.Refused = Refused;
R.ViewSource = ViewSource;
R.ReportSource = ReportSource;
