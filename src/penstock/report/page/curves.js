// Curves: draw the time axis, the memory curves and the bubble over time.

const MEMORY_HEIGHT = 116,
  BUBBLE_HEIGHT = 72,
  AXIS_HEIGHT = 30;
const TOP = 12,
  FOOT = 8; // free space above and below a curve

function drawAxis(canvas, plot, palette) {
  const context = prepare(canvas, canvas.clientWidth, AXIS_HEIGHT);
  const { step, ticks } = axisTicks(plot, 90);
  const [size, unit] = timeUnit(plot.view.end);
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  context.font = `12px ${FONT}`;
  context.textBaseline = "middle";
  ticks.forEach((tick) => {
    const x = plot.x(tick);
    context.fillStyle = palette.line;
    context.fillRect(Math.round(x), AXIS_HEIGHT - 8, 1, 8);
    context.fillStyle = palette.soft;
    const isLast = x > plot.right - 30;
    context.textAlign = isLast ? "right" : "center";
    context.fillText(
      `${(tick / size).toFixed(digits)} ${unit}`,
      isLast ? Math.min(x + 20, plot.right + MARGIN) : x,
      12,
    );
  });
  drawWindow(context, plot, palette);
}

// A bar along the axis: the visible part of the step.
function drawWindow(context, { view, width }, palette) {
  if (view.seconds >= view.extent) return;
  context.fillStyle = palette.line;
  context.fillRect(GUTTER, AXIS_HEIGHT - 3, width, 3);
  context.fillStyle = palette.accent;
  context.fillRect(
    GUTTER + (view.start / view.extent) * width,
    AXIS_HEIGHT - 3,
    Math.max(3, (view.seconds / view.extent) * width),
    3,
  );
}

function drawMemory(canvas, section, plot, palette, state) {
  const { timeline, memoryMax } = section;
  const context = prepare(canvas, canvas.clientWidth, MEMORY_HEIGHT);
  const isBytes = timeline.memory.unit === "bytes";
  const format = isBytes ? formatBytes : String;
  drawScale(context, plot, palette, MEMORY_HEIGHT, [
    [0, "0"],
    [0.5, ""],
    [1, format(memoryMax)],
  ]);
  context.imageSmoothingEnabled = false;
  context.drawImage(
    memoryPicture(section, plot, palette, state),
    GUTTER,
    TOP - 2,
    plot.width,
    MEMORY_HEIGHT - TOP - FOOT + 4,
  );
}

// The curves are step functions, so set their pixels directly instead of stroking thousands of corners.
const memoryPixels = new Picture();

function memoryPicture(section, plot, palette, state) {
  const { timeline, memoryMax } = section;
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(plot.width * ratio),
    height = Math.round((MEMORY_HEIGHT - TOP - FOOT + 4) * ratio);
  const { pixels } = memoryPixels.clear(width, height);
  const raster = { pixels, width, height, pad: 2 * ratio, max: memoryMax || 1 };
  raster.thick = Math.max(1, Math.round((timeline.numLanes <= 16 ? 1.6 : 1) * ratio));
  const chosen = state.hoverSection === section ? state.hoverLane : null;
  const isDark = palette.base.panel[0] < 128;
  for (let lane = timeline.numLanes - 1; lane >= 0; lane--) {
    const colour = laneColour(lane, timeline.numLanes, isDark);
    const isFaint = chosen !== null && chosen !== lane;
    rasterCurve(raster, timeline, lane, plot.view, packPixel(isFaint ? mix(colour, palette.base.panel, 0.78) : colour));
  }
  if (chosen !== null) {
    raster.thick += Math.round(ratio);
    rasterCurve(raster, timeline, chosen, plot.view, packPixel(laneColour(chosen, timeline.numLanes, isDark)));
  }
  return memoryPixels.finish();
}

// Draw the changes of one lane: within a pixel column, only the lowest and the highest value matter.
function rasterCurve(raster, timeline, lane, view, pixel) {
  const { start, value, laneEnds } = timeline.memory;
  const first = lane ? laneEnds[lane - 1] : 0,
    last = laneEnds[lane];
  const scale = raster.width / view.seconds;
  const yOf = (held) =>
    Math.round(raster.height - 1 - raster.pad - (held / raster.max) * (raster.height - 1 - 2 * raster.pad));
  const stop = Math.min(raster.width, Math.ceil((timeline.stepSeconds - view.start) * scale));
  let i = firstAbove(start, view.start, first, last);
  let y = yOf(i > first ? value[i - 1] : 0),
    low = y,
    high = y,
    column = 0;
  for (; i < last && start[i] < view.end; i++) {
    const at = Math.floor((start[i] - view.start) * scale);
    if (at > column) {
      fillBlock(raster, column, column + 1, low, high, pixel);
      fillBlock(raster, column + 1, at, y, y, pixel);
      [column, low, high] = [at, y, y];
    }
    y = yOf(value[i]);
    if (y < low) low = y;
    if (y > high) high = y;
  }
  fillBlock(raster, column, column + 1, low, high, pixel);
  fillBlock(raster, column + 1, stop, y, y, pixel);
}

function fillBlock({ pixels, width, height, thick }, left, right, top, bottom, pixel) {
  const from = Math.max(0, top - (thick >> 1)),
    to = Math.min(height - 1, bottom + ((thick - 1) >> 1));
  const stop = Math.min(width, top < bottom ? Math.max(right, left + thick) : right);
  for (let y = from; y <= to; y++) {
    // a plain loop: most blocks are one or two pixels wide, and fill() is slower for these
    for (let at = y * width + left, end = y * width + stop; at < end; at++) pixels[at] = pixel;
  }
}

function drawBubble(canvas, section, plot, palette) {
  const { timeline } = section;
  const context = prepare(canvas, canvas.clientWidth, BUBBLE_HEIGHT);
  drawScale(context, plot, palette, BUBBLE_HEIGHT, [
    [0, "0 %"],
    [0.5, "50 %"],
    [1, "100 %"],
  ]);
  const bottom = BUBBLE_HEIGHT - FOOT,
    tall = bottom - TOP;
  const right = Math.min(plot.right, plot.x(timeline.stepSeconds));
  const outline = new Path2D();
  let before = null;
  for (let x = GUTTER; x < right; x++) {
    const share = bubbleBetween(timeline, plot.seconds(x), Math.min(plot.seconds(x + 1), timeline.stepSeconds));
    const y = bottom - share * tall;
    if (before === null) outline.moveTo(x, y);
    else if (y !== before) (outline.lineTo(x, before), outline.lineTo(x, y));
    before = y;
  }
  if (before === null) return;
  outline.lineTo(right, before);
  const area = new Path2D(outline);
  area.lineTo(right, bottom);
  area.lineTo(GUTTER, bottom);
  context.fillStyle = context.strokeStyle = palette.bubble;
  context.globalAlpha = 0.22;
  context.fill(area);
  context.globalAlpha = 1;
  context.lineWidth = 1.25;
  context.stroke(outline);
}

function drawScale(context, plot, palette, height, marks) {
  const bottom = height - FOOT,
    tall = bottom - TOP;
  context.font = `11px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of axisTicks(plot, 90).ticks) {
    context.fillStyle = palette.lane;
    context.fillRect(Math.round(plot.x(tick)), 0, 1, height);
  }
  for (const [share, text] of marks) {
    const y = Math.round(bottom - share * tall);
    context.fillStyle = palette.grid;
    context.fillRect(GUTTER, y, plot.width, 1);
    context.fillStyle = palette.soft;
    context.fillText(text, GUTTER - 12, y);
  }
}
