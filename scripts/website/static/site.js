// What the course adds to Sphinx's scripts.

// a page that is opened as a file can't read others: results are shown without a summary there
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false

// what is wider than the page scrolls within itself: by keyboard, too
function reachable() {
  for (const box of document.querySelectorAll(".highlight pre, .table-wrapper, .output pre")) {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0
      box.setAttribute("role", "group")
      box.setAttribute("aria-label", box.matches("pre") ? "code, scrolls" : "table, scrolls")
    }
  }
}
addEventListener("DOMContentLoaded", () => {
  reachable()
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "all pages")
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "this page")
})
addEventListener("resize", reachable)
document.addEventListener("toggle", reachable, true)  // what was folded has no width
