// What the theme lacks for people without a mouse, or with a screen reader.
"use strict";

/** Let the keyboard reach each area that scrolls sideways. */
function reachAreas() {
  for (const area of document.querySelectorAll("pre, .table-wrapper")) {
    if (area.scrollWidth > area.clientWidth) area.tabIndex = 0;
    else area.removeAttribute("tabindex");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "All pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "This page");
  reachAreas();
  addEventListener("resize", reachAreas);
});
