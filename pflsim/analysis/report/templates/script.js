const root = document.documentElement;
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
root.classList.add("js");

/* theme */
document.querySelector(".theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};

/* highlight: chosen methods stay, others while the pointer or the focus is on them */
const chosen = new Set();
function light(extra) {
  const shown = extra ? new Set([...chosen, extra]) : chosen;
  document.body.classList.toggle("lit", shown.size > 0);
  for (const each of all("[data-m]:not(.chip)")) {
    const on = shown.has(each.dataset.m);
    each.classList.toggle("on", on);
    const fold = on && !extra && each.closest("details.fold");
    if (fold) fold.open = true;
  }
}
for (const chip of all(".chip")) {
  chip.onclick = () => {
    if (!chosen.delete(chip.dataset.m)) chosen.add(chip.dataset.m);
    chip.setAttribute("aria-pressed", chosen.has(chip.dataset.m));
    light();
  };
  chip.onmouseenter = chip.onfocus = () => light(chip.dataset.m);
  chip.onmouseleave = chip.onblur = () => light();
}

/* sort */
for (const table of all("table.sortable")) {
  for (const button of all("thead button", table)) {
    button.onclick = () => {
      const head = button.closest("th"), place = head.cellIndex;
      const down = head.getAttribute("aria-sort") !== "descending";
      const value = (row) => +row.cells[place].dataset.v;
      const missing = down ? -Infinity : Infinity;
      const key = (row) => (Number.isNaN(value(row)) ? missing : value(row));
      const rows = all("tbody tr", table).sort((a, b) => (down ? key(b) - key(a) : key(a) - key(b)));
      for (const each of all("th[aria-sort]", table)) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    };
  }
}

/* copy */
for (const button of all("[data-copy]")) {
  button.onclick = async () => {
    const text = document.getElementById(button.dataset.copy).content.textContent;
    const said = document.querySelector(".said");
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = `copied ${text.trim().split("\n").length} lines`;
    } catch {
      said.textContent = "the browser does not allow copying";
    }
  };
}
