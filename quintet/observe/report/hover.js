// The text beside the pointer over a plot.
const box = document.getElementById("hover");
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const rows = JSON.parse(svg.dataset.hover), cursor = svg.querySelector(".cursor"), wide = svg.viewBox.baseVal.width;
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width;
    let best = rows[0];
    for (const row of rows) if (Math.abs(row[1] - at) < Math.abs(best[1] - at)) best = row;
    cursor.setAttribute("x1", best[1] * wide); cursor.setAttribute("x2", best[1] * wide);
    cursor.style.visibility = "visible";
    box.textContent = best[0] + "\n" + best[2];
    box.style.display = "block";
    const right = event.clientX + 16 + box.offsetWidth > innerWidth;
    box.style.left = (right ? event.clientX - 16 - box.offsetWidth : event.clientX + 16) + "px";
    box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 6) + "px";
  });
  svg.addEventListener("pointerleave", () => { box.style.display = "none"; cursor.style.visibility = "hidden"; });
}
