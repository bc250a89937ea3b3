// Light or dark: as the system says, unless this browser was told.
export type Theme = "" | "light" | "dark";

export function savedTheme(): Theme {
  return (localStorage.getItem("thunder.theme") ?? "") as Theme;
}

export function applyTheme(theme: Theme = savedTheme()): void {
  if (theme) localStorage.setItem("thunder.theme", theme);
  else localStorage.removeItem("thunder.theme");
  if (theme) document.documentElement.dataset["theme"] = theme;
  else delete document.documentElement.dataset["theme"];
}
