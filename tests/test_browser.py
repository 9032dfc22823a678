"""TensorBoard in a real browser, on a real short run: each page shows its charts and pictures.

FEDX_SCREENSHOTS=docs/screenshots pytest -m slow tests/test_browser.py      # keeps what it saw, for the docs
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedx_pl.config import compose
from fedx_pl.federation.orchestrator import Orchestrator, Silent
from fedx_pl.federation.plan import prepare

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# WebGL without a GPU, for the projector.
FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]
PAGES = {
    "Accuracy": ["Linear probe, top-1 (%)", "kNN, top-1 (%)"],
    "Losses": ["total, mean ± std of the clients", "global_relation, mean ± std of the clients"],
    "Clients": ["Drift", "Angle", "Divergence d of FedU", "Loss by step"],
    "Health": ["Standard deviation", "Uniformity", "RankMe", "Updates refused"],
    "System": ["Images per second", "Share of the work", "Memory", "Traffic of a round", "Traffic in all"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser; apt-get install chromium"),
]


@pytest.fixture(scope="module")
def address(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on FedU without and with FedX."""
    root = tmp_path_factory.mktemp("runs")
    for fedx in ("false", "true"):
        words = [
            f"data.root={tiny_root}", "data.verify=false", "data.download=false", "method=fedu", f"fedx={fedx}",
            "backbone.name=resnet10", "backbone.width=4", "federation.clients=3", "federation.rounds=3",
            "federation.epochs=1", "optim.batch_size=32", "evaluation.linear.epochs=5", "evaluation.linear_every=1",
            "run.threads=1", f"run.dir={root / f'fedu-fedx-{fedx}'}",
        ]  # fmt: skip
        Orchestrator(prepare(compose(words), report=lambda line: None), Silent()).run()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(root), "--port", "0", "--host", "127.0.0.1"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            for line in server.stderr:
                log.write(line)
                if found := re.search(r"http://\S+", line):
                    yield found[0]
                    break
            else:
                log.seek(0)
                pytest.fail(log.read())
        finally:
            server.terminate()
            server.wait()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator["Page"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield Page(browser.new_page(viewport={"width": 1400, "height": 1000}), address)
        browser.close()


class Page:
    """A browser's window on TensorBoard."""

    def __init__(self, page: object, address: str) -> None:
        from playwright.sync_api import Page as Window

        assert isinstance(page, Window)
        self.window, self.address = page, address

    def open(self, tab: str, height: int = 1000) -> None:
        self.window.set_viewport_size({"width": 1400, "height": height})
        self.window.goto("about:blank")
        self.window.goto(f"{self.address}#{tab}")

    def wait_for(self, text: str) -> None:
        """Until it can be seen, in whatever frame (the projector lives in one of its own)."""
        for _ in range(300):
            if any(frame.get_by_text(text).locator("visible=true").count() for frame in self.window.frames):
                return
            self.window.wait_for_timeout(200)
        pytest.fail(f"{text!r} did not show within a minute")

    def keep(self, name: str) -> None:
        if folder := os.environ.get("FEDX_SCREENSHOTS"):
            self.window.wait_for_timeout(3000)  # Charts glide into place.
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.window.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_each_page_shows_its_charts(page: Page) -> None:
    page.open("custom_scalars", height=3200)
    for title, charts in PAGES.items():
        page.wait_for(title)
        for chart in charts:
            page.wait_for(chart)
    page.wait_for("Matches (4)")  # accuracy: two runs, now and best
    page.keep("pages")


def test_pictures_of_the_embedding_the_split_and_the_views(page: Page) -> None:
    page.open("images", height=1600)
    for tag in ("embedding/map", "embedding/neighbours", "partition/heatmap", "views"):
        page.wait_for(tag)
    page.keep("images")


def test_a_sweep_can_be_sorted_by_its_settings(page: Page) -> None:
    page.open("hparams")
    for column in ("Data", "FedX", "Method", "Rounds", "Seed", "accuracy/linear_top1"):
        page.wait_for(column)
    page.wait_for("fedu")
    page.keep("hparams")


def test_the_projector_shows_the_final_embedding(page: Page) -> None:
    page.open("projector")
    page.wait_for("Points: 60")
    page.keep("projector")


def test_the_configuration_is_there_as_text(page: Page) -> None:
    page.open("text")
    page.wait_for("config")
    page.keep("text")
