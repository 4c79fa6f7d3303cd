"""The HTML report in a browser: its script runs, sorts, switches and draws, and writes names as plain text.

A slow test, because it needs Chromium: ``python -m pytest -m slow tests/results/test_html_in_a_browser.py``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from fedjax_async.results import store, write_report
from tests.results.made_up import make_run
from tests.results.page import NASTY, save_comparison, seeded

INSTALL = "this test needs Chromium: apt-get install chromium (Debian), or put it on the PATH as chromium"
# Actions of a reader, and what the page then shows; it is written into the page for --dump-dom.
ACTIONS = """
<script>
setTimeout(() => {
  const found = {}, all = (query) => [...document.querySelectorAll(query)], plot = document.getElementById("curves");
  const column = (table, at) => [...table.querySelectorAll("tbody tr")].map((row) => row.children[at].textContent);
  const visible = () => Object.fromEntries(["mean", "band", "seed"].map((part) =>
    [part, plot.data.filter((trace) => trace.meta.part === part && trace.visible === true).length]));
  const change = (element, set) => { set(element); element.dispatchEvent(new Event("change")); };
  const methods = document.querySelector("table");
  found.before = column(methods, 1);
  methods.querySelectorAll("th button")[1].click();
  found.rising = column(methods, 1);
  methods.querySelectorAll("th button")[1].click();
  found.falling = column(methods, 1);
  found.start = visible();
  const boxes = all("input[type=checkbox]");
  change(boxes[1], (box) => { box.checked = true; });
  found.seeds = visible();
  change(boxes[0], (box) => { box.checked = false; });
  change(boxes[2], (box) => { box.checked = false; });
  found.two = visible();
  plot.emit("plotly_legendclick", { curveNumber: 0 });
  found.hidden = visible();
  const [metric, unit, run] = all("select");
  change(metric, (select) => { select.value = "loss"; });
  change(unit, (select) => { select.value = "bytes"; });
  found.loss = [plot.layout.yaxis.title.text, plot.layout.xaxis.title.text, visible().mean];
  change(run, (select) => { select.value = "1"; });
  found.plots = all(".plot .main-svg").length > 0 && all(".plot").map((each) => each.data.length > 0);
  found.names = all("td").map((cell) => cell.textContent);
  found.injected = all("main img, main script, main b").length;
  found.errors = all(".error").map((each) => each.textContent);
  found.requests = performance.getEntriesByType("resource").map((each) => each.name);
  const result = document.createElement("pre");
  result.id = "found";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
}, 500);
</script>
"""


def browse(page) -> dict:
    """Open ``page`` in headless Chromium, run the actions, and return what it then shows."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, INSTALL
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{ACTIONS}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,3000", "--virtual-time-budget=20000"]
    command = [browser, *options, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(unescape(found))


@pytest.mark.slow
def test_a_reader_sorts_switches_and_hides(tmp_path):
    scores = [[0.1, 0.4, 0.7], [0.1, 0.6, 0.5], [0.1, 0.3, 0.65]]
    runs = {"fedavg": seeded(scores), NASTY: seeded([[*row[:1], 0.9, 0.95] for row in scores], NASTY)}
    folder = save_comparison(tmp_path / "three", runs)
    lone = store.save(make_run([0.1, 0.2]), tmp_path / "lone")
    found = browse(write_report([folder, lone], tmp_path / "page.html"))
    assert found["errors"] == [] and found["requests"] == [] and found["injected"] == 0
    assert NASTY in found["names"]
    assert [text.split()[0] for text in found["rising"]] == ["61.67", "95.00"]
    assert found["falling"] == found["rising"][::-1]
    assert found["start"] == {"mean": 3, "band": 2, "seed": 0}
    assert found["seeds"] == {"mean": 3, "band": 2, "seed": 6}
    assert found["two"] == {"mean": 3, "band": 0, "seed": 4}  # without seed 0
    assert found["hidden"] == {"mean": 2, "band": 0, "seed": 2}
    assert found["loss"] == ["test loss", "sent, both directions (kB)", 2]
    assert found["plots"] == [True] * 3
