"use strict";

// Pages of what goes on: the server makes the new content, too, so that nothing is rendered twice over.
for (const box of document.querySelectorAll("[data-refresh]")) {
  const renew = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(box.id);
      if (made) box.replaceChildren(...made.childNodes);
      box.classList.remove("stale");
    } catch {
      box.classList.add("stale"); // shown faint: the server has ended, or does not answer
    }
  };
  const again = () => setTimeout(() => renew().finally(again), Number(box.dataset.refresh));
  again();
}
