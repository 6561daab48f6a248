// Format: numbers for display.

const TIME_UNITS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function timeUnit(seconds) {
  return TIME_UNITS.find(([size]) => Math.abs(seconds) >= size * 0.9995) ?? TIME_UNITS.at(-1);
}

// The complete integer part, and decimals up to `digits` digits in total, without trailing zeros.
function formatNumber(value, digits) {
  const whole = Math.max(1, Math.floor(Math.log10(Math.abs(value) || 1)) + 1);
  return String(Number(value.toFixed(Math.max(0, digits - whole))));
}

function formatSeconds(seconds, digits = 5) {
  if (seconds === 0) return "0 s";
  const [size, unit] = timeUnit(seconds);
  return `${formatNumber(seconds / size, digits)} ${unit}`;
}

function formatShare(share) {
  return `${(Math.abs(share) < 5e-4 ? 0 : share * 100).toFixed(1)} %`;
}

function formatBytes(bytes) {
  let power = 0;
  while (bytes >= 1024 * 0.9995 && power < BYTE_UNITS.length - 1) {
    bytes /= 1024;
    power += 1;
  }
  return `${formatNumber(bytes, 3)} ${BYTE_UNITS[power]}`;
}

function formatRatio(ratio) {
  return ratio < 100 ? ratio.toPrecision(3) : ratio.toFixed(0);
}
