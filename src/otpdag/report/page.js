"use strict";
// A node of the graph that is pointed at, tapped or reached by the tab key shows its estimates.
const about = document.getElementById("about-node");
function tell(node) {
  const text = document.getElementById("estimates-" + node.dataset.node);
  if (about && text) about.innerHTML = text.innerHTML;
}
document.querySelectorAll(".graph [data-node]").forEach((node) => {
  ["mouseenter", "focus", "click"].forEach((kind) => node.addEventListener(kind, () => tell(node)));
});
