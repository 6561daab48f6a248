// Lanes: draw few spans as rectangles, and many spans as averaged pixel columns.

const HEADING = 20; // above the first lane
const MOST_RECTS = 6000; // if more spans are visible, they are averaged
const LEAST_PIXELS = 2.5; // the same if spans are narrower than this on average
const LABEL_SIZES = [12, 10.5, 9, 8]; // font sizes for spans; the largest that fits is used
const LABEL_CHAR = 0.62; // width of a character divided by the font size
let rowSums = new Float32Array(0);

// Heights within a lane, for the visible strips.
function layOutLanes(timeline, strips, rowHeight) {
  const gap = rowHeight >= 22 ? 5 : rowHeight >= 16 ? 2 : 1;
  const wanted = rowHeight >= 24 ? 4 : rowHeight >= 16 ? 2 : 1;
  const stripHeight = strips.length ? Math.max(1, Math.min(wanted, Math.floor((rowHeight * 0.4) / strips.length))) : 0;
  return {
    rowHeight,
    stripHeight,
    strips,
    computeHeight: rowHeight - gap - stripHeight * strips.length,
    height: HEADING + rowHeight * timeline.numLanes + 8,
  };
}

function rowTop(layout, lane, key) {
  const top = HEADING + lane * layout.rowHeight;
  return key === COMPUTE ? top : top + layout.computeHeight + layout.strips.indexOf(key) * layout.stripHeight;
}

function rowHeightOf(layout, key) {
  return key === COMPUTE ? layout.computeHeight : layout.stripHeight;
}

// The position of one span in pixels of the lanes.
function spanBox(timeline, layout, plot, lane, key, span) {
  const { start, end, part } = timeline.spans;
  const height = rowHeightOf(layout, key);
  const half = part[span] === WHOLE ? height : height / 2;
  const y = rowTop(layout, lane, key) + (part[span] === LOWER ? half : 0);
  const x = plot.x(start[span]);
  return { x, y, width: plot.x(end[span]) - x, height: half };
}

// Draw the lanes between `top` and `top + height`; return the number of rectangles and images drawn.
function drawLanes(context, section, plot, palette, state, top, height) {
  const { timeline, layout } = section;
  const firstLane = Math.max(0, Math.floor((top - HEADING) / layout.rowHeight));
  const lastLane = Math.min(timeline.numLanes, Math.ceil((top + height - HEADING) / layout.rowHeight));
  context.translate(0, -top);
  drawGround(context, timeline, layout, plot, palette, firstLane, lastLane);
  const rows = shownRows(timeline, layout, plot.view, firstLane, lastLane);
  const total = rows.reduce((sum, row) => sum + row.to - row.from, 0);
  const inCompute = rows.filter((row) => row.key === COMPUTE).reduce((sum, row) => Math.max(sum, row.to - row.from), 0);
  const isDense = total > MOST_RECTS || inCompute * LEAST_PIXELS > plot.width;
  const draw = isDense ? drawAveraged : drawRects;
  const rects = draw(context, timeline, layout, plot, palette, state, rows);
  drawGutter(context, timeline, layout, palette, firstLane, lastLane);
  return { rects: rects + 2 * (lastLane - firstLane), isDense };
}

function shownRows(timeline, layout, view, firstLane, lastLane) {
  const shown = [];
  for (let lane = firstLane; lane < lastLane; lane++) {
    for (const row of timeline.spans.lanes[lane]) {
      if (row.key !== COMPUTE && !layout.strips.includes(row.key)) continue;
      const [from, to] = visibleSpans(timeline.spans, row, view);
      if (from < to) shown.push({ lane, key: row.key, from, to });
    }
  }
  return shown;
}

// The empty lanes up to the end of the step, with the grid of the axis.
function drawGround(context, timeline, layout, plot, palette, firstLane, lastLane) {
  const left = Math.max(GUTTER, plot.x(0));
  const right = Math.min(plot.right, plot.x(timeline.stepSeconds));
  context.fillStyle = palette.lane;
  for (let lane = firstLane; lane < lastLane; lane++) {
    if (right > left) context.fillRect(left, rowTop(layout, lane, COMPUTE), right - left, layout.computeHeight);
  }
  context.fillStyle = palette.grid;
  for (const tick of axisTicks(plot, 90).ticks)
    context.fillRect(Math.round(plot.x(tick)), HEADING - 4, 1, layout.height - HEADING);
  const end = plot.x(timeline.stepSeconds);
  context.fillStyle = palette.soft;
  if (end <= plot.right + 1) context.fillRect(Math.round(end), HEADING - 6, 1, layout.height - HEADING + 2);
}

function drawRects(context, timeline, layout, plot, palette, state, rows) {
  const { kind, mb } = timeline.spans;
  const labels = [];
  const least = layout.computeHeight >= 9 ? 7 : Infinity;
  let rects = 0;
  for (const { lane, key, from, to } of rows) {
    for (let i = from; i < to; i++) {
      if (state.isHidden[kind[i]]) continue;
      const box = spanBox(timeline, layout, plot, lane, key, i);
      const x = Math.max(GUTTER, box.x),
        right = Math.min(plot.right, box.x + box.width);
      if (right <= x && box.width > 1) continue; // it only touches the edge of the view
      const width = Math.max(right - x - Math.min(1, box.width * 0.15), 0.75);
      const colours = state.mb === null || state.mb === mb[i] ? palette.bright : palette.faint;
      const colour = kind[i] * palette.numShades + timeline.shade[i];
      context.fillStyle = colours.css[colour];
      context.fillRect(x, box.y, width, box.height - (box.height > 8 && timeline.spans.part[i] !== WHOLE ? 0.5 : 0));
      rects += 1;
      if (key === COMPUTE && width >= least) labels.push({ i, x, width, box, ink: colours.ink[colour] });
    }
  }
  drawLabels(context, timeline, state, labels);
  return rects + labels.length;
}

// Write the micro-batch inside its span, or the whole action if it fits.
function drawLabels(context, timeline, state, labels) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const size of LABEL_SIZES) {
    context.font = `${size}px ${FONT}`;
    for (const { i, x, width, box, ink } of labels) {
      const text = labelText(timeline.spans, state.kinds, i, width);
      if (size !== labelSize(text, width, box.height)) continue;
      context.fillStyle = ink;
      context.fillText(text, x + width / 2, box.y + box.height / 2 + 0.5);
    }
  }
}

function labelText({ kind, stage, mb }, kinds, i, width) {
  const action = `${stage[i]}${kinds[kind[i]].text}${mb[i]}`;
  return (action.length + 2) * LABEL_SIZES[0] * LABEL_CHAR <= width ? action : String(mb[i]);
}

function labelSize(text, width, height) {
  return LABEL_SIZES.find((size) => size <= height && (text.length + 0.35) * size * LABEL_CHAR <= width);
}

// Each row becomes one line of pixels: each pixel is the average over its interval.
const picture = new Picture();

function drawAveraged(context, timeline, layout, plot, palette, state, rows) {
  const ratio = window.devicePixelRatio || 1;
  const columns = Math.round(plot.width * ratio);
  const { pixels } = picture.clear(columns, Math.max(1, rows.length));
  rows.forEach((row, number) => {
    const sums = averageRow(timeline, row, plot.view, columns, palette, state);
    packRow(sums, pixels, number * columns, columns);
  });
  const canvas = picture.finish();
  context.imageSmoothingEnabled = false;
  rows.forEach(({ lane, key }, number) => {
    const [y, height] = [rowTop(layout, lane, key), rowHeightOf(layout, key)];
    context.drawImage(canvas, 0, number, columns, 1, GUTTER, y, plot.width, height);
  });
  return rows.length;
}

// Sum colour × width for each pixel column: red, green, blue and the covered share.
function averageRow(timeline, { from, to }, view, columns, palette, state) {
  const { start, end, kind, mb, part } = timeline.spans;
  const { numShades, bright, faint } = palette;
  if (rowSums.length !== 4 * columns) rowSums = new Float32Array(4 * columns);
  const sums = rowSums.fill(0);
  const scale = columns / view.seconds;
  for (let i = from; i < to; i++) {
    if (state.isHidden[kind[i]]) continue;
    const rgb = (state.mb === null || state.mb === mb[i] ? bright : faint).rgb;
    const at = 3 * (kind[i] * numShades + timeline.shade[i]);
    const left = Math.max(0, (start[i] - view.start) * scale),
      right = Math.min(columns, (end[i] - view.start) * scale);
    const weight = part[i] === WHOLE ? 1 : 0.5;
    for (let column = Math.floor(left); column < right; column++) {
      const share = weight * (Math.min(column + 1, right) - Math.max(column, left));
      const sum = 4 * column;
      sums[sum] += share * rgb[at];
      sums[sum + 1] += share * rgb[at + 1];
      sums[sum + 2] += share * rgb[at + 2];
      sums[sum + 3] += share;
    }
  }
  return sums;
}

function packRow(sums, pixels, offset, columns) {
  for (let column = 0; column < columns; column++) {
    const sum = 4 * column,
      share = sums[sum + 3];
    if (share === 0) continue;
    const alpha = Math.min(255, share * 255 + 0.5) | 0;
    pixels[offset + column] =
      (alpha << 24) | ((sums[sum + 2] / share) << 16) | ((sums[sum + 1] / share) << 8) | (sums[sum] / share);
  }
}

// Left of each lane: its number, bubble and peak. If lanes are low, only some have labels.
function drawGutter(context, timeline, layout, palette, firstLane, lastLane) {
  const every = Math.ceil(12 / layout.rowHeight);
  const isDark = palette.base.panel[0] < 128;
  context.textBaseline = "middle";
  context.font = `11px ${FONT}`;
  gutterText(context, palette.soft, HEADING / 2, "lane", "bubble", "peak");
  context.font = `${Math.min(12, Math.max(10, layout.rowHeight - 1))}px ${FONT}`;
  for (let lane = firstLane; lane < lastLane; lane++) {
    const top = rowTop(layout, lane, COMPUTE);
    const middle = top + layout.computeHeight / 2;
    context.fillStyle = toCss(laneColour(lane, timeline.numLanes, isDark)); // the colour of its memory curve
    context.fillRect(12, top, 3, layout.computeHeight);
    if (lane % every) continue;
    gutterText(
      context,
      palette.text,
      middle + 0.5,
      String(lane),
      formatShare(timeline.laneBubbles[lane]),
      peakText(timeline, lane),
    );
  }
}

function gutterText(context, colour, y, lane, bubble, peak) {
  context.fillStyle = colour;
  context.textAlign = "left";
  context.fillText(lane, 20, y);
  context.textAlign = "right";
  context.fillText(bubble, 104, y);
  context.fillText(peak, GUTTER - 12, y);
}

function peakText(timeline, lane) {
  return timeline.memory.unit === "bytes" ? formatBytes(timeline.peakBytes[lane]) : String(timeline.peakSaved[lane]);
}
