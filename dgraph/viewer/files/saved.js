/** The page of runs that were saved with it. */

import { Viewer } from "./viewer.js";

const runs = JSON.parse(document.getElementById("runs").textContent);
new Viewer(document.getElementById("viewer")).show(runs);
