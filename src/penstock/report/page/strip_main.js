// Strip main: read the data, keep the state of the page of stages, and draw it.

const strip = readStrip(JSON.parse(document.getElementById("data").textContent));
const view = new View(1);
const layout = layOutStrip(strip);
const stats = { draws: 0, shown: 0 };
const tooltip = document.getElementById("tooltip");
const state = { isEven: false, places: placeNodes(strip, false), node: -1, cut: -1, arc: -1, run: null };
const { canvas, box, node } = buildStripPage(strip, (stage) =>
  showNodes(stage.first_node, stage.first_node + stage.num_nodes),
);
let palette = readStripPalette();
let frame = 0;

const page = {
  view,
  plotOf: (panel) => new Plot(panel.clientWidth, view, MARGIN),
  requestDraw() {
    frame ||= requestAnimationFrame(draw);
  },
  reset() {
    view.reset();
    page.requestDraw();
  },
  follow() {},
};

function readStripPalette() {
  const isDark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  const stages = strip.stages.map(({ index }) => laneColour(index, strip.stages.length, isDark));
  for (const swatch of node.querySelectorAll(".swatch")) swatch.style.background = toCss(stages[swatch.dataset.stage]);
  return { ...readPalette([], 1), stages };
}

function draw() {
  frame = 0;
  const plot = page.plotOf(canvas);
  stats.shown = drawStrip(prepare(canvas, canvas.clientWidth, layout.height), strip, layout, plot, palette, state);
  const [first, last] = shownNodes(strip, view, state.places);
  document.getElementById("window").textContent =
    view.seconds < view.extent ? `nodes ${first} to ${last - 1} of ${strip.count}` : "";
  stats.draws += 1;
}

// Show some nodes and a little on both sides of them.
function showNodes(first, last) {
  const [start, end] = [state.places[first], state.places[last]];
  const room = Math.min(1, (end - start) * 1.06);
  view.show((start + end - room) / 2, room);
  page.requestDraw();
}

function setEven(isEven) {
  const { places } = state;
  const [first, last] = shownNodes(strip, view, places);
  const isWhole = view.seconds >= view.extent;
  state.isEven = isEven;
  state.places = placeNodes(strip, isEven);
  document.getElementById("even").setAttribute("aria-pressed", String(isEven));
  if (isWhole) page.requestDraw();
  else showNodes(first, last);
}

// What is under a point: an arc, a cut, a stage, a node or a module.
function find(x, y) {
  const plot = page.plotOf(canvas);
  const position = plot.seconds(x);
  if (x < plot.left || x > plot.right) return {};
  if (y < layout.arcs) return { arc: arcAt(strip, layout, plot, state.places, x, y) };
  const cut = strip.stages.findIndex(
    ({ first_node, num_nodes, index }) =>
      index < strip.stages.length - 1 && Math.abs(plot.x(state.places[first_node + num_nodes]) - x) <= NEAR,
  );
  if (cut >= 0 || y < layout.stages) return { cut };
  const at = nodeAt(state.places, position);
  if (y < layout.nodes) return { stage: strip.stageOf[at] };
  if (y < layout.levels) return { node: at };
  const runs = strip.levels[Math.floor((y - layout.levels) / LEVEL)];
  return { run: runs?.find(({ first, last }) => first <= at && at < last) };
}

function describe(found) {
  if (found.arc >= 0) return describeArc(strip.arcs[found.arc]);
  if (found.cut >= 0) return describeCut(strip.stages[found.cut]);
  if (found.stage >= 0) return describeStage(strip.stages[found.stage]);
  if (found.node >= 0) return describeNode(strip, found.node);
  return found.run ? describeRun(strip, found.run) : null;
}

function hover(event) {
  const bounds = canvas.getBoundingClientRect();
  const found = event ? find(event.clientX - bounds.left, event.clientY - bounds.top) : {};
  const content = describe(found);
  const next = { node: found.node ?? -1, cut: found.cut ?? -1, arc: found.arc ?? -1, run: found.run ?? null };
  if (Object.keys(next).some((key) => next[key] !== state[key])) page.requestDraw();
  Object.assign(state, next);
  if (!content) return void (tooltip.hidden = true);
  fillTooltip(tooltip, content);
  placeTooltip(tooltip, event.clientX, event.clientY);
}

function click(event) {
  const bounds = canvas.getBoundingClientRect();
  const found = find(event.clientX - bounds.left, event.clientY - bounds.top);
  if (found.run) return showNodes(found.run.first, found.run.last);
  const stage = strip.stages[found.stage];
  if (stage) showNodes(stage.first_node, stage.first_node + stage.num_nodes);
}

function listen() {
  box.addEventListener("pointermove", hover);
  box.addEventListener("pointerleave", () => hover(null));
  box.addEventListener("wheel", (event) => handleWheel(page, event, canvas), { passive: false });
  handleDrag(page, box, canvas, click);
  const zoomBy = (factor) => () => (view.zoom(factor, (view.start + view.end) / 2), page.requestDraw());
  document.getElementById("zoom-in").addEventListener("click", zoomBy(0.5));
  document.getElementById("zoom-out").addEventListener("click", zoomBy(2));
  document.getElementById("reset").addEventListener("click", page.reset);
  document.getElementById("even").addEventListener("click", () => setEven(!state.isEven));
  document.addEventListener("keydown", (event) => {
    if (event.key === "w" && !event.ctrlKey && !event.metaKey && !event.altKey) setEven(!state.isEven);
    else handleKey(page, event);
  });
  window.addEventListener("resize", page.requestDraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    palette = readStripPalette();
    page.requestDraw();
  });
}

// The position of a node, a cut, a stage, a level of modules or an arc on the screen; for tests and debugging.
function place(what, number) {
  const bounds = canvas.getBoundingClientRect();
  const plot = page.plotOf(canvas);
  const middle = (first, last) => plot.x((state.places[first] + state.places[last]) / 2);
  const stage = strip.stages[number];
  const spots = {
    node: () => [middle(number, number + 1), layout.nodes + NODES - 8],
    cut: () => [plot.x(state.places[stage.first_node + stage.num_nodes]), layout.arcs + 8],
    stage: () => [middle(stage.first_node, stage.first_node + stage.num_nodes), layout.stages + 4],
    level: () => [plot.left + plot.width * 0.4, layout.levels + number * LEVEL + 4],
    arc: () => {
      const { x0, x1, base, height } = arcShape(strip, strip.arcs[number], layout, plot, state.places);
      return [(x0 + x1) / 2, base - height];
    },
  };
  const [x, y] = spots[what]();
  return { x: bounds.left + x, y: bounds.top + y };
}

document.getElementById("strip").append(node);
buildStripLegend(strip.kinds);
listen();
draw();
window.penstock = { view, state, stats, strip, place };
