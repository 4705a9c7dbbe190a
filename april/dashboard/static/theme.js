// Before anything is painted: light or dark, where it was chosen.
const chosen = localStorage.getItem("april-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
