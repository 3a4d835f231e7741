// Pages work without this. With it parts of them stay fresh, and long work goes on by itself.
"use strict";
(() => {
  const focusOf = (part) => {
    const focused = document.activeElement;
    return focused && part.contains(focused) ? [focused.tagName, focused.getAttribute("href")] : null;
  };

  const restoreFocus = (part, focus) => {
    if (!focus) return;
    const same = [...part.querySelectorAll(focus[0])].find((one) => one.getAttribute("href") === focus[1]);
    if (same) same.focus({ preventScroll: true });
  };

  const openOnes = (part) => [...part.querySelectorAll("details")].map((one) => one.open);

  const replace = (part, html) => {
    const focus = focusOf(part);
    const open = openOnes(part);
    part.innerHTML = html;
    part.querySelectorAll("details").forEach((one, place) => { one.open = Boolean(open[place]); });
    restoreFocus(part, focus);
  };

  // Fetches a part anew every few seconds, unless the tab is hidden, somebody paused it, or the answer is no such part.
  const keepFresh = (part) => {
    const pause = document.querySelector("[data-faktory-pause]");
    const every = Number(part.dataset.faktoryEvery || 5) * 1000;
    let paused = false;
    let timer = 0;
    const plan = () => {
      clearTimeout(timer);
      if (!paused && !document.hidden) timer = setTimeout(refresh, every);
    };
    const refresh = async () => {
      try {
        const answer = await fetch(part.dataset.faktoryRefresh, { headers: { "X-Requested-With": "fetch" } });
        if (answer.redirected || answer.status === 403) return; // logged out
        if (answer.ok && !paused && !document.hidden) replace(part, await answer.text());
        if (part.querySelector("[data-faktory-ended]")) return;
      } catch (error) {
        // The server is away: the next try may find it.
      }
      plan();
    };
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
    if (pause) {
      pause.hidden = false;
      pause.addEventListener("click", () => {
        paused = !paused;
        pause.textContent = paused ? "Go on updating" : "Pause updates";
        if (paused) clearTimeout(timer); else refresh();
      });
    }
    plan();
  };

  // Sends the form of a step, shows the page that comes, and so on, until it has no form any more.
  const goOn = async (work) => {
    const form = work.querySelector("form[data-faktory-step]");
    if (!form) return;
    try {
      const answer = await fetch(form.action, { method: "POST", body: new FormData(form) });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const next = page.getElementById(work.id);
      if (!answer.ok || !next) throw new Error(String(answer.status));
      work.innerHTML = next.innerHTML;
    } catch (error) {
      work.querySelector("[data-faktory-stopped]").hidden = false; // the form is still there, with its button
      return;
    }
    goOn(work);
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("[data-faktory-refresh]").forEach(keepFresh);
    document.querySelectorAll("[data-faktory-work]").forEach(goOn);
  });
})();
