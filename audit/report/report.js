"use strict";
// The page is complete without this script; it only sorts and filters the producers' table.
const filter = document.getElementById("filter");
if (filter) {
  filter.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const row of document.querySelectorAll("#producers tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
}
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.tabIndex = 0;
    const sort = () => {
      const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      const number = heading.classList.contains("number");
      const value = (row) => {
        const text = row.cells[column].textContent.trim();
        return number ? Number(text.replaceAll(",", "").replace("–", "-1")) : text;
      };
      const rows = [...table.tBodies[0].rows].sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        const way = number ? a - b : a.localeCompare(b);
        return order === "ascending" ? way : -way;
      });
      table.tBodies[0].append(...rows);
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
