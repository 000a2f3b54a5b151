// What the server must know of this browser: its colour scheme and its width, as the store "browser".
(function () {
  "use strict";
  var dark = window.matchMedia("(prefers-color-scheme: dark)");

  function describe() {
    document.body.dataset.agThemeMode = dark.matches ? "dark" : "light";
    return { scheme: dark.matches ? "dark" : "light", width: Math.round(window.innerWidth / 40) * 40 };
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    workbench: {
      browser: function (pathname, known) {
        return known ? window.dash_clientside.no_update : describe();
      },
    },
  });

  dark.addEventListener("change", function () {
    window.dash_clientside.set_props("browser", { data: describe() });
  });

  // A hidden page asks for nothing.
  document.addEventListener("visibilitychange", function () {
    if (document.getElementById("tick")) {
      window.dash_clientside.set_props("tick", { disabled: document.hidden });
    }
  });
})();
