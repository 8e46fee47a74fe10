"use strict";
// Charts are drawn when they come near the screen, and all of them before the page is printed.
const drawn = new Set();
function draw(box) {
  if (drawn.has(box)) return;
  drawn.add(box);
  const figure = JSON.parse(document.getElementById(box.dataset.figure).textContent);
  Plotly.newPlot(box, figure.data, figure.layout, { responsive: true, displayModeBar: false });
}
const boxes = Array.from(document.querySelectorAll("[data-figure]"));
const watcher = new IntersectionObserver(
  (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => draw(e.target)),
  { rootMargin: "600px" },
);
boxes.forEach((box) => watcher.observe(box));
window.addEventListener("beforeprint", () => boxes.forEach(draw));

// A node of the graph that is pointed at, tapped or reached by the tab key shows its estimates.
const about = document.getElementById("about-node");
function tell(node) {
  const text = document.getElementById("estimates-" + node.dataset.node);
  if (about && text) about.innerHTML = text.innerHTML;
}
document.querySelectorAll(".graph [data-node]").forEach((node) => {
  ["mouseenter", "focus", "click"].forEach((kind) => node.addEventListener(kind, () => tell(node)));
});
