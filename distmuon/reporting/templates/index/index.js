"use strict";
const runs = JSON.parse(document.getElementById("runs").textContent);
for (const element of document.querySelectorAll(".scripted")) element.hidden = false;

// Sorting: numbers by size, texts by alphabet, what is absent last whichever way.
function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const key = row => row.cells[column].dataset.value ?? "";
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;
    return descending ? -order : order;
  };
  body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
}
for (const table of document.querySelectorAll("table.runs")) {
  for (const heading of table.tHead.rows[0].cells) {
    if (heading.classList.contains("choice")) continue;
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    button.onclick = () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, heading.cellIndex, descending);
    };
    heading.replaceChildren(button);
  }
}

// Comparison of the two runs chosen last.
let chosen = [];
for (const box of document.querySelectorAll("td.choice input")) {
  box.onchange = () => {
    chosen = chosen.filter(name => name !== box.value);
    if (box.checked) chosen.push(box.value);
    if (chosen.length > 2) chosen.shift();
    for (const other of document.querySelectorAll("td.choice input")) other.checked = chosen.includes(other.value);
    compareChosen();
  };
}
function compareChosen() {
  const place = document.getElementById("comparison");
  place.hidden = chosen.length < 2;
  if (place.hidden) return;
  const [a, b] = chosen.map(name => runs[name]);
  const names = kind => [...new Set([...Object.keys(a[kind]), ...Object.keys(b[kind])])];
  const rows = [["notebook", a.notebook, b.notebook], ["status", a.status, b.status]];
  for (const name of names("facts")) rows.push([name, a.facts[name] ?? "n/a", b.facts[name] ?? "n/a"]);
  const lines = rows.map(([name, one, other]) => [name, one, other, one === other ? "same" : "differs", ""]);
  for (const name of names("figures")) {
    const [one, other] = [a.figures[name] ?? null, b.figures[name] ?? null];
    const both = typeof one === "number" && typeof other === "number";
    const change = both && one !== 0 && !name.endsWith("(%)") ? `${(100 * (other / one - 1)).toFixed(1)} %` : "";
    lines.push(Object.assign([name, show(one), show(other), both ? show(other - one) : "n/a", change], {figure: true}));
  }
  const table = document.createElement("table");
  table.className = "report";
  table.createCaption().textContent = "Two runs beside one another";
  const head = table.createTHead().insertRow();
  for (const text of ["", chosen[0], chosen[1], "difference", "relative"]) {
    head.append(Object.assign(document.createElement("th"), {textContent: text}));
  }
  const body = table.createTBody();
  for (const line of lines) {
    const row = body.insertRow();
    row.className = line[1] === line[2] ? "same" : "";
    for (const [place, text] of line.entries()) {
      const cell = row.insertCell();
      cell.textContent = text;
      if (place && line.figure) cell.className = "number";
    }
  }
  place.replaceChildren(table);
}
function show(value) {
  if (value === null) return "n/a";
  return Number(value.toPrecision(6)).toLocaleString("en-US", {maximumFractionDigits: 6});
}
