// The samples: cards made of text, never of HTML, a page of them at a time.
{
  const section = document.getElementById("samples"), form = section.querySelector("form"), more = section.querySelector(".more");
  const { prompts, samples, note } = JSON.parse(document.getElementById("samples-data").textContent);
  const AT_ONCE = 24, number = (value) => String(Number(value.toPrecision(3)));
  const KINDS = { train: "training", eval: "held out, sampled", greedy: "held out, greedy" };
  const RESULTS = {
    correct: ["correct", (one) => one.correct === true],
    wrong: ["not correct", (one) => one.correct === false],
    cut: ["cut off at the length limit", (one) => one.finish === "length"],
  };
  const ORDERS = {
    newest: ["newest first", (a, b) => b.step - a.step],
    oldest: ["oldest first", (a, b) => a.step - b.step],
    best: ["highest reward first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step],
    worst: ["lowest reward first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step],
    prompt: ["by prompt", (a, b) => a.prompt - b.prompt || a.step - b.step],
  };
  for (const one of samples) one.kind ??= "train";

  function element(tag, kind, text) {
    const made = document.createElement(tag);
    made.className = kind;
    made.textContent = text;
    return made;
  }
  function choices(name, pairs) {
    for (const [value, text] of pairs) form[name].add(new Option(text, value));
    form[name].hidden = form[name].length < 2 || (form[name].length === 2 && form[name].options[0].value === "");
  }
  const there = (test) => samples.some(test);
  choices("kind", [["", "all prompts"], ...Object.entries(KINDS).filter(([kind]) => there((one) => one.kind === kind))]);
  choices("result", [["", "all results"], ...Object.entries(RESULTS).filter(([, [, test]]) => there(test)).map(([k, [text]]) => [k, text])]);
  choices("step", [["", "all steps"], ...[...new Set(samples.map((one) => one.step))].sort((a, b) => b - a).map((s) => [s, "step " + s])]);
  choices("order", Object.entries(ORDERS).map(([k, [text]]) => [k, text]));

  let only = null, found = [], shown = 0;
  function card(one) {
    const made = element("div", "card sample", ""), head = element("div", "head", "");
    head.append(element("span", "", "step " + one.step), element("span", "", KINDS[one.kind] ?? one.kind));
    if (one.answer !== undefined) head.append(element("span", "", "answer " + one.answer));
    if (one.finish === "length") head.append(element("span", "cut", "cut off"));
    const known = one.correct !== undefined, plain = one.reward === undefined || (known && one.reward === Number(one.correct));
    const reward = plain ? "" : "reward " + number(one.reward);
    const words = [known ? (one.correct ? "correct" : "not correct") : "", reward].filter(Boolean).join(", ");
    head.append(element("b", known ? (one.correct ? "up" : "down") : "", words));
    const prompt = element("pre", "prompt", prompts[one.prompt]);
    prompt.title = "click for all samples of this prompt";
    prompt.onclick = () => { if (!String(getSelection())) { only = one.prompt; form.order.value = "oldest"; look(); } };
    const numbers = Object.entries(one.metrics ?? {}).map(([name, value]) => name + " " + number(value)).join(" · ");
    made.append(head, prompt, element("pre", "", one.response ?? ""));
    if (numbers) made.append(element("div", "note", numbers));
    return made;
  }
  function show() {
    section.querySelector(".samples").append(...found.slice(shown, shown + AT_ONCE).map(card));
    shown = Math.min(found.length, shown + AT_ONCE);
    more.hidden = shown === found.length;
  }
  function look() {
    const text = form.find.value.toLowerCase(), { kind, result, step, order } = form;
    found = samples.filter((one) =>
      (only === null || one.prompt === only) && (!kind.value || one.kind === kind.value) && (!step.value || one.step === Number(step.value)) &&
      (!result.value || RESULTS[result.value][1](one)) &&
      (!text || [prompts[one.prompt], one.response ?? "", one.answer ?? ""].some((part) => String(part).toLowerCase().includes(text))));
    found.sort(ORDERS[order.value][1]);
    form.all.hidden = only === null;
    form.querySelector("output").textContent = [found.length, "of", samples.length, samples.length === 1 ? "sample" : "samples", note].join(" ");
    section.querySelector(".samples").replaceChildren();
    shown = 0;
    show();
  }
  form.addEventListener("input", look);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.all.onclick = () => { only = null; look(); };
  more.onclick = show;
  look();
}
