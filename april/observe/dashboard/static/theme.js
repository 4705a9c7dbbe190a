// Applies the chosen theme, light or dark, before the first paint.
const chosen = localStorage.getItem("april-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
