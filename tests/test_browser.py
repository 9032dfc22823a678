"""TensorBoard and the report in a real browser: each page shows its charts and pictures.

Keeps screenshots for the docs with

    FEDX_SCREENSHOTS=docs/screenshots pytest -m slow tests/test_browser.py
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import EXPERIMENTS, THREADS, fitted

from fedx_pl.config.compose import compose
from fedx_pl.experiments.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# The projector needs WebGL, here without a GPU.
FLAGS = [
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
]
# By page and chart, how many curves two runs have: of both, of the three clients, or of FedX only.
PAGES = {
    "Accuracy": {
        "Linear probe, top-1 (%); best: on the test images": 4,
        "kNN, top-1 (%); best: on the test images": 4,
    },
    "Losses": {"total, mean ± std": 2, "byol, mean ± std": 2, "global_relation, mean ± std": 1},
    "Clients": {
        "Drift": 6,
        "Angle": 6,
        "Divergence d of FedU": 6,
        "Loss by step": 6,
        "Images of the clients": 6,
    },
    "Health": {"Standard deviation": 2, "Uniformity": 2, "RankMe": 2, "Updates refused": 2},
    "System": {
        "Images per second": 2,
        "Share of the work": 8,
        "Memory": 2,
        "Traffic of a round": 4,
        "Traffic in all": 2,
    },
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def address(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of TensorBoard, which shows FedU without and with FedX."""
    root = tmp_path_factory.mktemp("runs")
    for fedx in ("false", "true"):
        words = [
            "profile=paper",
            f"data.root={tiny_root}",
            "data.verify=false",
            "data.download=false",
            "method=fedu",
            f"fedx={fedx}",
            "backbone.name=resnet10",
            "backbone.width=4",
            "federation.clients=3",
            "federation.rounds=3",
            "federation.epochs=1",
            "optim.batch_size=32",
            "evaluation.linear.epochs=5",
            "evaluation.linear_every=1",
            f"run.threads={THREADS}",
            f"run.dir={root / f'fedu-fedx-{fedx}'}",
        ]
        fitted(compose(words))
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(root),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    log = root / "log"
    with open(log, "w") as lines:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=lines)
    try:
        for _ in range(1500):
            if found := re.search(r"http://\S+", log.read_text()):
                yield found[0]
                return
            time.sleep(0.2)
        pytest.fail(log.read_text())
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(address: str, browser: "Browser") -> "Page":
    return Page(browser.new_page(viewport={"width": 1400, "height": 1000}), address)


class Page:
    """A browser window with TensorBoard."""

    def __init__(self, page: object, address: str) -> None:
        from playwright.sync_api import Page as Window

        assert isinstance(page, Window)
        self.window = page
        self.address = address

    def open(self, tab: str, height: int = 1000) -> None:
        self.window.set_viewport_size({"width": 1400, "height": height})
        self.window.goto("about:blank")
        self.window.goto(f"{self.address}#{tab}")

    def wait_for(self, text: str, within: str = "", exact: bool = False) -> None:
        """Waits until a text can be seen in any frame, since the projector has its own."""
        for _ in range(1500):
            for frame in self.window.frames:
                place = frame.locator(within) if within else frame
                if place.get_by_text(text, exact=exact).locator("visible=true").count():
                    return
            self.window.wait_for_timeout(200)
        pytest.fail(f"{text!r} did not show within five minutes")

    def wait_for_images(self, count: int) -> None:
        """Waits until so many images are loaded."""
        loaded = "images => images.filter(image => image.naturalWidth > 0).length"
        for _ in range(1500):
            if self.window.locator("img").evaluate_all(loaded) >= count:
                return
            self.window.wait_for_timeout(200)
        pytest.fail(f"{count} images did not load within five minutes")

    def keep(self, name: str) -> None:
        if folder := os.environ.get("FEDX_SCREENSHOTS"):
            self.window.wait_for_timeout(3000)  # Charts are animated.
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.window.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_each_page_shows_its_charts(page: Page) -> None:
    page.open("custom_scalars", height=3200)
    for title, charts in PAGES.items():
        page.wait_for(title, exact=True)
        for chart, curves in charts.items():
            # The card of a chart, whichever kind, says how many curves of all runs it has found.
            kinds = ("tf-custom-scalar-multi-line-chart-card", "tf-custom-scalar-margin-chart-card")
            card = ", ".join(f"{kind}:has-text({chart!r})" for kind in kinds)
            page.wait_for(f"Matches ({curves})", within=card)
    page.keep("pages")


def test_the_images_page_shows_the_embedding_the_split_and_the_views(page: Page) -> None:
    page.open("images", height=1600)
    for tag in ("embedding/map", "embedding/neighbors", "partition/heatmap"):
        page.wait_for(tag)
    page.wait_for("views", exact=True)
    page.wait_for_images(4)
    page.keep("images")


def test_the_hparams_page_has_a_column_for_each_setting(page: Page) -> None:
    page.open("hparams")
    for column in ("Data", "FedX", "Method", "Rounds", "Seed", "accuracy/linear_top1"):
        page.wait_for(column, exact=column.isalpha())
    page.wait_for("fedu", exact=True)
    page.keep("hparams")


def test_the_projector_shows_the_final_embedding(page: Page) -> None:
    page.open("projector")
    page.wait_for("Points: 60")
    page.keep("projector")


def test_the_text_page_shows_the_configuration(page: Page) -> None:
    page.open("text")
    page.wait_for("client_curves: 10")
    page.keep("text")


@pytest.mark.parametrize("width", [400, 1400])
def test_the_report_fits_the_window_and_its_links_lead_to_headings(
    browser: "Browser", tmp_path: Path, width: int
) -> None:
    write_report(EXPERIMENTS / "results" / "cpu", EXPERIMENTS, tmp_path)
    window = browser.new_page(viewport={"width": width, "height": 800})
    requests: list[str] = []
    window.on("request", lambda request: requests.append(request.url))
    window.goto((tmp_path / "report.html").as_uri())
    assert window.evaluate("document.documentElement.scrollWidth") <= width
    assert window.locator("img").evaluate_all("all => all.map(one => one.naturalWidth > 0)") == [
        True
    ]
    targets = window.locator('a[href^="#"]').evaluate_all(
        "all => all.map(one => document.getElementById(one.hash.slice(1))?.tagName)"
    )
    assert len(targets) > 3
    assert set(targets) == {"H2"}
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
