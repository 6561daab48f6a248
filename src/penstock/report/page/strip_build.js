// Strip construction: the page around the strip, and the texts of its tooltips.

function buildStripPage(strip, onStage) {
  const figures = strip.figures.map(([name, value]) =>
    element("div", {}, [element("dt", { text: name }), element("dd", { text: value })]),
  );
  const head = element("div", { className: "head" }, [
    element("h2", { text: strip.title }),
    element("dl", {}, figures),
    ...strip.lines.map((text) => element("p", { text })),
  ]);
  const label = `${strip.title}: ${strip.count} nodes in ${strip.stages.length} stages`;
  const canvas = element("canvas", { role: "img", "aria-label": label });
  const box = element("div", { className: "panel" }, [canvas]);
  const notes = strip.notes.map((text) => element("p", { text }));
  const table = element("div", { className: "stages" }, [buildStages(strip, onStage), ...notes]);
  return { canvas, box, node: element("section", { "aria-label": strip.title }, [head, box, table]) };
}

function buildStages(strip, onStage) {
  const names = ["stage", "lane", "modules", "nodes", "parameters", "time", "forward", "backward", "weights", "state", "saved"];
  const heading = element("thead", {}, [
    element(
      "tr",
      {},
      names.map((text) => element("th", { scope: "col", text, className: text === "modules" ? text : "" })),
    ),
  ]);
  const last = strip.stages.length - 1;
  const rows = strip.stages.flatMap((stage) => [
    buildStage(stage, onStage),
    ...(stage.index < last ? [buildCut(stage, names.length)] : []),
  ]);
  return element("table", {}, [heading, element("tbody", {}, rows)]);
}

function buildStage(stage, onStage) {
  const swatch = element("span", { className: "swatch" });
  swatch.dataset.stage = stage.index;
  const cells = [
    [stage.lanes.join(", "), ""],
    [stage.modules_text, "modules"],
    [stage.num_nodes, ""],
    [formatCount(stage.num_parameters), ""],
    [formatShare(stage.share), ""],
    [formatSeconds(stage.forward_seconds, 3), ""],
    [formatSeconds(stage.backward_seconds, 3), ""],
    [formatBytes(stage.weight_bytes), ""],
    [formatBytes(stage.grad_bytes + stage.optimizer_bytes), ""],
    [formatBytes(stage.saved_bytes), ""],
  ];
  const row = element("tr", { className: "stage", tabIndex: 0, title: "Show this stage" }, [
    element("th", { scope: "row" }, [swatch, String(stage.index)]),
    ...cells.map(([text, className]) => element("td", { text, className })),
  ]);
  row.addEventListener("click", () => onStage(stage));
  row.addEventListener("keydown", (event) => event.key === "Enter" && onStage(stage));
  return row;
}

function buildCut(stage, columns) {
  const at = stage.first_node + stage.num_nodes;
  const values = countAlike(stage.crossing.map(valueText));
  const text = values.length
    ? `↓ cut at ${at}: ${formatBytes(stage.crossing_bytes)} per micro-batch: ${values.slice(0, 6).join(", ")}`
    : `↓ cut at ${at}: nothing crosses`;
  const more = values.length > 6 ? `, and ${values.length - 6} more` : "";
  const cell = element("td", { colSpan: columns - 2, text: text + more });
  return element("tr", { className: "cut" }, [element("td", { colSpan: 2 }), cell]);
}

// Write repeated texts as "3 × text".
function countAlike(texts) {
  const counts = new Map();
  for (const text of texts) counts.set(text, (counts.get(text) ?? 0) + 1);
  return Array.from(counts, ([text, count]) => (count > 1 ? `${count} × ${text}` : text));
}

function valueText({ shape, num_bytes, source, targets, is_output, is_dynamic, skips }) {
  const way = [...targets, ...(is_output ? ["output"] : [])].join(", ");
  const seen = is_dynamic ? " in the example" : "";
  return `${shape}${seen} ${formatBytes(num_bytes)}${skips || targets.length > 1 ? ` (stage ${source} → ${way})` : ""}`;
}

function formatCount(number) {
  const [size, unit] = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([s]) => number >= s) ?? [1, ""];
  return `${formatNumber(number / size, 3)}${unit}`;
}

function buildStripLegend(kinds) {
  for (const { name, words } of kinds) {
    const bar = element("i");
    bar.style.height = `${Math.round(3 + 11 * KIND_HEIGHT[name])}px`;
    bar.style.opacity = 1 - KIND_FADE[name];
    document.getElementById("legend").append(element("span", { className: "entry", title: words }, [bar, name]));
  }
}

function describeNode(strip, i) {
  const { nodes } = strip;
  const facts = [
    ["node", `${i}: ${nodes.name[i]}`],
    ["module", nodes.module[i] || "the model itself"],
    ["stage", strip.stageOf[i]],
    ["share of the time", formatShare(strip.total ? strip.seconds[i] / strip.total : 0)],
    ["forward", formatSeconds(nodes.forward_seconds[i], 3)],
    ["input gradient", formatSeconds(nodes.input_grad_seconds[i], 3)],
    ["weight gradient", formatSeconds(nodes.weight_grad_seconds[i], 3)],
    ["saved", formatBytes(nodes.saved_bytes[i])],
    ["parameters", formatBytes(nodes.parameter_bytes[i])],
    ["inputs", nodes.inputs[i] || "none"],
    ["outputs", nodes.outputs[i] || "none"],
  ];
  if (nodes.source[i]) facts.push(["line", nodes.source[i]]);
  return { title: nodes.op[i], words: strip.kinds[nodes.kind[i]].words, facts };
}

function describeStage(stage) {
  const facts = [
    ["modules", stage.modules_text],
    ["lane", stage.lanes.join(", ")],
    ["share of the time", formatShare(stage.share)],
    ["forward", formatSeconds(stage.forward_seconds, 3)],
    ["backward", formatSeconds(stage.backward_seconds, 3)],
    ["memory", formatBytes(stage.memory_bytes)],
  ];
  return { title: `stage ${stage.index}`, words: `${stage.num_nodes} nodes`, facts };
}

function describeCut(stage) {
  const facts = stage.crossing.slice(0, 8).map((value) => [value.name, valueText(value)]);
  if (stage.crossing.length > 8) facts.push(["and more", stage.crossing.length - 8]);
  return { title: formatBytes(stage.crossing_bytes), words: `crosses the cut after stage ${stage.index}`, facts };
}

function describeRun(strip, run) {
  let seconds = 0;
  for (let i = run.first; i < run.last; i++) seconds += strip.seconds[i];
  const facts = [
    ["nodes", run.last - run.first],
    ["time", formatSeconds(seconds, 3)],
    ["share of the time", formatShare(strip.total ? seconds / strip.total : 0)],
  ];
  return { title: run.path, words: "module", facts };
}

function describeArc(arc) {
  const facts = [
    ["from", `stage ${arc.stages[0]}, node ${arc.first}`],
    ["to", `stage ${arc.stages[1]}, node ${arc.last}`],
    ["bytes", formatBytes(arc.num_bytes)],
  ];
  return { title: arc.shape, words: "skips stages", facts };
}
