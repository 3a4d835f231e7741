// Pages work without this script. With it, parts of them are updated, and bulk actions continue without a click.
"use strict";
(() => {
  const identityOf = (one) => [one.tagName, ...["href", "name", "value"].map((name) => one.getAttribute(name))].join(" ");

  const focusOf = (part) => {
    const focused = document.activeElement;
    return focused && part.contains(focused) ? identityOf(focused) : null;
  };

  const restoreFocus = (part, focus) => {
    if (!focus) return;
    const same = [...part.querySelectorAll("a, button, input, select, summary")].find((one) => identityOf(one) === focus);
    if (same) same.focus({ preventScroll: true });
  };

  // The CSRF token differs in each answer, which is no change of the contents.
  const withoutToken = (html) => html.replace(/name="csrfmiddlewaretoken" value="[^"]*"/g, "");

  const openStates = (part) => [...part.querySelectorAll("details")].map((one) => one.open);

  // On a phone a row of a table is shown as a card, whose cells need the names of their columns.
  const labelCells = (root) => {
    root.querySelectorAll(".faktory-wide table, #result_list").forEach((table) => {
      if (table.id === "result_list" && table.closest("[x-data]")) return; // django-unfold has cards of its own
      // The head of a sorted column also has links and its place in the order.
      const nameOf = (head) => head.dataset.name || (head.querySelector(".text") || head).textContent.trim();
      const columns = [...table.querySelectorAll("thead tr:last-child th")].map(nameOf);
      const hasOneHead = table.querySelectorAll("thead tr").length <= 1;
      table.classList.toggle("faktory-cards", hasOneHead);
      if (!hasOneHead) return; // a head of two rows: it scrolls instead
      table.querySelectorAll("tbody tr").forEach((row) => {
        [...row.children].forEach((cell, index) => { cell.dataset.label = columns[index] || ""; });
      });
    });
  };

  // Adds to each time how long ago it was, or how far ahead it is, in the language of the page.
  const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const showAges = (root) => {
    const format = new Intl.RelativeTimeFormat(document.documentElement.lang || "en", { style: "short" });
    root.querySelectorAll("time[datetime]").forEach((one) => {
      const seconds = (Date.parse(one.dateTime) - Date.now()) / 1000;
      if (Number.isNaN(seconds) || one.closest("[data-faktory-no-age]")) return;
      const [unit, size] = UNITS.find(([, length]) => Math.abs(seconds) >= length) || UNITS[3];
      one.dataset.age = format.format(Math.trunc(seconds / size), unit);
    });
  };

  // Shows the buttons that copy the text of an element. Browsers allow it on HTTPS and localhost only.
  const offerCopies = (root) => {
    if (!navigator.clipboard) return;
    root.querySelectorAll('button[name="copy"]').forEach((button) => {
      const label = button.textContent;
      const show = (text) => { button.textContent = text; setTimeout(() => { button.textContent = label; }, 2000); };
      button.hidden = false;
      button.addEventListener("click", () => {
        const source = document.getElementById(button.value);
        const text = (source.querySelector("pre") || source).textContent;
        navigator.clipboard.writeText(text).then(() => show(button.dataset.copied), () => show(button.dataset.failed));
      });
    });
  };

  const replace = (part, html) => {
    const focus = focusOf(part);
    const states = openStates(part);
    part.innerHTML = html;
    part.querySelectorAll("details").forEach((one, index) => { one.open = Boolean(states[index]); });
    labelCells(part);
    showAges(part);
    offerCopies(part);
    restoreFocus(part, focus);
  };

  // Replaces the form of a list, with its rows, counts and pages. Django's script handles the new checkboxes.
  const replaceList = (form, html) => {
    const focus = focusOf(form);
    form.innerHTML = html;
    labelCells(form);
    showAges(form);
    const boxes = form.querySelectorAll("tr input.action-select");
    if (boxes.length && window.Actions) window.Actions(boxes);
    restoreFocus(form, focus);
  };

  // The user is choosing rows or typing: a new version of the part would discard the input.
  const isInUse = (part) =>
    part.querySelector('input:checked, select:focus, input:not([type="checkbox"]):focus, textarea:focus') !== null ||
    [...part.querySelectorAll('input[type="text"], input[name="why"]')].some((one) => one.value);

  // The same page again, of which only the part with this id is used.
  const partOfPage = async (answer, id) => {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const part = page.getElementById(id);
    if (!part) throw new Error("the page has no such part");
    return part.innerHTML;
  };

  // Fetches a part every few seconds, unless the tab is hidden, the user paused it, or the session has ended.
  const keepFresh = (part, url, read, put) => {
    const pause = document.querySelector("[data-faktory-pause]");
    const stale = document.querySelector("[data-faktory-stale]");
    // The page has the texts, in the language of the reader, as data attributes of this element.
    const warn = (name) => {
      if (!stale) return;
      const text = name ? stale.dataset[name] : "";
      stale.textContent = text;
      stale.hidden = !text;
    };
    const everyMs = Number(part.dataset.faktoryEvery || 5) * 1000;
    let paused = false;
    let timer = 0;
    let shown = "";
    const plan = () => {
      clearTimeout(timer);
      if (!paused && !document.hidden) timer = setTimeout(refresh, everyMs);
    };
    const refresh = async () => {
      try {
        const answer = await fetch(url, { headers: { "X-Requested-With": "fetch" } });
        if (answer.redirected || answer.status === 403) {
          warn("loggedOut");
          return;
        }
        if (answer.status === 404) {
          warn("gone");
          return;
        }
        if (!answer.ok) throw new Error(String(answer.status));
        const html = await read(answer);
        // Unchanged parts stay, so that a selection of text stays too.
        if (!paused && !document.hidden && !isInUse(part) && withoutToken(html) !== shown) {
          put(part, html);
          shown = withoutToken(html);
        }
        warn("");
        if (part.querySelector("[data-faktory-ended]")) return;
      } catch (error) {
        warn("offline");
      }
      plan();
    };
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
    if (pause) {
      pause.hidden = false;
      pause.addEventListener("click", () => {
        paused = !paused;
        pause.textContent = paused ? pause.dataset.resume : pause.dataset.pause;
        if (paused) clearTimeout(timer); else refresh();
      });
    }
    plan();
  };

  // Sends the form of a bulk action's next step and shows the returned page, until a page has no form.
  const continueRun = async (work) => {
    const form = work.querySelector("form[data-faktory-step]");
    if (!form) return;
    const stop = (name) => {
      const note = work.querySelector("[data-faktory-stopped]");
      note.textContent = note.dataset[name];
      note.hidden = false; // the form is still there, with its button
    };
    try {
      const answer = await fetch(form.action, { method: "POST", body: new FormData(form) });
      if (answer.redirected) {
        stop("loggedOut");
        return;
      }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const next = page.getElementById(work.id);
      if (!answer.ok || !next) throw new Error(String(answer.status));
      work.innerHTML = next.innerHTML;
    } catch (error) {
      stop("stopped");
      return;
    }
    continueRun(work);
  };

  // A second click on a button must not send its form again. A page from the browser's history can send once more.
  const sendOnce = (form) => {
    const buttons = [...form.querySelectorAll('[type="submit"]')];
    const allow = (allowed) => buttons.forEach((one) => { one.disabled = !allowed; });
    form.addEventListener("submit", () => setTimeout(() => allow(false)));
    window.addEventListener("pageshow", () => allow(true));
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("form[data-faktory-once]").forEach(sendOnce);
    offerCopies(document);
    labelCells(document);
    showAges(document);
    setInterval(() => showAges(document), 10000);
    document.querySelectorAll("[data-faktory-refresh]").forEach((part) => {
      keepFresh(part, part.dataset.faktoryRefresh, (answer) => answer.text(), replace);
    });
    document.querySelectorAll("[data-faktory-live]").forEach((part) => {
      keepFresh(part, window.location.href, (answer) => partOfPage(answer, part.id), replace);
    });
    // Forms of Django's own templates, which cannot be marked themselves. In django-unfold another script owns the list.
    document.querySelectorAll("[data-faktory-follow]").forEach((mark) => {
      const form = document.getElementById(mark.dataset.faktoryFollow);
      if (!form || form.closest("[x-data]")) return;
      const put = form.id === "changelist-form" ? replaceList : replace;
      keepFresh(form, window.location.href, (answer) => partOfPage(answer, form.id), put);
    });
    document.querySelectorAll("[data-faktory-work]").forEach(continueRun);
  });
})();
