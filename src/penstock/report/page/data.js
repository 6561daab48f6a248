// Data: the timelines as typed arrays, and searches in them.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };
const LAST_TICK = 2 ** 32 - 1;
const COMPUTE = -1; // the compute row of a lane; other rows have the number of their kind
const WHOLE = 0,
  UPPER = 1,
  LOWER = 2; // the part of the height of its row that a span takes

function decodeColumn({ type, base64 }) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[type](bytes.buffer);
}

function decodeColumns(columns) {
  return Object.fromEntries(
    Object.entries(columns).map(([name, column]) => [
      name,
      column.base64 === undefined ? column : decodeColumn(column),
    ]),
  );
}

function readTimeline(raw, kinds) {
  const secondsPerTick = raw.stepSeconds / LAST_TICK;
  const spans = decodeColumns(raw.spans);
  spans.end = Float64Array.from(spans.start, (tick, i) => (tick + spans.ticks[i]) * secondsPerTick);
  spans.start = Float64Array.from(spans.start, (tick) => tick * secondsPerTick);
  spans.lanes = readRows(spans, kinds);
  spans.reach = runningEnds(spans);
  spans.part = findOverlaps(spans);
  const shades = shadeByStage(spans);
  const memory = decodeColumns(raw.memory);
  memory.start = Float64Array.from(memory.start, (tick) => tick * secondsPerTick);
  memory.max = memory.value.reduce((a, b) => Math.max(a, b), 0);
  return { ...raw, spans, ...shades, memory, compute: countCompute(spans) };
}

// The rows of each lane: compute first, then one strip per kind of transfer.
function readRows(spans, kinds) {
  let first = 0;
  return Array.from(spans.laneEnds, (laneEnd) => {
    const rows = [{ key: COMPUTE, first, last: first }];
    for (let i = first; i < laneEnd; i++) {
      const kind = spans.kind[i];
      const key = kinds[kind].where === "LANE" ? COMPUTE : kind;
      if (key !== rows.at(-1).key) rows.push({ key, first: i, last: i });
      rows.at(-1).last = i + 1;
    }
    first = laneEnd;
    return rows;
  });
}

// The latest end so far in the row of a span: it never decreases, so a search works even if spans overlap.
function runningEnds({ lanes, end }) {
  const reach = new Float64Array(end.length);
  for (const { first, last } of lanes.flat()) {
    let latest = 0;
    for (let i = first; i < last; i++) reach[i] = latest = Math.max(latest, end[i]);
  }
  return reach;
}

// Two actions of a lane that run at the same time share its height. A slight measured overlap is ignored.
function findOverlaps({ lanes, start, end }) {
  const part = new Uint8Array(start.length);
  for (const [{ first, last }] of lanes) {
    for (let i = first + 1; i < last; i++) {
      const shorter = Math.min(end[i] - start[i], end[i - 1] - start[i - 1]);
      if (end[i - 1] - start[i] <= shorter * 0.1) continue;
      if (part[i - 1] === WHOLE) part[i - 1] = UPPER;
      part[i] = part[i - 1] === UPPER ? LOWER : UPPER;
    }
  }
  return part;
}

// Number the stages of each lane, so that each stage has its own shade.
function shadeByStage({ lanes, stage }) {
  const shade = new Uint8Array(stage.length);
  let numShades = 1;
  for (const rows of lanes) {
    const { first } = rows[0],
      { last } = rows.at(-1);
    const stages = [...new Set(stage.subarray(first, last))].sort((a, b) => a - b);
    const shadeOf = new Map(stages.map((s, number) => [s, Math.min(number, 255)]));
    for (let i = first; i < last; i++) shade[i] = shadeOf.get(stage[i]);
    numShades = Math.max(numShades, Math.min(stages.length, 256));
  }
  return { shade, numShades };
}

// The number of lanes that compute from each moment on, and the lane-seconds of compute before it.
function countCompute({ lanes, start, end, reach }) {
  const starts = [],
    ends = [];
  for (const [{ first, last }] of lanes) {
    for (let i = first; i < last; i++) {
      const from = i > first ? Math.max(start[i], reach[i - 1]) : start[i];
      if (end[i] > from) (starts.push(from), ends.push(end[i]));
    }
  }
  const opens = Float64Array.from(starts).sort(),
    closes = Float64Array.from(ends).sort();
  const at = new Float64Array(2 * opens.length),
    lanesBusy = new Int32Array(at.length),
    total = new Float64Array(at.length);
  for (let n = 0, o = 0, c = 0; n < at.length; n++) {
    const isOpening = o < opens.length && opens[o] <= closes[c];
    at[n] = isOpening ? opens[o++] : closes[c++];
    lanesBusy[n] = o - c;
    total[n] = n ? total[n - 1] + lanesBusy[n - 1] * (at[n] - at[n - 1]) : 0;
  }
  return { at, lanesBusy, total };
}

// The first index in [first, last) whose value is above the limit; values must not decrease.
function firstAbove(values, limit, first, last) {
  while (first < last) {
    const middle = (first + last) >> 1;
    if (values[middle] > limit) last = middle;
    else first = middle + 1;
  }
  return first;
}

function visibleSpans(spans, row, view) {
  return [
    firstAbove(spans.reach, view.start, row.first, row.last),
    firstAbove(spans.start, view.end, row.first, row.last),
  ];
}

// The span of a row at a moment, or the nearest one within reach of the pointer; -1: none.
function spanAt(spans, row, seconds, slack, accepts) {
  let best = -1,
    nearest = slack;
  const from = firstAbove(spans.reach, seconds - slack, row.first, row.last);
  for (let i = from; i < row.last && spans.start[i] <= seconds + slack; i++) {
    const distance = Math.max(spans.start[i] - seconds, seconds - spans.end[i], 0);
    if (distance > nearest || !accepts(i)) continue;
    [best, nearest] = [i, distance];
    if (distance === 0 && spans.end[i] > seconds) break;
  }
  return best;
}

// The interval around a moment in which a lane computes nothing, or null.
function gapAt(spans, row, seconds, stepSeconds) {
  const next = firstAbove(spans.start, seconds, row.first, row.last);
  const start = next > row.first ? spans.reach[next - 1] : 0;
  const end = next < row.last ? spans.start[next] : stepSeconds;
  return start <= seconds && seconds <= end ? { start, end } : null;
}

// The memory that a lane holds at a moment.
function heldAt(memory, lane, seconds) {
  const first = lane ? memory.laneEnds[lane - 1] : 0;
  const next = firstAbove(memory.start, seconds, first, memory.laneEnds[lane]);
  return next > first ? memory.value[next - 1] : 0;
}

function computeUntil({ at, lanesBusy, total }, seconds) {
  const place = firstAbove(at, seconds, 0, at.length) - 1;
  return place < 0 ? 0 : total[place] + lanesBusy[place] * (seconds - at[place]);
}

// The share of lanes without compute, averaged over an interval.
function bubbleBetween(timeline, start, end) {
  const busy = computeUntil(timeline.compute, end) - computeUntil(timeline.compute, start);
  return Math.min(1, Math.max(0, 1 - busy / (timeline.numLanes * (end - start))));
}
