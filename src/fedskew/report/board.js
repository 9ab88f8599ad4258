// The board's page: check boxes hide rows through a class of the body (see board.css), buttons in table heads sort rows.
"use strict";
for (const box of document.querySelectorAll(".filters input")) {
  const apply = () => document.body.classList.toggle(box.value, box.checked);
  box.addEventListener("change", apply);
  apply();  // a browser may keep a tick when a page is loaded again
}
for (const button of document.querySelectorAll(".board th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = button.closest("table"), place = head.cellIndex;
    const before = head.getAttribute("aria-sort"), first = head.dataset.first || "descending";
    const order = before === null ? first : before === "descending" ? "ascending" : "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1, body = table.tBodies[0];
    const value = row => row.cells[place].dataset.value ?? "";
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");  // what has no value is last, whatever the order
      const difference = Number(x) - Number(y);
      return sign * (Number.isNaN(difference) ? x.localeCompare(y) : difference);
    });
    body.append(...rows);
  });
}
