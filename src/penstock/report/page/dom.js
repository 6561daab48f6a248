// DOM: create elements. Text from the data is only ever set as text.

function element(tag, { text, ...properties } = {}, children = []) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role" || name === "scope") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

function fillTooltip(tooltip, { title, words, facts }) {
  tooltip.replaceChildren(
    element("strong", { text: title }),
    " ",
    element("em", { text: words }),
    element(
      "dl",
      {},
      facts.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]),
    ),
  );
}
