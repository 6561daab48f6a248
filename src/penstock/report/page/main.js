// Main: read the data, keep the state of the page, and draw it.

const data = JSON.parse(document.getElementById("data").textContent);
const { kinds } = data;
const timelines = data.timelines.map((raw) => readTimeline(raw, kinds));
const view = new View(Math.max(...timelines.map((timeline) => timeline.stepSeconds)) || 1e-9);
const numShades = Math.max(...timelines.map((timeline) => timeline.numShades));
const state = {
  kinds,
  isHidden: new Uint8Array(kinds.length),
  mb: null,
  hoverSection: null,
  hoverLane: null,
  hoverAgain: null,
};
const stats = { lastDrawMs: 0, lastDrawRects: 0, isDense: [], draws: 0 };
const tooltip = document.getElementById("tooltip");
const axis = document.getElementById("axis");
let palette = readPalette(kinds, numShades);
let frame = 0;

const fastest = timelines.reduce((best, timeline) => (timeline.stepSeconds < best.stepSeconds ? timeline : best));
const predictions = timelines.filter((timeline) => !timeline.isMeasured);
const others = {
  fastest,
  isCompared: timelines.length > 1,
  prediction: predictions.length === 1 && timelines.length > 1 ? predictions[0] : null,
  isTold: timelines.some((timeline) => timeline.isMeasured && timeline.causes), // it also shows the predicted causes
};
const sections = timelines.map((timeline) => buildSection(timeline, others, kinds, data.causes, data.signs));
document.getElementById("timelines").append(...sections.map((section) => section.node));
const used = kinds
  .map((_, kind) => kind)
  .filter((kind) => timelines.some((timeline) => timeline.spans.kind.includes(kind)));

// All timelines with the same unit share one memory scale, so that heights can be compared.
for (const section of sections) {
  const alike = timelines.filter((timeline) => timeline.memory.unit === section.timeline.memory.unit);
  section.memoryMax = Math.max(...alike.map((timeline) => timeline.memory.max));
}

const page = {
  view,
  plotOf: (canvas) => new Plot(canvas.clientWidth, view),
  requestDraw() {
    frame ||= requestAnimationFrame(draw);
  },
  reset() {
    view.reset();
    page.requestDraw();
  },
  // Show one micro-batch in full colour and the others faint; null shows all again.
  follow(mb) {
    state.mb = mb;
    page.requestDraw();
  },
};

const LEAST_LANES_HEIGHT = MEMORY_HEIGHT + 30; // the lanes matter most: taller than the curves

function layOut() {
  const room = window.innerHeight - document.getElementById("top").offsetHeight - MEMORY_HEIGHT - BUBBLE_HEIGHT - 130;
  for (const section of sections) {
    const { numLanes } = section.timeline;
    const strips = used.filter((kind) => kinds[kind].where !== "LANE" && !state.isHidden[kind]);
    const least = numLanes > 128 ? 8 : 13;
    const most = Math.max(timelines.length > 1 ? 30 : 38, Math.ceil(LEAST_LANES_HEIGHT / numLanes));
    const rowHeight = Math.max(least, Math.min(most, Math.floor(Math.max(room, LEAST_LANES_HEIGHT) / numLanes)));
    section.layout = layOutLanes(section.timeline, strips, rowHeight);
    section.lanes.box.style.height = `${section.layout.height}px`;
  }
}

function draw() {
  const began = performance.now();
  frame = 0;
  layOut();
  drawAxis(axis, page.plotOf(axis), palette);
  document.getElementById("window").textContent =
    view.seconds < view.extent ? `${formatSeconds(view.seconds, 4)} shown` : "";
  stats.lastDrawRects = 0;
  stats.isDense = sections.map(drawSection);
  state.hoverAgain?.(); // something else may be under the pointer now
  stats.draws += 1;
  stats.lastDrawMs = performance.now() - began;
}

// Draw only the visible part of tall lanes, on a canvas that is at most as tall as the screen and follows the scroll.
function drawSection(section) {
  const { lanes, memory, bubble, layout } = section;
  const box = lanes.box.getBoundingClientRect();
  const height = Math.min(layout.height, window.innerHeight);
  const top = Math.round(Math.min(Math.max(0, -box.top), layout.height - height));
  const plot = new Plot(box.width, view);
  section.top = top;
  lanes.canvas.style.top = `${top}px`;
  const drawn = drawLanes(prepare(lanes.canvas, box.width, height), section, plot, palette, state, top, height);
  drawMemory(memory.canvas, section, plot, palette, state);
  drawBubble(bubble.canvas, section, plot, palette);
  stats.lastDrawRects += drawn.rects;
  return drawn.isDense;
}

function showCursor(x) {
  for (const section of sections) {
    for (const { cursor } of [section.lanes, section.memory, section.bubble]) {
      cursor.style.visibility = x >= GUTTER ? "visible" : "hidden";
      cursor.style.transform = `translateX(${x}px)`;
    }
  }
}

function hideMark() {
  for (const { mark } of sections) mark.style.visibility = "hidden";
}

function showMark(section, plot, found) {
  const box = spanBox(section.timeline, section.layout, plot, found.lane, found.key, found.span);
  const left = Math.max(box.x, GUTTER),
    right = Math.min(box.x + box.width, plot.right);
  const { style } = section.mark;
  [style.width, style.height] = [`${Math.max(right - left, 1) + 3}px`, `${box.height + 4}px`];
  style.transform = `translate(${left - 2}px, ${box.y - 2}px)`;
  style.visibility = "visible";
}

function hoverLane(section, lane) {
  if (state.hoverSection === section && state.hoverLane === lane) return;
  const touched = new Set([state.hoverSection, section].filter(Boolean));
  [state.hoverSection, state.hoverLane] = [section, lane];
  for (const each of touched) drawMemory(each.memory.canvas, each, page.plotOf(each.memory.canvas), palette, state);
}

function showTooltip(event, content) {
  if (!content) return void (tooltip.hidden = true);
  fillTooltip(tooltip, content);
  placeTooltip(tooltip, event.clientX, event.clientY);
}

function pointIn(panel, event) {
  const box = panel.box.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function hoverLanes(section, event) {
  const [x, y] = pointIn(section.lanes, event);
  const plot = page.plotOf(section.lanes.canvas);
  const found = findInLanes(section, plot, state, x, y);
  hideMark();
  showCursor(x);
  hoverLane(found ? section : null, found ? found.lane : null);
  if (!found) return showTooltip(event, null);
  if (found.span < 0) return showTooltip(event, describeLane(section.timeline, found, x));
  showMark(section, plot, found);
  showTooltip(event, describeSpan(section.timeline, others.prediction, kinds, found.lane, found.span));
}

function hoverCurve(section, panel, event) {
  const [x, y] = pointIn(panel, event);
  const plot = page.plotOf(panel.canvas);
  const content =
    panel === section.memory ? describeMemory(section, plot, x, y) : describeBubble(section.timeline, plot, x);
  showCursor(x);
  hoverLane(content?.lane === undefined ? null : section, content?.lane ?? null);
  showTooltip(event, content);
}

function clickLanes(section, event) {
  const found = findInLanes(section, page.plotOf(section.lanes.canvas), state, ...pointIn(section.lanes, event));
  const mb = found && found.span >= 0 ? section.timeline.spans.mb[found.span] : null;
  page.follow(mb === state.mb ? null : mb);
}

function leave() {
  state.hoverAgain = null;
  tooltip.hidden = true;
  hideMark();
  showCursor(-1);
  hoverLane(null, null);
}

function listen() {
  for (const section of sections) {
    for (const panel of [section.lanes, section.memory, section.bubble]) {
      const isLanes = panel === section.lanes;
      const hover = isLanes ? (event) => hoverLanes(section, event) : (event) => hoverCurve(section, panel, event);
      panel.box.addEventListener("pointermove", (event) => {
        state.hoverAgain = () => hover(event);
        hover(event);
      });
      panel.box.addEventListener("pointerleave", leave);
      panel.box.addEventListener("wheel", (event) => handleWheel(page, event, panel.canvas), { passive: false });
      handleDrag(page, panel.box, panel.canvas, isLanes ? (event) => clickLanes(section, event) : () => {});
    }
  }
  axis.addEventListener("wheel", (event) => handleWheel(page, event, axis), { passive: false });
  handleDrag(page, axis, axis, () => {});
  const zoomBy = (factor) => () => (view.zoom(factor, (view.start + view.end) / 2), page.requestDraw());
  document.getElementById("zoom-in").addEventListener("click", zoomBy(0.5));
  document.getElementById("zoom-out").addEventListener("click", zoomBy(2));
  document.getElementById("reset").addEventListener("click", page.reset);
  document.addEventListener("keydown", (event) => handleKey(page, event));
  window.addEventListener("resize", page.requestDraw);
  window.addEventListener(
    "scroll",
    () => sections.some(({ layout }) => layout.height > window.innerHeight) && page.requestDraw(),
  );
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    palette = readPalette(kinds, numShades);
    page.requestDraw();
  });
}

// The position of a moment of a lane on the screen; for tests and debugging.
function place(number, lane, seconds) {
  const section = sections[number];
  const box = section.lanes.box.getBoundingClientRect();
  const y = rowTop(section.layout, lane, COMPUTE) + section.layout.computeHeight / 2;
  return { x: box.left + new Plot(box.width, view).x(seconds), y: box.top + y, canvasY: y - section.top };
}

// The colours of a kind, by stage of a lane; for tests and debugging.
function shades(kind) {
  return Array.from({ length: numShades }, (_, shade) => [
    ...palette.bright.rgb.slice(3 * (kind * numShades + shade), 3 * (kind * numShades + shade) + 3),
  ]);
}

buildLegend(kinds, used, numShades, state, page.requestDraw);
listen();
draw();
window.penstock = { view, state, stats, draw, place, shades, timelines };
