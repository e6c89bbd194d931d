"use strict";
for (const group of document.querySelectorAll("[data-filter]")) {
  const rows = [...document.querySelectorAll(`[data-filtered="${group.dataset.filter}"] tbody tr`)];
  const search = group.querySelector("input");
  const selects = [...group.querySelectorAll("select")];
  const said = group.querySelector("output");
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => text.includes(word))
        && selects.every((one) => !one.value || row.dataset[one.dataset.key] === one.value);
      row.hidden = !fits;
      shown += fits;
    }
    said.textContent = `${shown} of ${rows.length} shown`;
  };
  search.addEventListener("input", apply);
  for (const one of selects) one.addEventListener("change", apply);
  apply();
}
for (const chooser of document.querySelectorAll("[data-platforms]")) {
  const table = document.getElementById(chooser.dataset.platforms);
  chooser.addEventListener("change", () => {
    for (const cell of table.querySelectorAll("[data-platform]")) {
      cell.classList.toggle("full", cell.dataset.platform === chooser.value);
    }
  });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  const status = document.getElementById("copied");
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      status.textContent = "Copied.";
    } catch {
      // No clipboard for this page: the text is selected, so that the person's own copy key takes it.
      getSelection().selectAllChildren(source);
      source.focus();
      status.textContent = "Selected: press the copy key.";
    }
  });
}
const theme = document.getElementById("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "Light colours" : "Dark colours"; };
theme.hidden = false;
theme.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; label(); });
prefersDark.addEventListener("change", label);
label();
