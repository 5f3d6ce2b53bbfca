// Images of prompts, where their markers are: thumbnails that are loaded when they come into view.
"use strict";

R.MARKER = "<image>";
R.imageName = (image) => (image.width && image.height ? `[image ${image.width} x ${image.height}]` : "[image]");

// A text with the names of images in place of their markers, as `worded` in Python.
R.worded = (text, images) => {
  const parts = text.split(R.MARKER);
  const names = images.map(R.imageName);
  const last = Math.min(names.length, parts.length - 1);
  const shown = parts.slice(0, last).map((part, at) => part + names[at]).join("") + parts.slice(last).join(R.MARKER);
  return shown + names.slice(last).map((name) => ` ${name}`).join("");
};

R.seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    R.seen.unobserve(entry.target);
    entry.target.load?.();
  }
}, { rootMargin: "300px" });

// One image; a click enlarges it, unless it is `plain`. Where it cannot be shown, its name and the reason.
R.image = (image, { plain = false, place = 0, count = 1 } = {}) => {
  const name = R.imageName(image);
  const box = R.h("span.image", {}, R.h("span.faint", {}, name));
  const alt = `image${count > 1 ? ` ${place + 1} of ${count}` : ""}${image.width ? `, ${image.width} x ${image.height} pixels` : ""}`;
  const given = { digest: image.digest, where: image.where };
  box.load = async () => {
    const found = image.digest ? await R.ask("image", given).catch((error) => ({ problem: error.message })) : { problem: "the run saved no digest of it" };
    if (!found.src) return R.fill(box, R.h("span.faint.missing", {}, name, plain ? null : [" not shown: ", R.text(found.problem)]));
    const thumbnail = R.h("img", { src: found.src, alt });
    R.fill(box, plain ? thumbnail : R.h("button", { type: "button", title: "Enlarge", "aria-label": `enlarge ${alt}`, onclick: () => R.enlarge(found.src, alt, given) }, thumbnail));
  };
  R.seen.observe(box);
  return box;
};

R.enlarge = (src, alt, given) => {
  const shown = R.h("img", { src, alt });
  const dialog = R.h("dialog.enlarged", { "aria-label": "image", onclose: () => dialog.remove(), onclick: () => dialog.close() }, shown, R.h("button", { type: "button", autofocus: true }, "Close"));
  document.body.append(dialog);
  dialog.showModal();
  // A report has the thumbnail alone.
  if (R.source.live) R.ask("image", { ...given, large: "1" }).then((found) => found.src && (shown.src = found.src), () => {});
};

// The text of a message with its images in place of the markers; those without a marker come last.
R.withImages = (text, images, options) => {
  const parts = text.split(R.MARKER);
  const [nodes, count] = [[], images.length];
  let row = null;
  const add = (part, more) => {
    if (!part.trim()) return;
    nodes.push(R.prose(part.replace(/^\n|\n$/g, ""), { ...options, ...more }));
    row = null;
  };
  images.forEach((image, place) => {
    add(parts[place] ?? "", { missing: 0 });
    if (!row) nodes.push((row = R.h("div.images", {})));
    row.append(R.image(image, { place, count }));
  });
  add(parts.slice(count).join(R.MARKER), {});
  return nodes;
};
