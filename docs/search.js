// Scores of the site's search, and suggestions for misspelt words. Sphinx inserts this file into its search (conf.py).
"use strict";

/* exported Scorer */
var Scorer = {
  // A guide explains what a name of the reference only defines.
  score: ([docname, , , , score]) => (docname.startsWith("reference/") ? score - 4 : score),
  objNameMatch: 17,
  objPartialMatch: 2,
  objPrio: { 0: 0, 1: 0, 2: 0 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

/** Return the number of edits between two words, of which a swap of neighbours is one; `most` + 1 if there are more. */
function edits(one, other, most) {
  if (Math.abs(one.length - other.length) > most) return most + 1;
  let before = [], row = [...Array(other.length + 1).keys()];
  for (let i = 1; i <= one.length; i++) {
    const next = [i];
    for (let j = 1; j <= other.length; j++) {
      const isSame = one[i - 1] === other[j - 1];
      next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (isSame ? 0 : 1));
      const isSwap = i > 1 && j > 1 && one[i - 1] === other[j - 2] && one[i - 2] === other[j - 1];
      if (isSwap) next[j] = Math.min(next[j], before[j - 2] + 1);
    }
    [before, row] = [row, next];
  }
  return row[other.length];
}

/** Return the query with each unknown word replaced by the most similar word of the pages; null if none is replaced. */
function suggest(query, counts) {
  const words = splitQuery(query.toLowerCase());
  const better = words.map((word) => {
    if (word in counts || word.length < 4) return word;
    const most = word.length < 6 ? 1 : 2;
    let best = word, fewest = most + 1;
    for (const known in counts) {
      const needed = edits(word, known, most);
      if (needed < fewest || (needed === fewest && needed <= most && counts[known] > counts[best])) {
        [best, fewest] = [known, needed];
      }
    }
    return best;
  });
  return better.some((word, place) => word !== words[place]) ? better.join(" ") : null;
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    const heading = document.createElement("h1");
    heading.textContent = "Search";
    document.getElementById("search-results").before(heading);
    const query = new URLSearchParams(location.search).get("q") ?? "";
    const better = suggest(query, JSON.parse(document.getElementById("words-of-the-pages").textContent));
    if (better === null) return;
    const line = document.createElement("p");
    const link = document.createElement("a");
    link.href = `?q=${encodeURIComponent(better)}`;
    link.textContent = better;
    line.append("Did you mean ", link, "?");
    document.getElementById("search-results").before(line);
  });
}
