// Page construction: the elements of the timeline page around the canvases.

// `others` has the timelines to compare with, if any: the fastest one and the prediction.
function buildSection(timeline, others, kinds, causes, signs) {
  const figures = figuresOf(timeline);
  const summary = figures.map(([name, value]) => `${name} ${value}`).join(", ");
  const lanes = buildPanel("lanes", "", `Lanes of ${timeline.name}: ${timeline.numLanes} lanes, ${summary}`);
  const held = timeline.memory.unit === "bytes" ? "bytes held by each lane" : "stage micro-batches held by each lane";
  const memory = buildPanel("curve memory", held, `Over time, ${held}: ${timeline.name}`);
  const bubble = buildPanel(
    "curve bubble",
    "bubble over time",
    `Share of lanes without compute over time: ${timeline.name}`,
  );
  const head = element("div", { className: "head" }, [
    element("h2", { text: timeline.name }),
    ...(others.isCompared ? [element("p", { className: "ratio", text: ratioText(timeline, others) })] : []),
    element(
      "dl",
      {},
      figures.map(([name, value]) =>
        element("div", {}, [element("dt", { text: name }), element("dd", { text: value })]),
      ),
    ),
  ]);
  const mark = element("div", { className: "mark" });
  lanes.box.append(mark);
  const node = element("section", { "aria-label": timeline.name }, [
    head,
    ...(timeline.causes ? [buildCauses(timeline, others, causes)] : []),
    ...buildDifference(timeline, others.prediction, kinds, causes),
    lanes.box,
    memory.box,
    bubble.box,
    buildTable(timeline, [...causes, ...signs]),
  ]);
  return { timeline, node, lanes, memory, bubble, mark, layout: null };
}

function buildPanel(className, title, label) {
  const canvas = element("canvas", { role: "img", "aria-label": label });
  const cursor = element("div", { className: "cursor" });
  const box = element("div", { className: `panel ${className}` }, [canvas, cursor]);
  if (title) box.prepend(element("h3", { text: title }));
  return { box, canvas, cursor };
}

function figuresOf(timeline) {
  const figures = [
    ["step", formatSeconds(timeline.stepSeconds)],
    ["bubble of the makespan", formatShare(timeline.bubble)],
    ["bubble of the longest lane span", formatShare(timeline.spanBubble)],
    ["peak saved stage micro-batches", String(Math.max(...timeline.peakSaved))],
  ];
  const peakBytes = Math.max(...timeline.peakBytes);
  return peakBytes > 0 ? [...figures, ["peak bytes", formatBytes(peakBytes)]] : figures;
}

function ratioText(timeline, { fastest, prediction }) {
  if (timeline === prediction) return "the prediction";
  if (timeline.isMeasured && prediction?.stepSeconds) {
    const ratio = formatRatio(timeline.stepSeconds / prediction.stepSeconds);
    const bubbles = `${formatShare(timeline.bubble)}, predicted ${formatShare(prediction.bubble)}`;
    return `${ratio} × the predicted step time; bubble ${bubbles}`;
  }
  if (timeline === fastest || !fastest.stepSeconds) return "the shortest step";
  const ratio = timeline.stepSeconds / fastest.stepSeconds;
  return ratio < 1.0005
    ? `the same step time as ${fastest.name}`
    : `${formatRatio(ratio)} × the step time of ${fastest.name}`;
}

// The figures of each lane as a table, for copying and for screen readers.
function buildTable(timeline, figures) {
  const shares = timeline.causes?.lanes.length ? figures : [];
  const isBytes = timeline.memory.unit === "bytes";
  const names = [
    "lane",
    "bubble of the makespan",
    ...shares.map(({ name }) => name),
    "peak saved stage micro-batches",
    ...(isBytes ? ["peak bytes"] : []),
  ];
  const rows = timeline.laneBubbles.map((bubble, lane) => {
    const cells = [
      formatShare(bubble),
      ...shares.map(({ field }) => formatShare(timeline.causes.lanes[lane][field])),
      timeline.peakSaved[lane],
      ...(isBytes ? [formatBytes(timeline.peakBytes[lane])] : []),
    ];
    return element("tr", {}, [
      element("th", { scope: "row", text: lane }),
      ...cells.map((text) => element("td", { text })),
    ]);
  });
  const heading = element("thead", {}, [
    element(
      "tr",
      {},
      names.map((text) => element("th", { scope: "col", text })),
    ),
  ]);
  return element("details", {}, [
    element("summary", { text: "Figures of each lane" }),
    element("table", {}, [heading, element("tbody", {}, rows)]),
  ]);
}

// One button per kind, pressed while the kind is shown; if lanes have several stages, also a legend of their shades.
function buildLegend(kinds, used, numShades, state, redraw) {
  for (const kind of used) {
    const { text, words, where } = kinds[kind];
    const swatch = element("span", { className: where === "LANE" ? "swatch" : "swatch strip" });
    swatch.style.background = `var(--kind-${text})`;
    const label = { "aria-pressed": "true", "aria-label": `${text}: ${words}`, title: `Show or hide: ${words}` };
    const button = element("button", { type: "button", ...label }, [
      swatch,
      where === "LANE" ? `${text} ${words}` : text,
    ]);
    button.addEventListener("click", () => {
      state.isHidden[kind] ^= 1;
      button.setAttribute("aria-pressed", String(!state.isHidden[kind]));
      redraw();
    });
    document.getElementById("legend").append(button);
  }
  if (numShades > 1) document.getElementById("legend").append(buildShades(kinds[used[0]].text, numShades));
}

const MOST_SWATCHES = 4;

function buildShades(kind, numShades) {
  const count = Math.min(numShades, MOST_SWATCHES);
  const swatches = Array.from({ length: count }, (_, at) => {
    const swatch = element("span", { className: "swatch" });
    const paler = 100 * PALEST * (at / (count - 1));
    swatch.style.background = `color-mix(in srgb, var(--kind-${kind}), var(--panel) ${paler}%)`;
    return swatch;
  });
  const text = numShades === 2 ? "1st, 2nd stage of a lane" : `1st to ${numShades}th stage of a lane`;
  return element("span", { className: "shades" }, [...swatches, text.replace("3th", "3rd")]);
}
