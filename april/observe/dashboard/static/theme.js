// Applies the chosen theme, light or dark, before the first paint; a page in a sandbox remembers none.
try {
  const chosen = localStorage.getItem("april-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {}
