// Gestures: wheel, drag, keys and the tooltip, the same on all pages.

const NEAR = 3; // pixels within which the pointer still hits a span, and a press is still a click

function handleWheel(page, event, canvas) {
  const box = canvas.getBoundingClientRect();
  const plot = page.plotOf(canvas);
  if (event.clientX < box.left + plot.left) return; // left of the plot, the wheel scrolls the page
  event.preventDefault();
  const pixels = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) page.view.pan((event.deltaX * pixels) / plot.scale);
  else
    page.view.zoom(
      Math.exp(Math.max(-400, Math.min(400, event.deltaY * pixels)) * 0.002),
      plot.seconds(event.clientX - box.left),
    );
  page.requestDraw();
}

function handleDrag(page, panel, canvas, onClick) {
  let held = null;
  panel.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, y: event.clientY, hasMoved: false };
    panel.setPointerCapture(event.pointerId);
  });
  panel.addEventListener("pointermove", (event) => {
    if (!held) return;
    const dx = event.clientX - held.x,
      dy = event.clientY - held.y;
    if (!held.hasMoved && Math.hypot(dx, dy) < NEAR) return;
    panel.classList.add("dragging");
    page.view.pan(-dx / page.plotOf(canvas).scale);
    if (event.pointerType === "mouse") window.scrollBy(0, -dy);
    held = { x: event.clientX, y: event.clientY, hasMoved: true };
    page.requestDraw();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    panel.addEventListener(name, (event) => {
      panel.classList.remove("dragging");
      if (held && !held.hasMoved && name === "pointerup") onClick(event);
      held = null;
    });
  }
  panel.addEventListener("dblclick", () => page.reset());
}

function handleKey(page, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { view } = page;
  const middle = (view.start + view.end) / 2;
  const actions = {
    "+": () => view.zoom(1 / 1.5, middle),
    "=": () => view.zoom(1 / 1.5, middle),
    "-": () => view.zoom(1.5, middle),
    ArrowLeft: () => view.pan(-view.seconds / 10),
    ArrowRight: () => view.pan(view.seconds / 10),
    0: () => view.reset(),
    Escape: () => page.follow(null),
  };
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
  page.requestDraw();
}

function placeTooltip(tooltip, x, y) {
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = x + 16 + width > window.innerWidth - 8 ? x - 16 - width : x + 16;
  const top = Math.min(y + 14, window.innerHeight - height - 8);
  tooltip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
}
