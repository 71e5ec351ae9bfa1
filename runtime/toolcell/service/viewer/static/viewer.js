// What the pages need besides htmx. Nothing here makes HTML of text.
"use strict";
(() => {
  const said = () => document.getElementById("said");

  // A part that is loaded again keeps what was unfolded in it.
  let open = new Set();
  document.addEventListener("htmx:beforeSwap", (event) => {
    open = new Set([...event.detail.target.querySelectorAll("details[open][id]")].map((each) => each.id));
  });
  document.addEventListener("htmx:afterSettle", () => {
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    open = new Set();
  });

  // Say aloud that runs arrived; the list itself is not read again.
  document.addEventListener("htmx:afterSwap", () => {
    const count = Number(document.getElementById("new-runs")?.dataset.new || 0);
    if (count && said()) said().textContent = count === 1 ? "1 new run" : `${count} new runs`;
  });

  // A link to a call unfolds it.
  const unfold = () => {
    const target = location.hash.startsWith("#call-") && document.getElementById(location.hash.slice(1));
    if (target) target.setAttribute("open", "");
  };
  addEventListener("hashchange", unfold);
  unfold();

  // "/" goes to the search field.
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const field = document.querySelector("input[type=search]");
    if (field) {
      event.preventDefault();
      field.focus();
    }
  });
})();

(() => {
  // Ctrl+Enter sends what was typed; the field is emptied when the server took it.
  addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.closest(".prompt")) {
      event.preventDefault();
      event.target.form.requestSubmit();
    }
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    const name = event.detail.elt.dataset?.clear;
    if (!name || !event.detail.successful) return;
    const field = event.detail.elt.elements[name];
    field.value = "";
    field.focus();
  });

  // A terminal shows its end.
  const terminal = document.getElementById("terminal");
  if (terminal) new MutationObserver(() => (terminal.scrollTop = terminal.scrollHeight)).observe(terminal, { childList: true, subtree: true });
})();
