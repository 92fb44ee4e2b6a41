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

// What a figure tells, and what to look for: over its title.
const HELP = {
  "Reward": "What a step's samples were worth to the reward function. It should rise; when it does not, read samples below.",
  "Held-out accuracy": "Share of correct responses to prompts that are not trained on: sampled as in training, and greedy.",
  "Held-out reward": "Mean reward of responses to prompts that are not trained on.",
  "Groups without signal": "Groups whose samples all got the same reward teach nothing: near 100% the task is too hard or too easy.",
  "Response length": "Longest at its limit: responses are cut off (rollout.max_response_tokens).",
  "KL": "How far the policy is from the one that generated (rounding alone: above 0.01 something is stale or wrong) and from the reference policy (grows as it learns).",
  "|Δ log-prob|, rollout ↔ trainer": "Between what the rollout and the trainer say of the same tokens: large values are a fault, see quintet diagnose mismatch.",
  "Loss": "In RL it stays around 0 and says little; in the warm-up it should fall.",
  "Gradient norm": "Before clipping. 0 for many steps: nothing is learned. Spikes: lower the learning rate.",
  "Entropy": "Of the policy at a token. Falling to 0 means that it always says the same and explores no more.",
  "Clipped tokens": "Tokens whose update the policy loss has clipped; 0 with one mini-batch a step, a few percent with several.",
};
for (const title of document.querySelectorAll(".plot h3"))
  if (HELP[title.textContent]) { title.title = HELP[title.textContent]; title.classList.add("help"); }
