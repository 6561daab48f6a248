// Palette: read the light or dark colours from the style sheet, and shade them by stage.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", Arial, sans-serif';

const PALEST = 0.45; // the share of the panel colour in the colour of the last stage of a lane

function readPalette(kinds, numShades) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => parseColour(style.getPropertyValue(name).trim());
  const base = Object.fromEntries(
    ["panel", "lane", "grid", "line", "text", "soft", "accent", "bubble"].map((name) => [name, colour(`--${name}`)]),
  );
  const bright = [],
    faint = [];
  for (const kind of kinds) {
    for (let shade = 0; shade < numShades; shade++) {
      const plain = mix(
        colour(`--kind-${kind.text}`),
        base.panel,
        numShades > 1 ? (PALEST * shade) / (numShades - 1) : 0,
      );
      bright.push(plain);
      faint.push(mix(plain, base.lane, 0.82));
    }
  }
  const css = Object.fromEntries(Object.entries(base).map(([name, rgb]) => [name, toCss(rgb)]));
  return { ...css, base, numShades, bright: swatches(bright), faint: swatches(faint) };
}

// The same colours in three forms: numbers to add up, text for a canvas, and the text colour on top of them.
function swatches(colours) {
  return { rgb: Float32Array.from(colours.flat()), css: colours.map(toCss), ink: colours.map(inkOn) };
}

function parseColour(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function mix(colour, other, share) {
  return colour.map((part, i) => part + (other[i] - part) * share);
}

function toCss(rgb) {
  return `rgb(${rgb.map(Math.round).join(" ")})`;
}

function inkOn([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#131722" : "#ffffff";
}

function packPixel([r, g, b], alpha = 255) {
  return ((alpha << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
}

// One colour per lane: hues from blue through violet to orange.
function laneColour(lane, numLanes, isDark) {
  const hue = 212 + (lane / Math.max(1, numLanes - 1)) * 180;
  return hslToRgb(hue % 360, 0.68, isDark ? 0.66 : 0.52);
}

function hslToRgb(hue, saturation, lightness) {
  const spread = saturation * Math.min(lightness, 1 - lightness);
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    return 255 * (lightness - spread * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  });
}
