// Strip drawing: arcs, values that cross the cuts, stages, nodes and modules.

const ARCS = 74; // heights, from top to bottom
const LABELS = 38;
const STAGES = 24;
const NODES = 104;
const LEVEL = 19;
const FOOT_ROOM = 12;
const KIND_HEIGHT = { parameters: 1, attention: 0.85, "matrix product": 0.7, other: 0.45, free: 0.2 };
const KIND_FADE = { parameters: 0, attention: 0.12, "matrix product": 0.24, other: 0.42, free: 0.66 };

function layOutStrip(strip) {
  const arcs = 6 + (strip.arcs.length ? ARCS : 0);
  const stages = arcs + (strip.stages.length > 1 ? LABELS : 0);
  const nodes = stages + STAGES;
  const levels = nodes + NODES + 4;
  return { arcs, stages, nodes, levels, height: levels + LEVEL * strip.levels.length + FOOT_ROOM };
}

function drawStrip(context, strip, layout, plot, palette, state) {
  const [first, last] = shownNodes(strip, plot.view, state.places);
  drawLevels(context, strip, layout, plot, palette, state);
  drawNodes(context, strip, layout, plot, palette, state, first, last);
  drawStages(context, strip, layout, plot, palette, state);
  drawCuts(context, strip, layout, plot, palette, state);
  drawArcs(context, strip, layout, plot, palette, state);
  return last - first;
}

function shownNodes(strip, view, places) {
  return [nodeAt(places, view.start), Math.min(strip.count, nodeAt(places, view.end) + 1)];
}

function stageColour(palette, stage, kind) {
  return toCss(mix(palette.stages[stage], palette.base.panel, KIND_FADE[kind]));
}

// Nodes as bars whose height shows their kind; of nodes that share a pixel column, the highest is drawn.
function drawNodes(context, strip, layout, plot, palette, state, first, last) {
  const { places } = state;
  const bottom = layout.nodes + NODES;
  context.fillStyle = palette.lane;
  context.fillRect(plot.left, layout.nodes, plot.width, NODES);
  let column = -1,
    best = 0;
  for (let i = first; i < last; i++) {
    const x = Math.max(plot.left, plot.x(places[i])),
      right = Math.min(plot.right, plot.x(places[i + 1]));
    const kind = strip.kinds[strip.nodes.kind[i]].name;
    const height = KIND_HEIGHT[kind] * NODES;
    const isThin = right - x < 1;
    if (isThin && Math.floor(x) === column && height <= best) continue;
    [column, best] = isThin ? [Math.floor(x), height] : [-1, 0];
    const left = isThin ? Math.floor(x) : x;
    const width = isThin ? 1 : Math.max(1, right - x - (right - x > 4 ? 1 : 0));
    context.fillStyle = stageColour(palette, strip.stageOf[i], kind);
    context.fillRect(left, bottom - height, width, height);
    if (width > 34) drawLabel(context, strip.nodes.op[i], left + 5, bottom - 9, width - 8, palette.text);
  }
  if (state.node >= first && state.node < last) {
    const x = plot.x(places[state.node]);
    context.strokeStyle = palette.text;
    context.lineWidth = 1.5;
    context.strokeRect(x - 0.5, layout.nodes + 0.5, Math.max(2, plot.x(places[state.node + 1]) - x), NODES - 1);
  }
}

function drawLabel(context, text, x, y, room, colour, font = `11px ${FONT}`) {
  context.font = font;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillStyle = colour;
  const shown = fitText(context, text, room);
  if (shown) context.fillText(shown, x, y);
  return shown;
}

// Shorten a text to the available width; return nothing if only one or two letters would remain.
function fitText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  for (let length = Math.min(text.length - 1, Math.floor(room / 4)); length > 2; length--) {
    const shown = `${text.slice(0, length)}…`;
    if (context.measureText(shown).width <= room) return shown;
  }
  return "";
}

function drawLevels(context, strip, layout, plot, palette, state) {
  strip.levels.forEach((runs, level) => {
    const y = layout.levels + level * LEVEL;
    for (const run of runs) {
      const [x, width] = boxOf(plot, state.places[run.first], state.places[run.last]);
      if (width <= 0) continue;
      context.fillStyle = state.run === run ? palette.line : palette.lane;
      context.fillRect(x, y, Math.max(0.5, width - 1), LEVEL - 2);
      if (width > 20) drawLabel(context, run.label, x + 5, y + LEVEL / 2 - 1, width - 8, palette.soft);
    }
  });
}

// The visible part of an interval of the strip in pixels: its left end and its width.
function boxOf(plot, start, end) {
  const x = Math.max(plot.left, plot.x(start));
  return [x, Math.min(plot.right, plot.x(end)) - x];
}

function drawStages(context, strip, layout, plot, palette, state) {
  for (const stage of strip.stages) {
    const ends = [state.places[stage.first_node], state.places[stage.first_node + stage.num_nodes]];
    const [x, width] = boxOf(plot, ...ends);
    if (width <= 0) continue;
    context.fillStyle = toCss(palette.stages[stage.index]);
    context.fillRect(x, layout.stages, Math.max(1, width - 1), STAGES - 5);
    const ink = inkOn(palette.stages[stage.index]);
    const texts = [
      `stage ${stage.index} · lane ${stage.lanes.join(", ")} · ${formatShare(stage.share)}`,
      `stage ${stage.index}`,
      String(stage.index),
    ];
    context.font = `600 11.5px ${FONT}`;
    const text = texts.find((candidate) => context.measureText(candidate).width <= width - 10);
    if (text) drawLabel(context, text, x + 6, layout.stages + (STAGES - 5) / 2, width, ink, context.font);
  }
}

// Each cut as a vertical line, with the values that cross it at its upper end if there is room.
function drawCuts(context, strip, layout, plot, palette, state) {
  let taken = -Infinity;
  for (const stage of strip.stages.slice(0, -1)) {
    const x = plot.x(state.places[stage.first_node + stage.num_nodes]);
    if (x < plot.left - 0.5 || x > plot.right + 0.5) continue;
    context.fillStyle = state.cut === stage.index ? palette.accent : palette.text;
    context.fillRect(x - 1, layout.arcs + 4, 2, layout.height - layout.arcs - 10);
    if (x + 6 < taken) continue;
    const room = Math.min(210, nextCut(strip, stage.index, plot, state) - x - 12, plot.right - x - 6);
    const total = `${formatBytes(stage.crossing_bytes)} crosses`;
    const bytes = drawLabel(context, total, x + 6, layout.arcs + 11, room, palette.text, `600 11.5px ${FONT}`);
    drawLabel(context, crossingText(stage), x + 6, layout.arcs + 26, room, palette.soft);
    if (bytes) taken = x + 6 + context.measureText(bytes).width;
  }
}

function nextCut(strip, index, plot, state) {
  const next = strip.stages[index + 1];
  return index + 2 < strip.stages.length ? plot.x(state.places[next.first_node + next.num_nodes]) : plot.right;
}

function crossingText({ crossing }) {
  if (!crossing.length) return "nothing";
  return crossing[0].shape + (crossing.length > 1 ? ` and ${crossing.length - 1} more` : "");
}

// Values that skip stages, as arcs above the strip; longer arcs are higher.
function arcShape(strip, arc, layout, plot, places) {
  const middle = (node) => plot.x((places[node] + places[node + 1]) / 2);
  const far = (arc.stages[1] - arc.stages[0]) / Math.max(2, strip.stages.length - 1);
  return { x0: middle(arc.first), x1: middle(arc.last), base: layout.arcs, height: (ARCS - 8) * (0.3 + 0.7 * far) };
}

function drawArcs(context, strip, layout, plot, palette, state) {
  context.save();
  context.beginPath();
  context.rect(plot.left, 0, plot.width, layout.arcs + 1);
  context.clip();
  strip.arcs.forEach((arc, number) => {
    const { x0, x1, base, height } = arcShape(strip, arc, layout, plot, state.places);
    if (x1 < plot.left || x0 > plot.right) return;
    const isChosen = state.arc === number;
    context.beginPath();
    context.moveTo(x0, base);
    context.quadraticCurveTo((x0 + x1) / 2, base - 2 * height, x1, base);
    context.strokeStyle = isChosen ? palette.text : toCss(mix(palette.stages[arc.stages[0]], palette.base.panel, 0.15));
    context.lineWidth = isChosen ? 2.5 : 1.5;
    context.stroke();
  });
  context.restore();
}

// The arc nearest to a point; -1 if none is near.
function arcAt(strip, layout, plot, places, x, y) {
  let found = -1,
    nearest = 2 * NEAR;
  strip.arcs.forEach((arc, number) => {
    const { x0, x1, base, height } = arcShape(strip, arc, layout, plot, places);
    if (x < x0 - NEAR || x > x1 + NEAR) return;
    const t = Math.min(1, Math.max(0, (x - x0) / (x1 - x0)));
    const distance = Math.abs(y - (base - 4 * height * t * (1 - t)));
    if (distance < nearest) [found, nearest] = [number, distance];
  });
  return found;
}
