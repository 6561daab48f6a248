// Interaction: find what is under the pointer on the timeline page, and describe it.

// What is under a point of the lanes of a section: a lane, and possibly one of its rows and a span.
function findInLanes(section, plot, state, x, y) {
  const { timeline, layout } = section;
  const lane = Math.floor((y - HEADING) / layout.rowHeight);
  if (lane < 0 || lane >= timeline.numLanes) return null;
  const inside = y - HEADING - lane * layout.rowHeight;
  const strip = Math.min(layout.strips.length - 1, Math.floor((inside - layout.computeHeight) / layout.stripHeight));
  const key = inside < layout.computeHeight || strip < 0 ? COMPUTE : layout.strips[strip];
  const row = timeline.spans.lanes[lane].find((candidate) => candidate.key === key);
  const found = { lane, key, row, span: -1, seconds: plot.seconds(x) };
  if (row && x >= GUTTER) {
    const { part, kind } = timeline.spans;
    const own = inside < layout.computeHeight / 2 ? UPPER : LOWER;
    const accepts = (i) => !state.isHidden[kind[i]] && (part[i] === WHOLE || part[i] === own);
    found.span = spanAt(timeline.spans, row, found.seconds, NEAR / plot.scale, accepts);
  }
  return found;
}

function describeSpan(timeline, prediction, kinds, lane, i) {
  const { start, end, kind, stage, mb, toLane } = timeline.spans;
  const { text, words, where } = kinds[kind[i]];
  const facts = [
    ["stage", stage[i]],
    ["micro-batch", mb[i]],
    ["start", formatSeconds(start[i])],
    ["end", formatSeconds(end[i])],
  ];
  facts.push(["duration", formatSeconds(end[i] - start[i])]);
  // a measured receive lasts as long as its lane waited, so its duration cannot be compared
  const isCompared = timeline.isMeasured && prediction && (where === "LANE" || text.startsWith("SEND"));
  const predicted = isCompared ? predictedSeconds(timeline, prediction, i) : null;
  if (predicted !== null) {
    const ratio = predicted > 0 ? ` (${formatRatio((end[i] - start[i]) / predicted)} ×)` : "";
    facts.push(["predicted", `${formatSeconds(predicted)}${ratio}`]);
  }
  facts.unshift(where === "LANE" ? ["lane", lane] : ["from → to", routeText(text, lane, toLane[i] - 1)]);
  return { title: `${stage[i]}${text}${mb[i]}`, words, facts };
}

function routeText(kind, lane, toLane) {
  if (kind === "OFFLOAD") return `lane ${lane} → host memory`;
  if (kind === "FETCH") return `host memory → lane ${lane}`;
  return toLane < 0 ? `lane ${lane}` : `lane ${lane} → lane ${toLane}`;
}

function describeLane(timeline, { lane, row, key, seconds }, x) {
  const gap = x >= GUTTER && key === COMPUTE ? gapAt(timeline.spans, row, seconds, timeline.stepSeconds) : null;
  const facts = [
    ["bubble of the makespan", formatShare(timeline.laneBubbles[lane])],
    ["peak", peakText(timeline, lane)],
  ];
  if (gap && gap.end > gap.start) facts.unshift(["no compute for", formatSeconds(gap.end - gap.start)]);
  return { title: `lane ${lane}`, words: "", facts };
}

// The lane whose curve is nearest to the pointer, and the memory that it holds there.
function describeMemory(section, plot, x, y) {
  const { timeline, memoryMax } = section;
  const seconds = plot.seconds(x);
  if (x < GUTTER || seconds > timeline.stepSeconds) return null;
  const pointed = ((MEMORY_HEIGHT - FOOT - y) / (MEMORY_HEIGHT - FOOT - TOP)) * memoryMax;
  let lane = 0,
    held = Infinity;
  for (let candidate = 0; candidate < timeline.numLanes; candidate++) {
    const value = heldAt(timeline.memory, candidate, seconds);
    if (Math.abs(value - pointed) < Math.abs(held - pointed)) [lane, held] = [candidate, value];
  }
  const isBytes = timeline.memory.unit === "bytes";
  const facts = [
    ["holds", isBytes ? formatBytes(held) : `${held} stage micro-batches`],
    ["at", formatSeconds(seconds)],
    ["peak", peakText(timeline, lane)],
  ];
  return { lane, title: `lane ${lane}`, words: "", facts };
}

function describeBubble(timeline, plot, x) {
  const start = plot.seconds(x),
    end = plot.seconds(x + 1);
  if (x < GUTTER || start >= timeline.stepSeconds) return null;
  const share = bubbleBetween(timeline, start, Math.min(end, timeline.stepSeconds));
  const facts = [
    ["lanes without compute", `${formatNumber(share * timeline.numLanes, 3)} of ${timeline.numLanes}`],
    ["at", formatSeconds(start)],
  ];
  return { title: formatShare(share), words: "bubble", facts };
}
