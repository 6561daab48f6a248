// Causes of the bubble: a bar of lanes × makespan and a table, with the predicted causes if they are known.
function buildCauses(timeline, { prediction, isTold }, causes) {
  const bar = buildBar(timeline, causes);
  if (timeline === prediction && isTold) return element("div", { className: "causes" }, [bar]);
  const predicted = timeline === prediction ? null : prediction?.causes;
  return element("div", { className: "causes" }, [bar, buildCauseTable(timeline, predicted, causes)]);
}

function buildBar(timeline, causes) {
  const compute = { field: "compute", name: "compute", share: 1 - timeline.bubble };
  const parts = [compute, ...causes.map((cause) => ({ ...cause, share: timeline.causes[cause.field] }))];
  const made = parts.filter(({ share }) => share > 0).map(buildPart);
  return element("div", { className: "bar", role: "img", "aria-label": parts.map(shareText).join(", ") }, made);
}

function buildCauseTable(timeline, predicted, causes) {
  const shares = timeline.causes;
  const names = [
    "cause of the bubble",
    "share of lanes × makespan",
    ...(predicted ? ["predicted"] : []),
    "time per step",
    "meaning",
  ];
  const rows = causes.map(({ field, name, words }) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = `var(--cause-${field})`;
    const cells = [
      formatShare(shares[field]),
      ...(predicted ? [formatShare(predicted[field])] : []),
      formatSeconds(shares[field] * timeline.stepSeconds, 3),
      words,
    ];
    return element("tr", {}, [
      element("th", { scope: "row" }, [swatch, name]),
      ...cells.map((text) => element("td", { text })),
    ]);
  });
  const heading = element(
    "tr",
    {},
    names.map((text) => element("th", { scope: "col", text })),
  );
  return element("table", {}, [element("thead", {}, [heading]), element("tbody", {}, rows)]);
}

function buildPart(part) {
  const made = element("span", { title: shareText(part), text: part.share > 0.15 ? shareText(part) : "" });
  made.style.flexGrow = part.share;
  made.style.background = `var(--cause-${part.field})`;
  return made;
}

function shareText({ name, share }) {
  return `${name} ${formatShare(share)}`;
}
