// View: the visible interval, the same for all timelines, and the conversion from seconds to pixels.

const GUTTER = 184; // left of the plot: lane, bubble, peak
const MARGIN = 18; // right of it
const DEEPEST_ZOOM = 1e7;

class View {
  constructor(extent) {
    this.extent = extent;
    this.reset();
  }

  get seconds() {
    return this.end - this.start;
  }

  reset() {
    this.start = 0;
    this.end = this.extent;
  }

  // Make the interval `factor` times as long; the moment `around` stays at its position.
  zoom(factor, around) {
    const seconds = Math.min(this.extent, Math.max(this.extent / DEEPEST_ZOOM, this.seconds * factor));
    const share = (around - this.start) / this.seconds;
    this.show(around - share * seconds, seconds);
  }

  pan(seconds) {
    this.show(this.start + seconds, this.seconds);
  }

  show(start, seconds) {
    this.start = Math.min(Math.max(0, start), this.extent - seconds);
    this.end = this.start + seconds;
  }
}

// The plot of a panel: its width in pixels, and the conversion between seconds and x.
class Plot {
  constructor(width, view, left = GUTTER) {
    this.left = left;
    this.width = Math.max(50, width - left - MARGIN);
    this.right = left + this.width;
    this.view = view;
    this.scale = this.width / view.seconds;
  }

  x(seconds) {
    return this.left + (seconds - this.view.start) * this.scale;
  }

  seconds(x) {
    return this.view.start + (x - this.left) / this.scale;
  }
}

// The ticks of the axis: 1, 2 or 5 times a power of ten apart, with at least `room` pixels between them.
function axisTicks(plot, room) {
  const least = room / plot.scale;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((times) => power * times >= least * 0.999999);
  const ticks = [];
  for (let n = Math.ceil(plot.view.start / step - 1e-9); n * step <= plot.view.end + step * 1e-9; n++)
    ticks.push(n * step);
  return { step, ticks };
}

// An image whose pixels are set one by one.
class Picture {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
  }

  clear(width, height) {
    if (this.image?.width !== width || this.image.height !== height) {
      [this.canvas.width, this.canvas.height] = [width, height];
      this.image = new ImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.pixels.fill(0);
    return this;
  }

  finish() {
    this.context.putImageData(this.image, 0, 0);
    return this.canvas;
  }
}

// Size a canvas for the pixels of the screen, clear it, and return its context, which uses CSS pixels.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    [canvas.width, canvas.height] = [w, h];
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
