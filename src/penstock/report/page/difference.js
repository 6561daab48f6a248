// Difference: why a measured step took longer than predicted, by kind of action and by cause of idle time.
// Each figure is a mean over lanes, so the differences add up to that of the step.

// The parts of a step, with their seconds on each lane: compute by kind, then the causes of the bubble.
function partsOf(timeline, kinds, causes) {
  const ofKind = computeByKind(timeline, kinds.length);
  const compute = kinds.map(({ text, words }, kind) => ({ name: `${text} ${words}`, text, seconds: ofKind[kind] }));
  if (!timeline.causes?.lanes.length) {
    const idle = timeline.laneBubbles.map((share) => share * timeline.stepSeconds);
    return { compute, idle: [{ field: "warm_up", name: "idle", seconds: idle }] };
  }
  const idle = causes.map(({ field, name }) => ({
    field,
    name,
    seconds: timeline.causes.lanes.map((lane) => lane[field] * timeline.stepSeconds),
  }));
  return { compute, idle };
}

// Seconds of compute of each kind on each lane; of two overlapping actions, the second counts from the end of the first.
function computeByKind({ spans, numLanes }, numKinds) {
  const found = Array.from({ length: numKinds }, () => new Float64Array(numLanes));
  spans.lanes.forEach(([{ first, last }], lane) => {
    for (let i = first; i < last; i++) {
      const from = i > first ? Math.max(spans.start[i], spans.reach[i - 1]) : spans.start[i];
      found[spans.kind[i]][lane] += Math.max(0, spans.end[i] - from);
    }
  });
  return found;
}

// The parts of both steps side by side; null if they cannot be compared.
function compareParts(measured, predicted, kinds, causes) {
  if (!measured.isMeasured || !predicted || measured.numLanes !== predicted.numLanes) return null;
  const hasCauses = [measured, predicted].every((timeline) => timeline.causes?.lanes.length);
  const bare = (timeline) => (hasCauses ? timeline : { ...timeline, causes: null });
  const [mine, theirs] = [measured, predicted].map((timeline) => partsOf(bare(timeline), kinds, causes));
  const pairs = (group) =>
    mine[group]
      .map((part, at) => comparePart(part, theirs[group][at].seconds, measured.stepSeconds * ROUNDING))
      .filter(({ measured: m, predicted: p }) => m > 0 || p > 0);
  return { compute: pairs("compute"), idle: pairs("idle") };
}

const ROUNDING = 1e-6; // of the step: times are rounded to integers, so equal times can differ slightly

function comparePart(part, predictedSeconds, least) {
  const exact = (seconds) => (Math.abs(seconds) < least ? 0 : seconds);
  const more = Array.from(part.seconds, (seconds, lane) => exact(seconds - predictedSeconds[lane]));
  const most = more.reduce((best, seconds, lane) => (Math.abs(seconds) > Math.abs(more[best]) ? lane : best), 0);
  const ratioOnMost = predictedSeconds[most] > 0 ? part.seconds[most] / predictedSeconds[most] : null;
  const predicted = mean(predictedSeconds);
  return { ...part, measured: predicted + mean(more), predicted, more, most, ratioOnMost };
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function signedSeconds(seconds) {
  if (seconds === 0) return "0 s";
  return `${seconds < 0 ? "−" : "+"}${formatSeconds(Math.abs(seconds), 3)}`;
}

function buildDifference(measured, predicted, kinds, causes) {
  const parts = compareParts(measured, predicted, kinds, causes);
  if (!parts) return [];
  return [
    element("p", { className: "difference", text: differenceText(measured, predicted, parts) }),
    element("details", { className: "difference" }, [
      element("summary", { text: "Measured compared with predicted, by kind and lane" }),
      buildDifferenceTable(measured, predicted, parts),
    ]),
  ];
}

function differenceText(measured, predicted, { compute, idle }) {
  const gain = (parts) => parts.reduce((sum, part) => sum + mean(part.more), 0);
  const total = measured.stepSeconds - predicted.stepSeconds;
  const how = total < 0 ? "shorter" : "longer";
  const worst = compute.reduce((a, b) => (Math.abs(b.more[b.most]) > Math.abs(a.more[a.most]) ? b : a));
  const ratio = worst.ratioOnMost ? `, ${formatRatio(worst.ratioOnMost)} × the prediction` : "";
  const most = ` (most in ${worst.text} on lane ${worst.most}: ${signedSeconds(worst.more[worst.most])}${ratio})`;
  const waits = idle.map((part) => `${part.name} ${signedSeconds(mean(part.more))}`);
  return (
    `The step took ${formatSeconds(Math.abs(total), 3)} ${how} than predicted. Mean over lanes: ` +
    [`actions ${signedSeconds(gain(compute))}${most}`, ...waits].join(", ")
  );
}

const MOST_LANE_COLUMNS = 8;

function buildDifferenceTable(measured, predicted, { compute, idle }) {
  const lanes = Array.from({ length: measured.numLanes }, (_, lane) => lane);
  const isWide = lanes.length <= MOST_LANE_COLUMNS;
  const names = [
    "mean over lanes",
    "predicted",
    "measured",
    "difference",
    "ratio",
    ...(isWide ? lanes.map((lane) => `lane ${lane}`) : ["most on"]),
  ];
  const row = (name, part) =>
    element("tr", {}, [
      element("th", { scope: "row" }, name),
      ...[
        formatSeconds(part.predicted, 3),
        formatSeconds(part.measured, 3),
        signedSeconds(mean(part.more)),
        part.predicted > 0 ? `${formatRatio(part.measured / part.predicted)} ×` : "–",
        ...(isWide ? part.more.map(signedSeconds) : [`lane ${part.most}: ${signedSeconds(part.more[part.most])}`]),
      ].map((text) => element("td", { text })),
    ]);
  const swatch = (name) => {
    const made = element("span", { className: "swatch" });
    made.style.background = `var(--${name})`;
    return made;
  };
  const step = measured.stepSeconds - predicted.stepSeconds;
  const rows = [
    ...compute.map((part) => row([swatch(`kind-${part.text}`), part.name], part)),
    ...idle.map((part) => row([swatch(`cause-${part.field}`), part.name], part)),
    row(["step"], {
      measured: measured.stepSeconds,
      predicted: predicted.stepSeconds,
      more: lanes.map(() => step),
      most: 0,
    }),
  ];
  const heading = element(
    "tr",
    {},
    names.map((text) => element("th", { scope: "col", text })),
  );
  return element("table", {}, [element("thead", {}, [heading]), element("tbody", {}, rows)]);
}

// The predicted duration of an action; null if the prediction does not have it.
function predictedSeconds(timeline, prediction, i) {
  prediction.place ??= new Map(
    Array.from(prediction.spans.kind, (_, at) => [actionKey(prediction.spans, at), at]).reverse(),
  );
  const at = prediction.place.get(actionKey(timeline.spans, i));
  return at === undefined ? null : prediction.spans.end[at] - prediction.spans.start[at];
}

function actionKey({ kind, stage, mb, toLane }, i) {
  return `${kind[i]} ${stage[i]} ${mb[i]} ${toLane[i]}`;
}
