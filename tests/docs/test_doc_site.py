"""The site: it builds without a warning, without the network, and says what the code says."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doc_blocks import ROOT
from helpers import PATIENCE
from test_doc_extras import environment_without, modules_of_extras

import fedx_pl
from fedx_pl.config.schema import all_keys
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.parameters import hyper_parameters

pytest.importorskip("mkdocs", reason="needs MkDocs: pip install -e '.[docs]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("docs")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does, with the `docs` extra only.

    A stale link, anchor or page is an error.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    # A proxy that nobody answers at: what asks the network fails.
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    hook = tmp_path_factory.mktemp("hook")
    docs_only = environment_without(modules_of_extras("docs"), hook)
    environment = {**docs_only, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Resources(HTMLParser):
    """Collects the files that a browser fetches to show a page, but no links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video"):
            self.found.append(values.get("src") or "")
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(values.get("href") or "")


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        reader = Resources()
        reader.feed(page.read_text())
        assert reader.found
        elsewhere = [name for name in reader.found if "//" in name]
        assert not elsewhere, f"{page.name}: {elsewhere}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


def test_every_key_and_every_command_has_its_line(site: Path) -> None:
    page = (site / "reference" / "configuration.html").read_text()
    keys = [key for key, _, _ in all_keys()]
    keys += [f"method.{key}" for method in BUILT_IN.values() for key in hyper_parameters(method)]
    assert len(keys) > 100
    for key in keys:
        assert f"<code>{key}=" in page, f"{key} is not on the page"
    page = (site / "reference" / "cli.html").read_text()
    for command in (
        "train",
        "data",
        "evaluate",
        "sweep",
        "report",
        "export",
        "embed",
        "neighbors",
        "federate server",
    ):
        assert f"<code>fedx-pl {command}</code>" in page, f"fedx-pl {command} is not on the page"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    for name in fedx_pl.__all__:
        assert f'id="fedx_pl.{name}"' in page, f"docs/reference/api.md lacks ::: fedx_pl.{name}"


def test_equations_are_drawn_and_stand_beside_their_code(site: Path) -> None:
    page = (site / "how-fedx-works.html").read_text()
    numbers = re.findall(r'&#x00028;</mo><mn>(\d+)</mn><mo stretchy="false">&#x00029;', page)
    assert [int(number) for number in numbers] == list(range(1, 15))
    assert "$$" not in page
    assert 'class="arithmatex"' not in page
    for name in (
        "relational",
        "nt_xent",
        "global_contrast",
        "_see",
        "training_step",
        "interclass_angles",
    ):
        assert re.search(rf'<span class="n[fc]( fm)?">{name}</span>', page), (
            f"the code of {name} is not on the page"
        )


def test_files_beside_the_code_are_pages_too(site: Path) -> None:
    report = (site / "evidence" / "report.html").read_text()
    assert "<table>" in report
    assert (site / "evidence" / "figures" / "curves.png").exists()
    assert 'src="figures/curves.png"' in report
    assert not (site / "hooks.py").exists()
