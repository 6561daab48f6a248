"""Measure how long the timeline page takes to redraw 100,000 spans, in a headless Chromium.

    .venv/bin/python benchmarks/page/run.py

The script pans the page at several zoom levels and times whole redraws. It reads the canvases back, so that the drawing
is complete when the clock stops. A frame of a 60 Hz screen lasts 16.7 ms; a longer redraw is not smooth.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

import penstock

REPEATS = 15
FRAME_MS = 1000 / 60


def main() -> None:
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if browser is None:
        sys.exit("no Chromium found; see scripts/need_browser")
    schedule = penstock.schedules.build("zb_h1", lanes=64, micro_batches=320)
    timeline = penstock.simulate(schedule, penstock.Costs(transfer=0.1, saved_bytes=1 << 30))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        path = Path(folder) / "page.html"
        begin = time.perf_counter()
        timeline.to_html(path)
        written = time.perf_counter() - begin
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        begin = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_function("window.penstock !== undefined")
        opened = time.perf_counter() - begin
        size = path.stat().st_size / 1e6
        print(f"{len(timeline):,} spans; file {size:.1f} MB, written in {written:.2f} s, opened in {opened:.2f} s\n")
        print("| zoom | redraw ms, median | slowest | median ÷ frame |")
        print("|---|---|---|---|")
        for zoom in (1, 4, 16, 64, 256, 2000):
            times = page.evaluate(REDRAW, [zoom, REPEATS])
            middle = statistics.median(times)
            print(f"| {zoom} × | {middle:.1f} | {max(times):.1f} | {middle / FRAME_MS:.2f} |", flush=True)
        chromium.close()


# zoom into the middle, then pan a little for each redraw
REDRAW = """([zoom, repeats]) => {
  const {view, draw} = window.penstock;
  const whole = {start: 0, end: view.extent};
  const times = [];
  const canvases = [...document.querySelectorAll('canvas')];
  for (let turn = 0; turn < repeats; turn += 1) {
    const width = (whole.end - whole.start) / zoom;
    const start = whole.start + (whole.end - whole.start - width) * (0.4 + 0.01 * turn);
    view.start = start; view.end = start + width;
    const begin = performance.now();
    draw();
    for (const canvas of canvases) canvas.getContext('2d').getImageData(0, 0, 1, 1);
    times.push(performance.now() - begin);
  }
  return times;
}"""


if __name__ == "__main__":
    main()
